"""Times the training batches of hybridpar against torchvision's and timm's loaders, and how long steps wait for data.

All methods read the same JPEG files and give float32 batches on the CPU. A step of a method is an epoch; all of them
keep their loader processes from epoch to epoch.

    python -m benchmarks.loader.main
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torchvision
from PIL import Image
from timm.data import create_dataset, create_loader
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from benchmarks.rig.launch import measure_in_ranks, run_command
from benchmarks.rig.network import LOOPBACK, Network
from benchmarks.rig.paired import paired
from benchmarks.rig.photographs import photographs
from benchmarks.rig.records import append_dicts
from benchmarks.rig.rows import commit, now, row, write_rows
from hybridpar.config import TrainConfig
from hybridpar.data import TrainBatches, load_dataset
from hybridpar.data.sources import IMAGENET_MEAN, IMAGENET_STD

#: Time over torchvision's: 1.3 times as many images per second.
TARGET = 0.769
#: Height of the files by their width.
SIZES = {500: 375, 1200: 900}
SIDE, IMAGES, BATCH = 224, 400, 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure loaders, and the time that training steps wait for them."""

    processes: tuple[int, ...] = (0, 1, 2)
    """Loader processes, for all methods."""
    widths: tuple[int, ...] = tuple(SIZES)
    """Width of the files, in pixels."""
    rounds: int = 20
    """Rounds to keep."""
    steps: int = 20
    """Steps of the runs that are asked how long they waited; 0: no runs."""
    output: Path = Path(__file__).parent / "results"
    """Folder of the tables to add rows to."""


def main(options: Options) -> None:
    """Write the files, time the loaders, and run some steps."""
    with tempfile.TemporaryDirectory() as scratch:
        for width in options.widths:
            root = Path(scratch, str(width))
            bytes_each = write_images(root, width, SIZES[width])
            arguments = {
                "root": root,
                "files": f"JPEG {width}x{SIZES[width]} of {bytes_each / 1e3:.0f} kB",
                "processes": options.processes,
                "rounds": options.rounds,
                "output": options.output / "loader.csv",
            }
            with Network(1, LOOPBACK) as network:
                measure_in_ranks(network, "benchmarks.loader.main", arguments)
            if options.steps:
                runs = [waiting(root, processes, options.steps) for processes in options.processes]
                append_dicts(options.output / "waiting.csv", runs)


def write_images(root: Path, width: int, height: int) -> float:
    """Write crops of photographs as JPEG files, in the layout of `--data folder`.

    Returns:
        Mean size of a file in bytes.
    """
    originals = photographs()
    rng = np.random.default_rng(0)
    sizes = []
    for number in range(IMAGES):
        label = number % len(originals)
        photograph = originals[label]
        wide = int(min(photograph.width, photograph.height * width / height) * rng.uniform(0.8, 1))
        high = wide * height // width
        left, top = (int(rng.integers(room + 1)) for room in (photograph.width - wide, photograph.height - high))
        image = photograph.resize((width, height), Image.Resampling.LANCZOS, (left, top, left + wide, top + high))
        for part in ("train", "test") if number < 2 * len(originals) else ("train",):
            file = root / part / f"{label:02d}" / f"{number:03d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            image.save(file, quality=90)
        sizes.append(file.stat().st_size)
    return sum(sizes) / len(sizes)


def measure(root: str, files: str, processes: list[int], rounds: int, output: str) -> None:
    """Time an epoch of each loader with each number of loader processes, and add the rows to the table."""
    for count in processes:
        methods = make_methods(Path(root), count)
        result = paired(methods, rounds, warmup=3)
        setting = f"{files} to {SIDE}x{SIDE}, batch {BATCH}, {count} loader processes"
        versions = {"timm": timm.__version__, "torchvision": torchvision.__version__}
        targets = {name: TARGET if name == "hybridpar" else None for name in methods}
        rows = []
        for name, target in targets.items():
            extra = versions | {"images_per_second": round(IMAGES / result.median_ms(name) * 1e3)}
            method = (result, name, "torchvision")
            rows.append(row(*method, claim="loader", setting=setting, target=target, extra=extra))
        write_rows(rows, output)


def make_methods(root: Path, processes: int) -> dict[str, Callable[[], None]]:
    """An epoch of each loader, which drops the batches, by the names of the loaders."""
    usual = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIDE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    torchvisions: DataLoader[Any] = DataLoader(
        datasets.ImageFolder(str(root / "train"), usual),
        batch_size=BATCH,
        shuffle=True,
        num_workers=processes,
        persistent_workers=processes > 0,
    )
    timms: Iterable[Any] = create_loader(
        create_dataset("", root=str(root / "train")),
        input_size=(3, SIDE, SIDE),
        batch_size=BATCH,
        is_training=True,
        use_prefetcher=False,
        color_jitter=0.0,
        interpolation="bilinear",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        num_workers=processes,
        pin_memory=False,
        persistent_workers=processes > 0,
    )
    ours = TrainBatches(
        load_dataset(TrainConfig(data="folder", data_root=root, image_size=SIDE)),
        seed=0,
        batch_size=BATCH,
        rank=0,
        workers=1,
        micro_batches=1,
        loader_workers=processes,
    )
    epochs = iter(range(10**9))

    def read(batches: Callable[[], Iterable[Any]]) -> Callable[[], None]:
        def epoch() -> None:
            seen = sum(len(images) for images, _ in batches())
            assert seen == IMAGES, f"{seen} images"

        return epoch

    return {
        "torchvision": read(lambda: torchvisions),
        "timm": read(lambda: timms),
        "hybridpar": read(lambda: (batch.micro_batches[0] for batch in ours.epoch(next(epochs)))),
    }


def waiting(root: Path, processes: int, steps: int) -> dict[str, Any]:
    """Train ResNet-18 for some steps, and read from the run's summary how long they waited for their data."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "hybridpar", "train", "resnet18", "--data", "folder", "--data-root", root]
        command += ["--batch-size", BATCH, "--loader-workers", processes, "--steps", steps]
        command += ["--run-dir", f"{scratch}/run"]
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
        summary = json.loads(Path(scratch, "run", "summary.json").read_text())
    row = {
        "date": now(),
        "commit": commit(),
        "model": "resnet18",
        "files": root.name,
        "batch": BATCH,
        "loader_processes": processes,
        "cores": len(os.sched_getaffinity(0)),
        "steps": steps,
        "step_ms": summary["step_ms_median"],
        "data_ms": summary["data_ms"],
    }
    print(row)
    return row


if __name__ == "__main__":
    run_command(main, Options)
