"""Data sets that need no download, so that a first run works anywhere: `digits` and `synthetic`, held in memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from hybridpar.config import DataConfig
from hybridpar.config.data import Synthetic
from hybridpar.data.sampling import IntArray, allot, split_by_class
from hybridpar.data.sources import FIXED_SEED, ImageData, image_data
from hybridpar.errors import not_installed

#: Training images of `digits`; the other 360 (20 %) are for testing.
DIGITS_TRAIN = 1437

#: Mean and standard deviation of the training images, of pixels in [0, 1].
DIGITS_STATISTICS = (0.3051,), (0.3238,)
SYNTHETIC_STATISTICS = (0.5,) * 3, (0.18,) * 3


def load_digits(config: DataConfig) -> ImageData:
    """1,797 handwritten digits of scikit-learn, 8x8 scaled to 32x32.

    They are the test part of UCI's "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998), split into
    1,437 training and 360 test images, each digit in proportion, always in the same way. Writers are not known, so the
    same hand may be in both parts. Digits are shifted in training but never mirrored.
    """
    size = config.images.size or 32
    images, labels = digit_images(size)
    counts = allot(DIGITS_TRAIN, np.bincount(labels).tolist(), 1)
    parts = [
        TensorDataset(images[chosen], torch.from_numpy(labels[chosen]))
        for chosen in split_by_class(labels, counts, FIXED_SEED)
    ]
    return image_data(config, parts, size=size, flip=False, statistics=DIGITS_STATISTICS)


def digit_images(size: int) -> tuple[Tensor, IntArray]:
    """All 1,797 digits of scikit-learn, in its order: uint8 of shape (1797, 1, size, size), and what they show."""
    package = importlib.util.find_spec("sklearn")
    folders = package.submodule_search_locations if package is not None else None
    if not folders:
        raise not_installed("the data set digits comes with scikit-learn", "demo")
    # Importing scikit-learn takes a second in every worker, reading its file a tenth of that.
    rows = np.loadtxt(Path(folders[0], "datasets", "data", "digits.csv.gz"), delimiter=",")
    grey = torch.from_numpy(rows[:, :-1].reshape(-1, 1, 8, 8)).to(torch.float32)
    grey = functional.interpolate(grey, (size, size), mode="bilinear", align_corners=False)
    # The originals count black pixels of 4x4 cells: 0 to 16.
    return (grey * (255 / 16)).round().clamp(0, 255).to(torch.uint8), rows[:, -1].astype(np.int64)


def load_synthetic(config: DataConfig) -> ImageData:
    """A fixed smooth random pattern per class, under noise of the same amplitude; a quarter as many test images.

    The same whatever --seed says.
    """
    size, spec = config.images.size or 32, config.data_options
    assert isinstance(spec, Synthetic)
    generator = torch.Generator().manual_seed(FIXED_SEED)
    coarse = torch.rand(spec.classes, 3, 4, 4, generator=generator)
    smooth = functional.interpolate(coarse, (size, size), mode="bilinear", align_corners=False)
    patterns = (smooth * 127).to(torch.uint8)

    def images(samples: int) -> TensorDataset:
        labels = torch.arange(samples) % spec.classes
        noise = torch.randint(0, 128, (samples, 3, size, size), dtype=torch.uint8, generator=generator)
        return TensorDataset(noise.add_(patterns[labels]), labels)

    parts = [images(spec.samples), images(max(spec.classes, spec.samples // 4))]
    names = [f"pattern-{label}" for label in range(spec.classes)]
    return image_data(config, parts, names=names, size=size, flip=False, statistics=SYNTHETIC_STATISTICS)
