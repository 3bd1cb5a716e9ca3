"""Command that compares hybridpar with the speed-ups published in the thesis, on a machine with several GPUs.

    make bench-thesis DATA_ROOT=~/data              # all GPUs; hours; goes on where it was stopped
    python -m benchmarks.thesis --small             # minutes on two CPU workers: does it all work?

Exit codes: 0 all is measured; 1 something failed, and is tried again next time; 2 the request was wrong; 3 something
could not be measured here: there is no GPU, or a data set is missing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro

from benchmarks.rig.launch import launch
from benchmarks.rig.network import Network
from benchmarks.rig.rows import Row, commit
from benchmarks.rig.rows import device as cpu_name
from benchmarks.rig.table import check_csv
from benchmarks.thesis import cells
from benchmarks.thesis.cells import Job, Place, Setting
from benchmarks.thesis.report import print_report
from benchmarks.thesis.worker import work
from hybridpar.config import DataConfig
from hybridpar.data import load_dataset
from hybridpar.errors import DataError, HybridparError, LaunchError, UsageError, nearest
from hybridpar.machine.process import available_cores

RESULTS = Path(__file__).parent / "results"
VARIABLE = "THESIS_BENCH"
FAILED, NOT_MEASURED = 1, 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train ResNets with hybridpar and with all that it could replace, and compare time per epoch and accuracy."""

    small: bool = False
    """A functional check on two CPU workers: ResNet-18 on digits, epochs of a few steps. Says nothing about speed."""
    models: tuple[str, ...] = ()
    """Models; default: resnet18, resnet34, resnet50."""
    data: tuple[str, ...] = ()
    """Data sets; default: cifar10, cifar100, caltech101."""
    data_root: Path = Path("data")
    """Directory of the data sets' files."""
    download: bool = False
    """Let torchvision download what is missing into --data-root."""
    methods: tuple[str, ...] = cells.METHODS
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
    image_size: int | None = None
    """Side of the images; default: what the data set is usually trained at."""
    workers: int | None = None
    """Workers; default: one per GPU, with --small 2."""
    cuda_graph: bool = True
    """Also try hybridpar's own CUDA graphs where it has them."""
    probe_steps: int = 10
    """Timed steps of each layout that hybridpar chooses from."""
    loaders: int = field(default_factory=lambda: min(16, max(2, len(available_cores()))))
    """Loader processes of all workers together, where images are read from files."""
    timeout: float = 48.0
    """Hours until one model on one data set must be over."""
    output: Path | None = None
    """Table to add the rows to; default: results/thesis.csv, with --small results/thesis_small.csv."""

    @property
    def table(self) -> Path:
        """Where the rows go."""
        return (self.output or RESULTS / ("thesis_small.csv" if self.small else "thesis.csv")).resolve()


def main(options: Options) -> int:
    """Measure what the table does not have yet; the exit status."""
    _check(options)
    place = find_place(options)
    if place is None:
        print(
            "torch sees no GPU here, so nothing was measured; --small checks on the CPU that everything works",
            file=sys.stderr,
        )
        return NOT_MEASURED
    status = 0
    for data in options.data or (("digits",) if options.small else cells.DATA):
        absent = why_absent(data, options)
        if absent:
            print(absent, file=sys.stderr)
            status = status or NOT_MEASURED
            continue
        for model in options.models or (("resnet18",) if options.small else cells.MODELS):
            setting = make_setting(model, data, options)
            if not measure(setting, place, options):
                status = FAILED
    rows = _rows(options.table)
    print_report([entry for entry in rows if (entry.device, entry.commit) == (place.name, place.commit)])
    return status


