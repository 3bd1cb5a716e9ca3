"""The interface of data sets: sources of batches, in memory or from files, over map-style data sets of (image, label).

A source gives the same image for the same (seed, epoch, index), whoever asks and in whatever company: every image is
changed under a seed of its own, from which torch, numpy and Python draw. Scaling to floats is left to the loader: a
uint8 batch is a quarter of the bytes to hand between processes and to a GPU.
"""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.transforms import v2

from hybridpar.config import DataConfig
from hybridpar.config.data import USUAL_SIZE, data_set_kind
from hybridpar.data.augment import shift_and_flip
from hybridpar.data.decode import MODES, as_mode, decode, open_image
from hybridpar.data.policies import eval_transform, random_changes, random_erasing, train_transform
from hybridpar.data.sampling import COPY, AugmentKey, Draw, IntArray, bounded, counter_hash
from hybridpar.errors import DataError, UsageError
from hybridpar.registry import Registry

#: Images that are tried in the place of one that cannot be read, all over the data set, before training ends.
SUBSTITUTES = 20

#: Of pixels in [0, 1]; the statistics that torchvision's ImageNet weights expect.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

#: Parts of red, green and blue in grey (ITU-R BT.601).
GREY = (0.299, 0.587, 0.114)


class Loaded(NamedTuple):
    """What could be loaded of the images that were asked for.

    Attributes:
        images: Shape (n, channels, height, width): uint8, or float32 where they are normalised already.
        indices: Which they are, shape (n,).
        damaged: Why each file that could not be read could not.
    """

    images: Tensor
    indices: IntArray
    damaged: tuple[str, ...] = ()


