"""Images per second of a recipe in hybridpar and in timm's train.py, in turns.

    python -m benchmarks.recipes.throughput --timm DIR      # a checkout of github.com/huggingface/pytorch-image-models

Both train ResNet-18 by the recipe A3 on the same JPEGs of 160x160 pixels, which a loader process of each worker decodes
and augments; batch 16 per worker, float32, one thread each. What counts is the rate of the last epoch, when loaders
are under way; for timm it is what its log says, for hybridpar the time between its records.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from benchmarks.recipes.timm_parity import write_images
from benchmarks.rig.records import append_dicts
from benchmarks.rig.rows import commit, device
from benchmarks.rig.stats import bootstrap_ratio
from hybridpar.machine.process import available_cores, worker_environment

RESULTS = Path(__file__).parent / "results" / "throughput.csv"
BATCH, SIDE, EPOCHS = 16, 160, 3

_OURS = (
    "timm/resnet18 --preset a3 --data folder --image-size {side} --test-image-size {side} --epochs {epochs} "
    "--plan none --amp none --lr 7e-4 --loader-workers 1 --checkpoint-every 1000000 --batch-size {batch} "
    "--workers {workers}"
)
_TIMMS = (
    "--model resnet18 --img-size {side} -b {batch} --epochs {epochs} --opt lamb --lr 7e-4 --weight-decay 0.02 "
    "--sched cosine --warmup-epochs 5 --warmup-lr 1e-4 --min-lr 1e-6 --bce-loss --bce-target-thresh 0.2 "
    "--aa rand-m6-mstd0.5-inc1 --mixup 0.1 --cutmix 1.0 --crop-pct 0.95 --device cpu -j 1 --log-interval 1 "
    "--train-split train --val-split test --num-classes {classes}"
)
#: What timm's log says of a batch: epoch, number, and seconds, with waiting for data.
_LINE = re.compile(r"Train: (\d+) \[\s*(\d+)/.*?Time: ([\d.]+)s")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare rates of training with timm's train.py."""

    timm: Path
    """A checkout of timm, with train.py."""
    rounds: int = 5
    """Runs of each."""
    workers: tuple[int, ...] = (1, 2)
    """Numbers of workers."""
    output: Path = RESULTS
    """Table to add rows to."""


def ours(root: Path, workers: int) -> float:
    """Images per second of hybridpar in the last epoch."""
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        words = _OURS.format(side=SIDE, epochs=EPOCHS, batch=BATCH * workers, workers=workers).split()
        command = [sys.executable, "-m", "hybridpar", "train", *words, "--data-root", str(root), "--run-dir", str(run)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step_ms"] / 1e3 for line in lines if "step_ms" in line]
    return BATCH * workers / _mean(steps[-(len(steps) // EPOCHS) :])


def timms(root: Path, workers: int, checkout: Path, classes: int) -> float:
    """Images per second of timm's train.py in the last epoch, of all workers."""
    words = _TIMMS.format(side=SIDE, epochs=EPOCHS, batch=BATCH, classes=classes).split()
    start = [sys.executable]
    if workers > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "train.py"
        # On two CPUs DistributedDataParallel refuses the devices that the script gives it.
        script.write_text((checkout / "train.py").read_text().replace("device_ids=[device]", "device_ids=None"))
        command = [*start, str(script), "--data-dir", str(root), *words, "--output", place]
        environment = {**os.environ, **worker_environment(workers, available_cores(), {})}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found = [match.groups() for match in _LINE.finditer(done.stdout + done.stderr)]
    return BATCH * workers / _mean([float(seconds) for epoch, _, seconds in found if int(epoch) == EPOCHS - 1])


def _mean(seconds: list[float]) -> float:
    """Mean time of a step, without the first ones, in which loaders start."""
    return statistics.mean(seconds[4:])


def main(options: Options) -> int:
    """Measure in turns and add rows."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_images(root, 480, SIDE)
        classes = len(list((root / "train").iterdir()))
        for workers in options.workers:
            rates: dict[str, list[float]] = {"hybridpar": [], "timm": []}
            for number in range(options.rounds):
                for name in list(rates)[:: 1 if number % 2 else -1]:
                    run = ours if name == "hybridpar" else partial(timms, checkout=options.timm, classes=classes)
                    rates[name].append(run(root, workers))
                print(workers, {name: round(one[-1], 1) for name, one in rates.items()}, flush=True)
            ratio = bootstrap_ratio(rates["hybridpar"], rates["timm"])
            row = {
                "commit": commit(),
                "device": device(),
                "workers": workers,
                "rounds": options.rounds,
                "images_per_second": round(statistics.median(rates["hybridpar"]), 1),
                "timm": round(statistics.median(rates["timm"]), 1),
                "ratio": round(ratio.median, 3),
                "ratio_low": round(ratio.low, 3),
                "ratio_high": round(ratio.high, 3),
            }
            print(row)
            append_dicts(options.output, [row])
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
