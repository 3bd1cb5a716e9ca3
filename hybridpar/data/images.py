"""Labelled images by index: of a tensor in memory, or of any map-style data set, decoded when they are asked for.

An image is the same for the same (seed, epoch, index), whoever asks and in whatever company: it is changed under a seed
of its own, from which torch, numpy and Python draw. Scaling to floats is left to the loader: a uint8 batch is a quarter
of the bytes to hand between processes and to a GPU.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.transforms import v2

from hybridpar.data.augment import MODES, as_mode, open_image, shift_and_flip
from hybridpar.data.sampling import COPY, AugmentKey, Draw, IntArray, bounded, counter_hash
from hybridpar.errors import DataError
from hybridpar.models.state import same_random

#: Images that are tried in the place of one that cannot be read, all over the data set, before training ends.
SUBSTITUTES = 20

_CPU = torch.device("cpu")


class Loaded(NamedTuple):
    """What could be loaded of the images that were asked for.

    Attributes:
        images: Shape (n, channels, height, width): uint8, or float32 where they are normalised already.
        indices: Which samples they are, shape (n,).
        damaged: Why each file that could not be read could not.
    """

    images: Tensor
    indices: IntArray
    damaged: tuple[str, ...] = ()


class ImageFiles(Dataset[tuple[Image.Image, Any]]):
    """Image files as a map-style data set of (image, label); a JPEG is decoded when its pixels are first used.

    Args:
        root: Directory that `paths` are relative to.
        paths: Image files.
        labels: Class of each file; or which classes it has, bool of shape (samples, classes); or given later.
    """

    def __init__(self, root: Path, paths: Sequence[str], labels: Sequence[int] | Tensor = ()) -> None:
        self.root = root
        self.labels = torch.as_tensor(labels)
        # One array and not a list: reading a million strings in a forked process would copy the pages they lie on,
        # because their reference counts are written.
        self._paths = np.array([os.fsencode(path) for path in paths])

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
        return open_image(Path(self.name(index))), self.labels[index]

    def name(self, index: int) -> str:
        """The file of a sample."""
        return str(self.root / os.fsdecode(bytes(self._paths[index])))


@dataclass(eq=False)
class ImageSource(Dataset[Loaded | DataError]):
    """Images of a map-style data set of (image, label), by index: the number of a sample, or of a copy of it (`COPY`).

    As a data set of torch's loader processes, its items are the batches of (indices, key).

    Args:
        dataset: Its images are Pillow's or tensors. A method `name` may say what a sample is called in messages.
        labels: Class of each image; or which classes it has, bool of shape (samples, classes).
        augment: From a PIL image to a tensor (channels, height, width), in training.
        prepare: The same in testing; nothing random.
        indices: The samples of the data set that are used; None: all.
        channels: Of the images.
        strict: End the training on an image that cannot be read, and do not do without it.
    """

    #: Loading costs a copy, not a file: loader processes would only slow it down.
    in_memory: ClassVar[bool] = False

    dataset: Any
    labels: Tensor
    _: KW_ONLY
    augment: Callable[[Image.Image], Tensor]
    prepare: Callable[[Image.Image], Tensor]
    indices: IntArray | None = None
    channels: int = 3
    strict: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, job: tuple[IntArray, AugmentKey | None]) -> Loaded | DataError:
        try:
            return self.load(*job, _CPU)
        except DataError as error:  # torch would bury its message in the traceback of the process
            return error

    def name(self, index: int) -> str:
        """What an image is called in messages."""
        sample, name = self._sample(index), getattr(self.dataset, "name", None)
        return str(name(sample)) if callable(name) else f"{sample} of {type(self.dataset).__name__}"

    def load(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Loaded:
        """Load some images. In training another one takes the place of one that cannot be read; else it is left out.

        Those that are tried are far from each other: neighbours may be damaged together.

        Args:
            indices: Samples or copies of them, shape (n,).
            key: Augment by this key; None gives the images as they are tested.
            device: Where the images are wanted.

        Raises:
            DataError: In training, so many files cannot be read that none was found for the place of one.
        """
        images, readable, damaged = list[Tensor](), list[int](), list[str]()
        last, stride = 0 if key is None else min(SUBSTITUTES, len(self)) - 1, max(1, len(self) // SUBSTITUTES)
        with same_random():
            for number in indices.tolist():
                for attempt in range(last + 1):
                    candidate = (number % COPY + attempt * stride) % len(self)
                    try:
                        images.append(self._load(candidate, key, number - number % COPY))
                        readable.append(candidate)
                        break
                    except DataError as error:
                        damaged.append(error.what)
                        if self.strict or (key is not None and attempt == last):
                            raise
        # In a loader process the batch lies in shared memory from the start.
        batch: Tensor = default_collate(images) if images else torch.empty(0, dtype=torch.uint8)
        return Loaded(to_device(batch, device), np.array(readable, dtype=np.int64), tuple(damaged))

    def _load(self, index: int, key: AugmentKey | None, copy: int) -> Tensor:
        """Decode and change one image; without a key it is prepared as it is tested."""
        try:
            image = as_mode(self._open(index), MODES[self.channels])
            if key is None:
                return self.prepare(image)
            seed_generators(key, index + copy)
            return self.augment(image)
        except Exception:
            # Pixels may be decoded inside the transform: was it they, or the transform itself?
            try:
                self._open(index).load()
            except Exception as error:  # whatever Pillow and the data set raise
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                if isinstance(error, UnidentifiedImageError):
                    reason = "it is empty, or no image of a known format"
                what = f"cannot read the image {self.name(index)}: {reason}"
                fix = "Replace the image, or remove it from the data set."
                raise DataError(what, "Every image of the data set must be whole.", fix) from error
            raise

    def _sample(self, index: int) -> int:
        return index if self.indices is None else int(self.indices[index])

    def _open(self, index: int) -> Image.Image:
        image = self.dataset[self._sample(index)][0]
        return image if isinstance(image, Image.Image) else v2.functional.to_pil_image(image)


class MemoryImages(ImageSource):
    """Images of one size, held as one uint8 tensor; augmentation shifts them by up to an eighth of their side.

    Args:
        images: uint8, shape (samples, channels, height, width).
        labels: As of `ImageSource`.
        flip: Probability that augmentation mirrors an image.
        augment: What else is done to a training image, uint8 (channels, height, width).
    """

    in_memory = True

    def __init__(
        self, images: Tensor, labels: Tensor, *, flip: float = 0.0, augment: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.images = images
        self.labels = labels
        self.flip = flip
        self.changes = augment

    def load(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Loaded:
        """Gather images, and shift and mirror all of them at once; see `ImageSource.load`."""
        if key is not None and self.changes is not None:
            return super().load(indices, key, device)
        samples = indices % COPY
        images = to_device(self.images[torch.from_numpy(samples)], device)
        return Loaded(images if key is None else self._shifted(images, indices, key), samples)

    def _load(self, index: int, key: AugmentKey | None, copy: int) -> Tensor:
        assert key is not None
        assert self.changes is not None
        (image,) = self._shifted(self.images[index : index + 1], np.array([index + copy]), key)
        seed_generators(key, index + copy)
        return self.changes(image)

    def _shifted(self, images: Tensor, indices: IntArray, key: AugmentKey) -> Tensor:
        def drawn(draw: Draw, bound: int) -> Tensor:
            return to_device(torch.from_numpy(bounded(counter_hash(*key, draw, indices), bound)), images.device)

        pad, fine = images.shape[-1] // 8, 1 << 20
        rows, columns = (drawn(draw, 2 * pad + 1) for draw in (Draw.ROW, Draw.COLUMN))
        flips = drawn(Draw.FLIP, fine) >= round((1 - self.flip) * fine) if self.flip else None
        return shift_and_flip(images, rows, columns, flips, pad)


def seed_generators(key: AugmentKey, index: int) -> None:
    """Seed what the transforms of an image draw from."""
    seed = int(counter_hash(*key, Draw.TRANSFORM, np.array([index]))[0] >> np.uint64(1))
    # Not torch.manual_seed, which would also reseed the generators of all GPUs.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor without making the host wait: to a GPU it goes through page-locked memory."""
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
