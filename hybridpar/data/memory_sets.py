"""Data sets that are held in memory.

`digits` and `synthetic` need no download, so that a first run works anywhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor
from torch.nn import functional
from torchvision.datasets.utils import check_integrity

from hybridpar.config import DataConfig
from hybridpar.config.data import Synthetic
from hybridpar.data.downloads import download_fix, one_download
from hybridpar.data.sampling import IntArray, split_by_class
from hybridpar.data.sources import DATA_SETS, GREY, ImageData, MemoryImages, for_channels
from hybridpar.errors import DataError

#: Seed of fixed splits and of synthetic images: the data stay the same whatever --seed says.
FIXED_SEED = 20240229

#: Training images of `digits`; the other 360 (20 %) are for testing.
DIGITS_TRAIN = 1437

#: Mean and standard deviation per channel of the training images, of pixels in [0, 1].
DIGITS_STATISTICS = ((0.3051,) * 3, (0.3238,) * 3)
CIFAR10_STATISTICS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100_STATISTICS = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
SYNTHETIC_STATISTICS = ((0.5,) * 3, (0.18,) * 3)


@DATA_SETS.register("digits", "1,797 handwritten digits of scikit-learn, 8x8 scaled to 32x32: real images, no download")
def _digits(config: DataConfig) -> ImageData:
    """The test part of UCI's "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998).

    Split into 1,437 training and 360 test images, each digit in proportion, always in the same way. Writers are not
    known, so the same hand may be in both parts. Digits are shifted in training but never mirrored.
    """
    size = config.images.size or 32
    images, labels = digit_images(size)
    train, test = split_by_class(labels, proportional_counts(np.bincount(labels), DIGITS_TRAIN), FIXED_SEED)
    return in_memory(
        "digits",
        tuple(str(digit) for digit in range(10)),
        *(_picked(images, labels, indices, pad=size // 8, flip=False) for indices in (train, test)),
        config=config,
        size=size,
        statistics=DIGITS_STATISTICS,
    )


def digit_images(size: int) -> tuple[Tensor, IntArray]:
    """All 1,797 digits of scikit-learn, in its order: uint8 of shape (1797, 3, size, size), and what they show."""
    rows = _digit_rows()
    grey = torch.from_numpy(rows[:, :-1].reshape(-1, 1, 8, 8)).to(torch.float32)
    grey = functional.interpolate(grey, (size, size), mode="bilinear", align_corners=False)
    # The originals count black pixels of 4x4 cells: 0 to 16.
    images = (grey * (255 / 16)).round().clamp(0, 255).to(torch.uint8).repeat(1, 3, 1, 1)
    labels: IntArray = rows[:, -1].astype(np.int64)
    return images, labels


def _digit_rows() -> np.ndarray[Any, np.dtype[np.float64]]:
    """The digits of scikit-learn, float64 of shape (1797, 65): 8 by 8 pixels and the label."""
    package = importlib.util.find_spec("sklearn")
    for folder in package.submodule_search_locations or () if package is not None else ():
        # Importing scikit-learn takes a second in every worker, reading its file a tenth of that.
        if (file := Path(folder, "datasets", "data", "digits.csv.gz")).is_file():
            return np.loadtxt(file, delimiter=",")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"the data set digits comes with scikit-learn, which cannot be imported: {error}",
            fix="Install it: pip install 'hybridpar[demo]'",
        ) from error
    digits = load_digits()
    return np.column_stack((digits.data, digits.target))


def proportional_counts(sizes: IntArray, total: int) -> list[int]:
    """Share `total` samples among classes in proportion to their sizes, by largest remainder."""
    quota = sizes * total / sizes.sum()
    counts = np.floor(quota).astype(int)
    largest = np.argsort(counts - quota, kind="stable")[: total - counts.sum()]
    counts[largest] += 1
    return [int(count) for count in counts]


def divided(labels: Sequence[Tensor]) -> list[tuple[int, IntArray, Tensor]]:
    """For training and for testing: which part of a data set, which samples of it, and their labels.

    Of each class of a set that has one part 80 % are for training, always the same ones.
    """
    first, *others = labels
    if others:
        return [(part, np.arange(len(numbers)), numbers) for part, numbers in enumerate(labels)]
    flat = first.numpy() if first.ndim == 1 else np.zeros(len(first), dtype=np.int64)
    counts = [max(1, size * 4 // 5) if size else 0 for size in np.bincount(flat)]
    return [(0, indices, first[torch.from_numpy(indices)]) for indices in split_by_class(flat, counts, FIXED_SEED)]


@DATA_SETS.register("cifar10", "CIFAR-10: 50,000 + 10,000 photographs of 10 classes, 32x32")
def _cifar10(config: DataConfig) -> ImageData:
    return _cifar(config, "cifar10", torchvision.datasets.CIFAR10, CIFAR10_STATISTICS)


@DATA_SETS.register("cifar100", "CIFAR-100: 50,000 + 10,000 photographs of 100 classes, 32x32")
def _cifar100(config: DataConfig) -> ImageData:
    return _cifar(config, "cifar100", torchvision.datasets.CIFAR100, CIFAR100_STATISTICS)


Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def _cifar(
    config: DataConfig, name: str, cifar: type[torchvision.datasets.CIFAR10], statistics: Statistics
) -> ImageData:
    """Krizhevsky 2009. Torchvision checks the MD5 of every file before it unpickles it."""
    root = config.data_root.resolve()
    try:
        if config.data_options.download:
            with one_download(name, root):
                cifar(root, download=True)
        parts = [cifar(root, train=train) for train in (True, False)]
    except RuntimeError as error:
        raise _cifar_problem(name, cifar, root) from error
    sources = [
        MemoryImages(
            torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(),
            torch.tensor(part.targets, dtype=torch.int64),
            pad=4,
            flip=True,
        )
        for part in parts
    ]
    return in_memory(name, tuple(parts[0].classes), *sources, config=config, size=32, statistics=statistics)


def _cifar_problem(name: str, cifar: type[torchvision.datasets.CIFAR10], root: Path) -> DataError:
    folder = root / cifar.base_folder
    if not folder.is_dir():
        return DataError(f"{name} is not there: no directory {folder}", fix=download_fix(f"{cifar.base_folder}/"))
    # Torchvision downloads nothing while it finds the image files whole, so what is left must go first.
    again = f"Remove {folder}, then run again with --data {name},download."
    for file, md5 in [*cifar.train_list, *cifar.test_list, (cifar.meta["filename"], cifar.meta["md5"])]:
        if not (folder / file).is_file():
            return DataError(f"{name} is not complete: no file {folder / file}", fix=again)
        if not check_integrity(str(folder / file), md5):
            return DataError(f"{name} is damaged: {folder / file} fails its MD5 check", fix=again)
    return DataError(f"{name} cannot be read from {folder}", fix=again)


@DATA_SETS.register(
    "synthetic",
    "learnable patterns in noise, any --image-size: for tests and timing",
)
def _synthetic(config: DataConfig) -> ImageData:
    """A fixed smooth random pattern per class, under noise of the same amplitude; a quarter as many test images.

    The same whatever --seed says.
    """
    size, spec = config.images.size or 32, config.data_options
    assert isinstance(spec, Synthetic)
    generator = torch.Generator().manual_seed(FIXED_SEED)
    coarse = torch.rand(spec.classes, 3, 4, 4, generator=generator)
    smooth = functional.interpolate(coarse, (size, size), mode="bilinear", align_corners=False)
    patterns = (smooth * 127).to(torch.uint8)

    def images(samples: int) -> MemoryImages:
        labels = torch.arange(samples) % spec.classes
        noise = torch.randint(0, 128, (samples, 3, size, size), dtype=torch.uint8, generator=generator)
        return MemoryImages(noise.add_(patterns[labels]), labels, pad=size // 8, flip=False)

    return in_memory(
        "synthetic",
        tuple(f"pattern-{label}" for label in range(spec.classes)),
        images(spec.samples),
        images(max(spec.classes, spec.samples // 4)),
        config=config,
        size=size,
        statistics=SYNTHETIC_STATISTICS,
    )


def _picked(images: Tensor, labels: IntArray, indices: IntArray, *, pad: int, flip: bool) -> MemoryImages:
    chosen = torch.from_numpy(indices)
    return MemoryImages(images[chosen], torch.from_numpy(labels)[chosen], pad=pad, flip=flip)


def in_memory(
    name: str,
    class_names: tuple[str, ...],
    train: MemoryImages,
    test: MemoryImages,
    *,
    config: DataConfig,
    size: int,
    statistics: Statistics,
) -> ImageData:
    """A data set that is held in memory, in the size and the channels that options say, else in its usual ones."""
    size, channels = config.images.size or size, config.images.channels
    for part in (train, test):
        part.images = _with_channels(part.images, channels)
    mean, std = (for_channels(values, 0.5, channels) for values in statistics)
    shape = (channels, size, size)
    return ImageData(name=name, class_names=class_names, sample_shape=shape, train=train, test=test, mean=mean, std=std)


def _with_channels(images: Tensor, channels: int) -> Tensor:
    """Images in grey, RGB or RGBA, from images in grey or RGB."""
    if images.shape[1] == channels:
        return images
    if images.shape[1] == 1:  # one channel three times, without three times the memory
        images = images.expand(-1, 3, -1, -1)
    if channels == 1:
        weights = torch.tensor([round(1000 * part) for part in GREY], dtype=torch.int32).view(3, 1, 1)
        return ((images * weights).sum(1, keepdim=True, dtype=torch.int32) + 500).floor_divide_(1000).to(torch.uint8)
    return images if channels == 3 else torch.cat([images, torch.full_like(images[:, :1], 255)], dim=1)
