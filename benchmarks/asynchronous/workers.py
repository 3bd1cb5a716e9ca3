"""Compares the best number of workers by 1-bit SGD's formula with speed-ups measured on a shaped link.

Devices are emulated: a worker waits as long as its share of the batch was measured to take, so any number of them can
run on few cores; the exchange is real, on a shaped link. K-hat (equation 4 of the paper) is computed from figures of
two workers, and is shown beside the speed-up that was measured with one to four.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from pathlib import Path

import torch

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.rig.rank import process_group
from hybridpar.compress import Exchange, TensorSpec, TorchGroup, bind, parse_codec
from hybridpar.optim.k_hat import KHat

LINK = "100mbit"
MOST = 4
CODEC = "onebit"
#: Steps that are not counted.
FIRST = 3
#: Matrices of the emulated model, a million elements; samples of a batch over all workers; seconds of a sample. At
#: 8 ms K-hat of float32 lies below two workers, at 16 ms below three.
SHAPES = ((512, 512),) * 4
SAMPLES = 64
SAMPLE_S = (8e-3, 16e-3)


def measure(quick: bool, rounds: int, keep_busy: bool, notes: str) -> None:
    """Time exchanges and whole steps with this many workers; in this rank.

    Args:
        quick: A small model.
        rounds: Steps.
        keep_busy: Of no effect: workers wait most of the time.
        notes: File for what was measured.
    """
    del keep_busy
    shapes, count = (((64, 64),), 5) if quick else (SHAPES, rounds)
    with process_group(timeout=120) as (rank, ranks):
        result = {
            f"{text} {sample_s}": _times(text, sample_s, shapes, count, rank, ranks)
            for sample_s in SAMPLE_S
            for text in ("none", CODEC)
        }
    if rank == 0:
        Path(notes).write_text(json.dumps(result))


def _times(
    text: str, sample_s: float, shapes: tuple[tuple[int, int], ...], count: int, rank: int, ranks: int
) -> dict[str, list[float]]:
    """Seconds of an exchange, of an update, of whole steps, and of steps with the exchange behind computing."""
    group, codec = TorchGroup(), parse_codec(text)
    exchange = Exchange([bind(codec, TensorSpec(str(i), shape, rank, ranks)) for i, shape in enumerate(shapes)])
    draw = torch.Generator().manual_seed(rank)
    flats = [torch.randn(shape[0] * shape[1], generator=draw) for shape in shapes]
    weights = [torch.zeros_like(flat) for flat in flats]
    outs = [torch.empty_like(flat) for flat in flats]
    compute_s = SAMPLES / ranks * sample_s

    def send() -> None:
        exchange.run(group, flats, outs)
        exchange.commit()

    def update() -> None:
        for weight, out in zip(weights, outs, strict=True):
            weight.add_(out, alpha=-0.1)

    times: dict[str, list[float]] = {"sync_s": [], "step_s": [], "update_s": [], "buffered_s": []}
    for _ in range(FIRST + count):
        began = time.perf_counter()
        time.sleep(compute_s)
        computed = time.perf_counter()
        send()
        arrived = time.perf_counter()
        update()
        done = time.perf_counter()
        times["sync_s"].append(arrived - computed)
        times["update_s"].append(done - arrived)
        times["step_s"].append(done - began)
    for _ in range(FIRST + count):
        began = time.perf_counter()
        late = threading.Thread(target=send)  # the gradients of the batch before
        late.start()
        time.sleep(compute_s)
        late.join()
        update()
        times["buffered_s"].append(time.perf_counter() - began)
    return {name: values[FIRST:] for name, values in times.items()}


def conclude(folder: Path, quick: bool, output: str | None) -> None:
    """Set what is predicted beside what was measured.

    Args:
        folder: Where the notes are, by number of workers.
        quick: Say so.
        output: The table's file.
    """
    found = {int(path.stem): json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    checks = []
    for case in found[2]:
        text, sample_s = case.split()[0], float(case.split()[1])
        sync_s, update_s = (statistics.median(found[2][case][name]) for name in ("sync_s", "update_s"))
        alone = SAMPLES * sample_s + update_s
        known = KHat(SAMPLES, 1e3 * sample_s, 1e3 * sync_s, update_ms=1e3 * update_s)
        gains = {1: [1.0] * 3} | {ranks: _gains(alone, one[case]["buffered_s"]) for ranks, one in found.items()}
        plain = {1: [1.0] * 3} | {ranks: _gains(alone, one[case]["step_s"]) for ranks, one in found.items()}
        measured = max(gains, key=lambda ranks: (round(gains[ranks][1], 2), -ranks))
        for ranks, (low, middle, high) in gains.items():
            checks.append(
                Check(
                    setting=f"{SAMPLES} samples of {1e3 * sample_s:g} ms, emulated; 1 M parameters; {text}"
                    + (", quick" if quick else ""),
                    link=LINK,
                    what=f"speed-up of {ranks} emulated worker(s), exchange behind computing",
                    value=middle,
                    low=low,
                    high=high,
                    extra=f"without hiding {plain[ranks][1]:.2f}; K-hat {known.workers:.2f} (speed-up "
                    f"{known.speedup(known.workers):.2f}), best of those measured {measured}",
                )
            )
    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
    write_checks(checks, output, title="asynchronous")


def _gains(alone: float, steps: list[float]) -> list[float]:
    """How many times as fast as alone: quartiles."""
    return [alone / one for one in reversed(statistics.quantiles(steps, n=4))]