class ImageSource(ABC):
    """Labelled images that can be loaded by index: the number of a sample, or of a copy of it (`COPY`)."""

    #: Loading costs a copy, not a file: loader processes would only slow it down.
    in_memory: ClassVar[bool]

    #: int64, shape (samples,); or which classes each image has, bool of shape (samples, classes).
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def load(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Tensor:
        """Load some images.

        Args:
            indices: Samples or copies of them, shape (n,).
            key: Augment by this key; None gives the images as they are tested.
            device: Where the images are wanted.

        Returns:
            As `Loaded.images`.

        Raises:
            DataError: A file cannot be read.
        """

    def load_readable(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Loaded:
        """Load some images, and do without files that cannot be read.

        In training another image takes the place of such a file, the same one whoever asks; in testing it is left out.

        Args:
            indices: As of `load`.
            key: As of `load`.
            device: As of `load`.

        Returns:
            The images, which they are, and why files could not be read.

        Raises:
            DataError: In training, so many files cannot be read that none was found for the place of one.
        """
        return Loaded(self.load(indices, key, device), indices)


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
        #: What else is done to a training image, uint8 (channels, height, width); it draws as that of `DecodedImages`.
        self.augment: Callable[[Tensor], Tensor] | None = None

    def load(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Tensor:
        if key is None:
            return to_device(self.images[torch.from_numpy(indices)], device)
        if self.augment is None:
            return self._shifted(indices, key, device)
        changed = []
        with kept_generators():
            for image, seed in zip(self._shifted(indices, key, torch.device("cpu")), _seeds(key, indices), strict=True):
                _seed_generators(seed)
                changed.append(self.augment(image))
        return to_device(_batch(changed), device)

    def _shifted(self, indices: IntArray, key: AugmentKey, device: torch.device) -> Tensor:
        images = to_device(self.images[torch.from_numpy(indices % COPY)], device)
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


class ImageSet(Dataset[tuple[Image.Image, Tensor]]):
    """A map-style data set of (image, label); images are upright, in any mode.

    Args:
        labels: Class of each image, int64 of shape (samples,); or which classes it has, bool of (samples, classes).
    """

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, Tensor]:
        return self.open(index), self.labels[index]

    @abstractmethod
    def open(self, index: int) -> Image.Image:
        """An image; its pixels may be decoded later, when they are first used.

        Args:
            index: The sample.

        Raises:
            DataError: It cannot be read; the message names it.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """What an image is called in messages.

        Args:
            index: The sample.
        """


class DecodedImages(ImageSource):
    """Images of a data set that are decoded when they are asked for.

    Args:
        dataset: The images and their labels.
        augment: From a PIL image to a tensor (channels, height, width), in training.
        prepare: The same in testing; nothing random.
        channels: Of the images.
        strict: End the training on an image that cannot be read, and do not do without it.
    """

    in_memory = False

    def __init__(
        self,
        dataset: ImageSet,
        *,
        augment: Callable[[Image.Image], Tensor],
        prepare: Callable[[Image.Image], Tensor],
        channels: int = 3,
        strict: bool = False,
    ) -> None:
        self.dataset = dataset
        self.labels = dataset.labels
        self.augment = augment
        self.prepare = prepare
        self.mode = MODES[channels]
        self.strict = strict
        #: Classes with damaged files in which one was found that can be read.
        self._readable: set[int] = set()

    def load(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Tensor:
        return self._read(indices, key, device, strict=True).images

    def load_readable(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Loaded:
        """Decode some images, and leave out those that cannot be read; see `ImageSource.load_readable`."""
        return self._read(indices, key, device, strict=self.strict)

    def _read(self, indices: IntArray, key: AugmentKey | None, device: torch.device, *, strict: bool) -> Loaded:
        images, found, damaged = [], [], []
        # Far from each other: files that were damaged together lie beside each other.
        stride = max(1, len(self) // SUBSTITUTES)
        tries = 1 if key is None else min(SUBSTITUTES, len(self))
        with nullcontext() if key is None else kept_generators():
            for copy, sample in zip(*(part.tolist() for part in np.divmod(indices, COPY)), strict=True):
                problem = None
                for step in range(tries):
                    candidate = (sample + step * stride) % len(self)
                    seed = None if key is None else _seeds(key, np.array([candidate + copy * COPY]))[0]
                    try:
                        images.append(self._load(candidate, seed))
                    except DataError as error:
                        if strict:
                            raise
                        if key is not None:
                            self._require_readable(candidate, error)
                        problem = problem or error
                        damaged.append(error.what)
                        continue
                    found.append(candidate)
                    break
                else:
                    if key is not None and problem is not None:
                        raise problem
        batch = to_device(_batch(images), device) if images else torch.empty(0, 3, 1, 1, dtype=torch.uint8)
        return Loaded(batch, np.array(found, dtype=np.int64), tuple(damaged))

    def _require_readable(self, index: int, problem: DataError) -> None:
        """Refuse a class none of whose training images can be read, once one of them could not."""
        label = self.labels[index]
        if label.ndim or int(label) in self._readable:
            return
        others = (self.labels == label).nonzero().flatten().tolist()
        for other in others:
            with suppress(DataError):
                decode(self.dataset.open(other), self.dataset.name(other))
                self._readable.add(int(label))
                return
        raise DataError(
            f"none of the {len(others):,} training images of a class can be read: {problem.what}",
            "A class without images cannot be learned.",
            "Replace the files of the class, or remove it.",
        ) from problem

    def _load(self, index: int, seed: int | None) -> Tensor:
        """Decode and change one image; None as a seed prepares it as it is tested."""
        image = self.dataset.open(index)
        try:
            image = as_mode(image, self.mode)
            if seed is None:
                return self.prepare(image)
            _seed_generators(seed)
            return self.augment(image)
        except Exception:
            # Pixels are decoded inside the transform: was it they, or the transform itself?
            decode(self.dataset.open(index), self.dataset.name(index))
            raise


def _seeds(key: AugmentKey, indices: IntArray) -> list[int]:
    """A seed for the transforms of each image."""
    numbers: list[int] = (counter_hash(*key, Draw.TRANSFORM, indices) >> np.uint64(1)).tolist()
    return numbers


def _seed_generators(seed: int) -> None:
    """Seed what transforms draw from."""
    # Not torch.manual_seed, which would also reseed the generators of all GPUs.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Inside, the generators of torch's CPU, Python and numpy may be seeded; they are put back afterwards."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _batch(images: list[Tensor]) -> Tensor:
    """Images of one size as one tensor; in a loader process it lies in shared memory from the start."""
    batch: Tensor = default_collate(images)
    return batch


class ImageFiles(ImageSet):
    """Image files.

    Args:
        root: Directory that `paths` are relative to.
        paths: Image files.
        labels: Class of each file; or a tensor as of `ImageSet`.
    """

    def __init__(self, root: Path, paths: Sequence[str], labels: Sequence[int] | Tensor) -> None:
        super().__init__(torch.as_tensor(labels))
        self.root = root
        # One array and not a list: reading a million strings in a forked process would copy the pages they lie on,
        # because their reference counts are written.
        self._paths = np.array([os.fsencode(path) for path in paths])

    def path(self, index: int) -> Path:
        """The file of a sample.

        Args:
            index: The sample.
        """
        return self.root / os.fsdecode(bytes(self._paths[index]))

    def open(self, index: int) -> Image.Image:
        return open_image(self.path(index), self.name(index))

    def name(self, index: int) -> str:
        return str(self.path(index))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor without making the host wait: to a GPU it goes through page-locked memory."""
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


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
        test_size: Side of the test images, in pixels; None where it is that of `sample_shape`.
        ignored: What was found beside the images, such as "1 hidden directory (.ipynb_checkpoints)".
    """

    name: str
    class_names: tuple[str, ...]
    sample_shape: tuple[int, int, int]
    train: ImageSource
    test: ImageSource
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    test_size: int | None = None
    ignored: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several classes, or none: its target is then float32 of shape (classes,)."""
        return self.train.labels.ndim == 2


def decoded_data(
    name: str,
    class_names: Sequence[str],
    config: DataConfig,
    parts: Iterable[ImageSet],
    *,
    size: int = USUAL_SIZE,
    flip: bool = True,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
    ignored: Iterable[str] = (),
) -> ImageData:
    """A data set whose images are decoded when they are asked for: those for training, and those for testing."""
    images = config.images
    size, mean, std = images.size or size, images.mean or mean, images.std or std
    mean, std = for_channels(mean, 0.5, images.channels), for_channels(std, 0.5, images.channels)
    augment = train_transform(size, config, mean, std, flip=flip)
    prepare = eval_transform(images.test or size, images)
    strict = config.data_options.bad == "error"
    train, test = (
        DecodedImages(part, augment=augment, prepare=prepare, channels=images.channels, strict=strict) for part in parts
    )
    return ImageData(
        name=name,
        class_names=tuple(class_names),
        sample_shape=(images.channels, size, size),
        train=train,
        test=test,
        mean=mean,
        std=std,
        ignored=tuple(ignored),
    )


def for_channels(values: Sequence[float], alpha: float, channels: int) -> tuple[float, ...]:
    """Values of red, green and blue, or of grey, for another number of channels."""
    if len(values) == channels:
        return tuple(values)
    colours = tuple(values[:3]) if len(values) > 1 else tuple(values) * 3
    if channels == 1:
        return (sum(weight * value for weight, value in zip(GREY, colours, strict=True)),)
    return (*colours, alpha)[:channels]


def _change_in_memory(data: ImageData, config: DataConfig) -> None:
    """Let the training images of a data set in memory be changed as options say, after they were shifted."""
    source, augmentation = data.train, config.augmentation
    if not isinstance(source, MemoryImages):
        return
    source.flip = source.flip and augmentation.hflip is None  # else the probability that is given is used
    size = data.sample_shape[-1]
    changes = random_changes(augmentation, config.images, 0.0, size, data.mean)
    erasing = random_erasing(augmentation, data.mean, data.std)
    if erasing and augmentation.erase_mode != "const":
        changes.append(v2.Resize(size, antialias=True))
    changes += erasing
    source.augment = v2.Compose(changes) if changes else None


#: Functions that load a data set from a configuration, by the name users type.
DATA_SETS: Registry[Callable[[DataConfig], ImageData]] = Registry("data set")


def load_dataset(config: DataConfig) -> ImageData:
    """Load the data set that a configuration names.

    Args:
        config: Which data set, where its files are, and what its images become.

    Returns:
        The data set.

    Raises:
        UsageError: No such data set, or options that do not fit it.
        DataError: Its files are missing or damaged; the message says what was looked for, where, and the fix.
    """
    data = DATA_SETS.get(data_set_kind(config.data))(config)
    for name in (str(config.data_root), *map(str, data.class_names)):
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise UsageError(
                f"the name {name!a} of a class or of the directory {config.data_root} is not UTF-8",
                "The files of a run and its reports are UTF-8, and name classes and directory.",
                "Rename it, for instance with convmv.",
            )
    images = config.images
    data = replace(data, mean=images.mean or data.mean, std=images.std or data.std, test_size=images.test)
    _change_in_memory(data, config)
    return data


def describe_data(data: ImageData) -> str:
    """One line on a data set: samples, classes, size of the images, and what was ignored.

    Args:
        data: The data set.
    """
    channels, height, width = data.sample_shape
    size = f"{height}x{width}"
    if channels != 3:
        size += f", {channels} channel{'' if channels == 1 else 's'}"
    if data.test_size not in (None, height):
        size += f", tested at {data.test_size}x{data.test_size}"
    images = f"{len(data.train):,} training and {len(data.test):,} test images"
    told = f"{data.name}, {images}, {data.classes:,} class{'' if data.classes == 1 else 'es'}, {size}"
    return f"{told}; ignored: {', '.join(data.ignored)}" if data.ignored else told
