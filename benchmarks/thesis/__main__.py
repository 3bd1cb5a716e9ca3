"""Command that compares hybridpar with the speed-ups published in the thesis, on a machine with several GPUs.

    make bench-thesis DATA_ROOT=~/data              # all GPUs; hours; goes on where it was stopped
    python -m benchmarks.thesis --small             # minutes on two CPU workers: does it all work?

Exit codes: 0 all is measured; 1 something failed, and is tried again next time; 2 the request was wrong; 3 something
could not be measured here: there is no GPU, or a data set is missing.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.rig.launch import measure_in_ranks, run_command
from benchmarks.rig.network import Network
from benchmarks.rig.paired import LEAST_ROUNDS
from benchmarks.rig.rows import commit, print_rows, processor, read_rows
from benchmarks.thesis.ours import OURS
from benchmarks.thesis.peers import ONE_DEVICE, PEERS
from benchmarks.thesis.task import Task
from hybridpar.errors import DataError, LaunchError, UsageError, nearest
from hybridpar.machine.process import available_cores

METHODS = (*PEERS, OURS)
FAILED, NOT_MEASURED = 1, 3
#: Hours until one model on one data set must be over.
TIMEOUT = 48


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train ResNets with hybridpar and with all that it could replace, and compare time per epoch and accuracy."""

    small: bool = False
    """A functional check on two CPU workers: ResNet-18 on digits, epochs of a few steps. Says nothing about speed."""
    models: tuple[str, ...] = ("resnet18", "resnet34", "resnet50")
    """Models; with --small the first."""
    data: tuple[str, ...] = ("cifar10", "cifar100", "caltech101")
    """Data sets, `NAME:download` to have torchvision fetch one; not with --small."""
    data_root: Path = Path("data")
    """Directory of the data sets' files."""
    methods: tuple[str, ...] = METHODS
    """Methods; what cannot run here is left out with its reason."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One training of every method with each."""
    epochs: int | None = None
    """Epochs of each training, the first of which is not timed; default 24, with --small 21."""
    steps: int | None = None
    """Cut epochs off after so many steps; default: whole epochs, with --small 2."""
    batch_size: int | None = None
    """Samples per step over all workers, the same for all methods; default 128, with --small 32."""
    lr: float = 0.05
    """Peak learning rate."""
    output: Path | None = None
    """Table to add the rows to; default: results/thesis.csv, with --small results/thesis_small.csv."""

    @property
    def table(self) -> Path:
        """Where the rows go."""
        name = "thesis_small.csv" if self.small else "thesis.csv"
        return self.output or Path(__file__).parent / "results" / name


def main(options: Options) -> int:
    """Measure what the table does not have yet; the exit status."""
    for method in options.methods:
        if method not in METHODS:
            raise UsageError(f"unknown method {method!r}", nearest(method, METHODS))
    if ONE_DEVICE not in options.methods:
        raise UsageError(f"--methods without {ONE_DEVICE!r}", "Every row is a ratio over it.", "Name it too.")
    if options.epochs is not None and options.epochs <= LEAST_ROUNDS:
        raise UsageError(
            f"--epochs is {options.epochs}",
            f"It must be above {LEAST_ROUNDS}: the first is not timed, and an interval needs {LEAST_ROUNDS}.",
            "Cut the epochs off instead, with --steps.",
        )
    gpus = torch.cuda.device_count()
    if not (gpus or options.small):
        print(
            "there is no GPU here, so nothing was measured; --small checks on the CPU that all works", file=sys.stderr
        )
        return NOT_MEASURED
    status = 0
    for data in ("digits",) if options.small else options.data:
        for model in options.models[:1] if options.small else options.models:
            try:
                measure_task(make_task(model, data, options), options, 0 if options.small else gpus)
            except LaunchError as error:
                print(f"{model} on {data}: {error}", file=sys.stderr)
                status = FAILED
            except DataError as error:
                print(f"{data} is not measured: {error}", file=sys.stderr)
                status = status or NOT_MEASURED
                break
    return status


def make_task(model: str, data: str, options: Options) -> Task:
    """What is trained, from the options."""
    small = options.small
    # A CPU takes ten times as long with the stem that keeps the resolution.
    stem = "cifar" if data.startswith("cifar") and model.startswith("resnet") and not small else "imagenet"
    return Task(
        model=model,
        data=data,
        data_root=str(options.data_root.expanduser().resolve()),
        batch=options.batch_size or (32 if small else 128),
        epochs=options.epochs or (LEAST_ROUNDS + 1 if small else 24),
        most_steps=options.steps or (2 if small else None),
        lr=options.lr,
        stem=stem,
    )


def measure_task(task: Task, options: Options, gpus: int) -> None:
    """Train one model on one data set with the seeds of which the table has no row of this code and these devices.

    Raises:
        DataError: The data set cannot be read.
        LaunchError: A worker failed.
    """
    workers = gpus or 2
    device = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "cpu"
    _ = task.images
    rows = read_rows(options.table) if options.table.exists() else []
    key = str(task), device if gpus else processor(), commit()
    rows = [row for row in rows if (row.setting, row.device, row.commit) == key]
    done = {row.extra["seed"] for row in rows}
    if seeds := [seed for seed in options.seeds if seed not in done]:
        arguments: dict[str, Any] = {"task": asdict(task), "seeds": seeds, "methods": options.methods, "device": device}
        arguments |= {"most_stages": 4 if gpus else 2, "output": options.table}
        with Network(workers) as network:
            threads = max(1, len(available_cores()) // workers)
            variables = worker_variables(gpus)
            measure_in_ranks(network, "benchmarks.thesis.worker", arguments, TIMEOUT * 3600, threads, variables)
        rows += [row for row in read_rows(options.table) if row.extra["seed"] in seeds]
    print_rows(rows)


def worker_variables(gpus: int) -> dict[str, str]:
    """What workers need beyond what the rig sets, which hides the GPUs."""
    if not gpus:
        return {}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    # PyTorch's notes on CUDA semantics ask for the second where DDP is captured; it changes no step.
    return {"CUDA_VISIBLE_DEVICES": devices, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


if __name__ == "__main__":
    run_command(main, Options)