def measure(setting: Setting, place: Place, options: Options) -> bool:
    """Measure one model on one data set, as far as the table lacks it; whether all went well."""
    missing = cells.still_missing(_rows(options.table), setting, place, options.methods, options.seeds)
    if not missing:
        print(f"{setting}: measured already", file=sys.stderr)
        return True
    job = Job(
        setting=setting,
        place=place,
        methods=options.methods,
        missing=missing,
        output=str(options.table),
        cuda_graph=options.cuda_graph,
        probe_steps=options.probe_steps,
        most_stages=2 if options.small else 4,
    )
    try:
        with Network(place.workers) as network:
            launch(
                ["-m", "benchmarks.thesis"],
                network,
                threads=max(1, len(available_cores()) // place.workers),
                timeout=options.timeout * 3600,
                environment=worker_variables(place) | {VARIABLE: json.dumps(job.told())},
            )
    except LaunchError as error:
        print(f"{setting}: {error}", file=sys.stderr)
        return False
    # A method that fails when it is tried does not end its worker, so that the others are measured.
    lacking = cells.still_missing(_rows(options.table), setting, place, options.methods, options.seeds)
    for seed, methods in lacking:
        print(f"{setting}, seed {seed}: not measured: {', '.join(methods)}", file=sys.stderr)
    return not lacking


def worker_variables(place: Place) -> dict[str, str]:
    """What workers need beyond what the rig sets, which hides the GPUs."""
    if place.device == "cpu":
        return {}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    # PyTorch's notes on CUDA semantics ask for the second where DDP is captured; it changes no step.
    return {"CUDA_VISIBLE_DEVICES": devices, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def find_place(options: Options) -> Place | None:
    """The devices that are measured on; None where there is no GPU and no --small."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    code, now = cells.code_digest(), commit()
    if options.small:
        return Place(device="cpu", workers=options.workers or 2, name=cpu_name(), commit=now, code=code)
    if not gpus:
        return None
    workers = options.workers or gpus
    if workers > gpus:
        raise UsageError(f"--workers {workers}", f"There is one worker per GPU, and {gpus} of them.")
    name = f"{workers} x {torch.cuda.get_device_name(0)}"
    return Place(device="cuda", workers=workers, name=name, commit=now, code=code)


def make_setting(model: str, data: str, options: Options) -> Setting:
    """What is trained, from the options."""
    small = options.small
    # A CPU takes ten times as long with the stem that keeps the resolution.
    stem = "cifar" if data.startswith("cifar") and model.startswith("resnet") and not small else "imagenet"
    return Setting(
        model=model,
        data=data,
        data_root=str(options.data_root.expanduser().resolve()),
        batch=options.batch_size or (32 if small else 128),
        epochs=options.epochs or (cells.LEAST_EPOCHS if small else 24),
        most_steps=options.steps or (2 if small else None),
        lr=options.lr,
        stem=stem,
        image_size=options.image_size,
        loaders=options.loaders,
    )


def why_absent(data: str, options: Options) -> str:
    """One line that says what to download, where a data set cannot be read; else empty."""
    root = options.data_root.expanduser().resolve()
    try:
        load_dataset(DataConfig(data=f"{data},download" if options.download else data, data_root=root))
    except DataError as error:
        where, folder = cells.SOURCES.get(data, ("", ""))
        todo = f"download {where} and unpack it so that {root / folder} is there, or add --download" if where else ""
        return f"{data} is not measured: {error.what}; {todo or error.fix}".replace("\n", " ")
    return ""


def _check(options: Options) -> None:
    for method in options.methods:
        if method not in cells.METHODS:
            raise UsageError(f"unknown method {method!r}", nearest(method, cells.METHODS))
    if cells.ONE not in options.methods:
        raise UsageError(f"--methods without {cells.ONE!r}", "Every row is a ratio over it.", "Name it too.")
    if options.epochs is not None and options.epochs < cells.LEAST_EPOCHS:
        raise UsageError(
            f"--epochs is {options.epochs}",
            f"It must be at least {cells.LEAST_EPOCHS}: the first is not timed, and an interval needs 20.",
            "Cut the epochs off instead, with --steps.",
        )
    numbers = ("steps", "batch_size", "workers", "probe_steps", "loaders", "timeout", "lr")
    for name in numbers:
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} is {value}", "It must be greater than 0.")


def _rows(path: Path) -> list[Row]:
    return check_csv(path) if path.exists() else []


def run(arguments: Sequence[str] | None = None) -> int:
    """The command, or a worker of it; the exit status."""
    try:
        if VARIABLE in os.environ:
            work(Job.heard(json.loads(os.environ[VARIABLE])))
            return 0
        return main(tyro.cli(Options, args=arguments))
    except HybridparError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(run())
