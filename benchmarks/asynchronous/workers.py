"""Why: a formula for the best number of workers is worth what it says of a link that is really there.

Devices are emulated: a worker waits as long as its share of the batch was measured to take, so any number of them can
live on few cores; the exchange is real, on a shaped link. K-hat (equation 4 of the paper) is computed from figures of
two workers, and stands beside the speed-up that was measured with one to four.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.rig.rank import process_group
from hybridpar.compress import Exchange, TensorSpec, TorchGroup, bind, parse_codec
from hybridpar.recipes.gain import best_workers

LINK = "100mbit"
MOST = 4
CODEC = "onebit"
#: Elements of the emulated model, in matrices of a million; seconds of a sample; samples of a batch over all workers.
SHAPES = ((1024, 1024),) * 4
SAMPLE_S, SAMPLES = 2e-3, 64


def measure(quick: bool, rounds: int, keep_busy: bool, notes: str) -> None:
    """Time exchanges and whole steps with this many workers; in this rank.

    Args:
        quick: A small model.
        rounds: Steps.
        keep_busy: Of no effect: workers wait most of the time.
        notes: File for what was measured.
    """
    del keep_busy
    shapes = ((256, 256),) if quick else SHAPES
    with process_group(timeout=120) as (rank, ranks):
        group = TorchGroup()
        result = {}
        for text in ("none", CODEC):
            codec = parse_codec(text)
            exchange = Exchange([bind(codec, TensorSpec(str(i), shape, rank, ranks)) for i, shape in enumerate(shapes)])
            draw = torch.Generator().manual_seed(rank)
            flats = [torch.randn(shape[0] * shape[1], generator=draw) for shape in shapes]
            weights = [torch.zeros_like(flat) for flat in flats]
            outs = [torch.empty_like(flat) for flat in flats]
            compute_s = SAMPLES / ranks * SAMPLE_S

            def send(exchange: Exchange = exchange, flats: list[Tensor] = flats, outs: list[Tensor] = outs) -> None:
                exchange.run(group, flats, outs)
                exchange.commit()

            figures: dict[str, list[float]] = {"sync_s": [], "step_s": [], "update_s": [], "buffered_s": []}
            for _ in range(3 + (5 if quick else rounds)):
                began = time.perf_counter()
                time.sleep(compute_s)
                computed = time.perf_counter()
                send()
                arrived = time.perf_counter()
                for weight, out in zip(weights, outs, strict=True):
                    weight.add_(out, alpha=-0.1)
                done = time.perf_counter()
                figures["sync_s"].append(arrived - computed)
                figures["update_s"].append(done - arrived)
                figures["step_s"].append(done - began)
            for _ in range(3 + (5 if quick else rounds)):
                began = time.perf_counter()
                late = threading.Thread(target=send)  # the gradients of the batch before
                late.start()
                time.sleep(compute_s)
                late.join()
                for weight, out in zip(weights, outs, strict=True):
                    weight.add_(out, alpha=-0.1)
                figures["buffered_s"].append(time.perf_counter() - began)
            result[text] = {name: statistics.median(values[3:]) for name, values in figures.items()}
    if rank == 0:
        Path(notes).write_text(json.dumps(result))


def conclude(folder: Path, quick: bool, output: str | None) -> None:
    """Set what is predicted beside what was measured.

    Args:
        folder: Where the notes are, by number of workers.
        quick: Say so.
        output: The table's file.
    """
    found = {int(path.stem): json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    checks = []
    for text in ("none", CODEC):
        of_two = found[2][text]
        alone = SAMPLES * SAMPLE_S + of_two["update_s"]
        best = best_workers(
            SAMPLES, SAMPLE_S, passes=0, pass_s=0.0, float_s=of_two["sync_s"], update_s=of_two["update_s"], half=False
        )
        gains = {1: 1.0} | {ranks: alone / one[text]["buffered_s"] for ranks, one in found.items()}
        plain = {1: 1.0} | {ranks: alone / one[text]["step_s"] for ranks, one in found.items()}
        measured = max(gains, key=lambda ranks: (round(gains[ranks], 2), -ranks))
        for ranks, gain in gains.items():
            checks.append(
                Check(
                    setting=f"{SAMPLES} samples of {1e3 * SAMPLE_S:g} ms, emulated; {len(SHAPES)} M parameters; {text}"
                    + (", quick" if quick else ""),
                    link=LINK,
                    what=f"speed-up of {ranks} emulated worker(s), exchange behind computing",
                    value=gain,
                    low=gain,
                    high=gain,
                    extra=f"without hiding {plain[ranks]:.2f}; K-hat {best.count:.2f} (speed-up {best.speedup:.2f}), "
                    f"best of those measured {measured}",
                )
            )
    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
    write_checks(checks, output, title="asynchronous")
