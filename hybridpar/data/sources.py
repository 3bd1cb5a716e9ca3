"""Why: the loader must not care whether images lie in memory or in files; both are a source of uint8 batches.

A source gives the same image for the same (seed, epoch, index), whoever asks and in whatever company. Scaling to
floats is left to the loader: a uint8 batch is a quarter of the bytes to hand between processes and to a GPU.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from hybridpar.config import DataConfig
from hybridpar.data.augment import shift_and_flip
from hybridpar.data.sampling import AugmentKey, Draw, IntArray, bounded, counter_hash
from hybridpar.errors import DataError
from hybridpar.registry import Registry


class ImageSource(ABC):
    """Labelled images that can be loaded by index."""

    #: Loading costs a copy, not a file: loader processes would only slow it down.
    in_memory: ClassVar[bool]

    #: int64, shape (samples,).
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def load(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Tensor:
        """Load some images.

        Args:
            indices: Samples, shape (n,).
            key: Augment by this key; None gives the images as they are tested.
            device: Where the images are wanted.

        Returns:
            uint8, shape (n, channels, height, width).

        Raises:
            DataError: A file cannot be read.
        """


class MemoryImages(ImageSource):
    """Images of one size, held as one uint8 tensor.

    Args:
        images: uint8, shape (samples, channels, height, width).
        labels: int64, shape (samples,).
        pad: Augmentation shifts an image by up to this many pixels in each direction.
        flip: Augmentation mirrors every other image.
    """

    in_memory = True

    def __init__(self, images: Tensor, labels: Tensor, *, pad: int, flip: bool) -> None:
        self.images = images
        self.labels = labels
        self.pad = pad
        self.flip = flip

    def load(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Tensor:
        """See `ImageSource.load`."""
        images = to_device(self.images[torch.from_numpy(indices)], device)
        if key is None:
            return images
        rows, columns = (
            torch.from_numpy(bounded(counter_hash(*key, draw, indices), 2 * self.pad + 1))
            for draw in (Draw.ROW, Draw.COLUMN)
        )
        flips = torch.from_numpy(bounded(counter_hash(*key, Draw.FLIP, indices), 2) == 1) if self.flip else None
        return shift_and_flip(
            images,
            to_device(rows, device),
            to_device(columns, device),
            None if flips is None else to_device(flips, device),
            self.pad,
        )


class FileImages(ImageSource):
    """Image files, decoded when they are asked for and converted to RGB.

    The transforms may draw from torch's CPU generator as torchvision's do. They run under a seed of their own for each
    image, and the generator's state is restored after it.

    Args:
        root: Directory that `paths` are relative to.
        paths: Image files.
        labels: Class of each file.
        augment: From a PIL image to a uint8 tensor (3, height, width), in training.
        prepare: The same in testing; nothing random.
    """

    in_memory = False

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        labels: Sequence[int],
        *,
        augment: Callable[[Image.Image], Tensor],
        prepare: Callable[[Image.Image], Tensor],
    ) -> None:
        self.root = root
        # One array and not a list: reading a million strings in a forked process would copy the pages they lie on,
        # because their reference counts are written.
        self._paths = np.array([os.fsencode(path) for path in paths])
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.augment = augment
        self.prepare = prepare

    def path(self, index: int) -> Path:
        """The file of a sample."""
        return self.root / os.fsdecode(bytes(self._paths[index]))

    def load(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Tensor:
        """See `ImageSource.load`."""
        if key is None:
            images = [self.prepare(read_image(self.path(index))) for index in indices]
        else:
            seeds = counter_hash(*key, Draw.TRANSFORM, indices)
            with torch.random.fork_rng(devices=[]):
                images = []
                for index, seed in zip(indices, seeds, strict=True):
                    # Not torch.manual_seed, which would also reseed the generators of all GPUs.
                    torch.default_generator.manual_seed(int(seed) >> 1)
                    images.append(self.augment(read_image(self.path(index))))
        return to_device(torch.stack(images), device)


def read_image(path: Path) -> Image.Image:
    """Decode an image file to RGB.

    Raises:
        DataError: The file is missing or damaged; the message names it.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    # Pillow's decoders report damage by any of these.
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(
            f"cannot read the image {path}: {error}",
            "Every file of the data set must be a whole image.",
            "Replace the file, or remove it from the data set.",
        ) from error


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor without making the host wait: to a GPU it goes through page-locked memory."""
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def imagenet_transforms(size: int) -> tuple[v2.Compose, v2.Compose]:
    """The usual augmentation and test preparation of ImageNet models (Szegedy et al. 2015; He et al. 2016).

    Args:
        size: Side of the square images that come out, in pixels.

    Returns:
        For training: a random area of 8 to 100 % at a random aspect ratio, resized, and mirrored every other time.
        For testing: the shorter side resized to 256/224 of `size`, and the centre cut out. Both give uint8 tensors.
    """
    augment = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    prepare = v2.Compose([v2.Resize(round(size * 256 / 224), antialias=True), v2.CenterCrop(size), v2.PILToTensor()])
    return augment, prepare


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """A data set: its images and what a model must know about them.

    Args:
        name: The name it was asked for by.
        class_names: Names of the classes, in the order of the labels.
        sample_shape: (channels, height, width) of what the model is fed.
        train: Training images.
        test: Test images.
        mean: Mean of each channel of pixels in [0, 1], taken off before training.
        std: Standard deviation of each channel, divided by.
    """

    name: str
    class_names: tuple[str, ...]
    sample_shape: tuple[int, int, int]
    train: ImageSource
    test: ImageSource
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)


#: Functions that load a data set from a configuration, by the name users type.
DATA_SETS: Registry[Callable[[DataConfig], ImageData]] = Registry("data set")


def load_dataset(config: DataConfig) -> ImageData:
    """Load the data set that a configuration names.

    Args:
        config: What is read of it: `data`, `data_root`, `download`, `image_size`, `synthetic_samples`.

    Raises:
        UsageError: No such data set.
        DataError: Its files are missing or damaged; the message says what was looked for, where, and the fix.
    """
    return DATA_SETS.get(config.data)(config)
