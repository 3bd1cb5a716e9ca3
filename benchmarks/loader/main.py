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

from benchmarks.rig.command import measure_in_ranks, run_command
from benchmarks.rig.network import Network
from benchmarks.rig.records import append_dicts

RESULTS = Path(__file__).parent / "results"
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
    output: Path = RESULTS
    """Folder of the tables to add rows to."""


def main(options: Options) -> int:
    """Write the files, time the loaders, and run some steps.

    Args:
        options: What is measured.

    Returns:
        0.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for width in options.widths:
            height = SIZES[width]
            root = Path(scratch, str(width))
            bytes_each = write_images(root, width, height)
            told = {
                "root": str(root),
                "files": f"JPEG {width}x{height} of {bytes_each / 1e3:.0f} kB",
                "processes": options.processes,
                "rounds": options.rounds,
                "output": str(options.output.resolve() / "loader.csv"),
            }
            with Network(1, "loopback") as network:
                measure_in_ranks(network, "benchmarks.loader.main", told)
            if options.steps:
                runs = [waiting(root, processes, options.steps) for processes in options.processes]
                append_dicts(options.output / "waiting.csv", runs)
    return 0


def write_images(root: Path, width: int, height: int) -> float:
    """Write crops of photographs as JPEG files, in the layout of `--data folder`.

    Args:
        root: Directory, which is made.
        width: Of the files, in pixels.
        height: Of the files.

    Returns:
        Mean size of a file in bytes.
    """
    import numpy as np
    from PIL import Image

    from benchmarks.rig.photographs import photographs

    originals = photographs()
    rng = np.random.default_rng(0)
    sizes = []
    for number in range(IMAGES):
        label = number % len(originals)
        whole = originals[label]
        wide = int(min(whole.width, whole.height * width / height) * rng.uniform(0.8, 1))
        high = wide * height // width
        left, top = (int(rng.integers(room + 1)) for room in (whole.width - wide, whole.height - high))
        image = whole.resize((width, height), Image.Resampling.LANCZOS, (left, top, left + wide, top + high))
        for part in ("train", "test") if number < 2 * len(originals) else ("train",):
            file = root / part / f"{label:02d}" / f"{number:03d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            image.save(file, quality=90)
        sizes.append(file.stat().st_size)
    return sum(sizes) / len(sizes)


def measure(root: str, files: str, processes: list[int], rounds: int, output: str) -> None:
    """Time an epoch of each loader, and add the rows to the table.

    Args:
        root: Directory of the files.
        files: What they are, in words.
        processes: Numbers of loader processes.
        rounds: Rounds to keep.
        output: The table.
    """
    import timm
    import torchvision

    from benchmarks.rig.paired import paired
    from benchmarks.rig.rows import row
    from benchmarks.rig.table import append_rows, check_csv, print_rows

    for count in processes:
        methods = make_methods(Path(root), count)
        result = paired(methods, rounds, warmup=3)
        rows = [
            row(
                result,
                name,
                "torchvision",
                claim="loader",
                setting=f"{files} to {SIDE}x{SIDE}, batch {BATCH}, {count} loader processes",
                target=TARGET if name == "hybridpar" else None,
                extra={
                    "images_per_second": round(IMAGES / result.median_ms(name) * 1e3),
                    "timm": timm.__version__,
                    "torchvision": torchvision.__version__,
                },
            )
            for name in methods
        ]
        append_rows(Path(output), rows)
        check_csv(Path(output))
        print_rows(rows)


def make_methods(root: Path, processes: int) -> dict[str, Callable[[], None]]:
    """An epoch of each loader, which drops the batches.

    Args:
        root: Directory of the files.
        processes: Loader processes.

    Returns:
        Functions by the names of the loaders.
    """
    from timm.data import create_dataset, create_loader
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    from hybridpar.config import TrainConfig
    from hybridpar.data import TrainBatches, load_dataset
    from hybridpar.data.sources import IMAGENET_MEAN, IMAGENET_STD

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
    """Train ResNet-18 for some steps, and read from the run's summary how long they waited for their data.

    Args:
        root: Directory of the files.
        processes: Loader processes.
        steps: Number of steps.

    Returns:
        A row of the table of runs.
    """
    from benchmarks.rig.rows import commit, now

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
