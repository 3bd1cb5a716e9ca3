"""The interface of data sets: sources of uint8 batches, in memory or from files.

A source gives the same image for the same (seed, epoch, index), whoever asks and in whatever company. Scaling to
floats is left to the loader: a uint8 batch is a quarter of the bytes to hand between processes and to a GPU.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.transforms import v2

from hybridpar.config import DataConfig
from hybridpar.config.data import USUAL_SIZE, Augmentation, Images, data_set_kind
from hybridpar.data.augment import shift_and_flip
from hybridpar.data.decode import decode, open_image
from hybridpar.data.erasing import Erased, NoiseErasing
from hybridpar.data.policies import DEFAULT_INTERPOLATION, interpolation_of, random_changes, random_crop, random_erasing
from hybridpar.data.sampling import AugmentKey, Draw, IntArray, bounded, counter_hash
from hybridpar.errors import DataError, UsageError
from hybridpar.registry import Registry

#: Images that are tried in the place of one that cannot be read, all over the data set, before training ends.
SUBSTITUTES = 20

#: Of pixels in [0, 1]; the statistics that torchvision's ImageNet weights expect.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

#: Side of the square that is tested over the shorter side of the resized image, where nothing says it: 224 / 256.
CROP_RATIO = 0.875


class Loaded(NamedTuple):
    """What could be loaded of the images that were asked for.

    Attributes:
        images: uint8, shape (n, channels, height, width).
        indices: Which they are, shape (n,).
        damaged: Why each file that could not be read could not.
        erased: What is erased in the images once they are normalised; None where nothing is.
    """

    images: Tensor
    indices: IntArray
    damaged: tuple[str, ...] = ()
    erased: Erased | None = None


class ImageSource(ABC):
    """Labelled images that can be loaded by index."""

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
            indices: Samples, shape (n,).
            key: Augment by this key; None gives the images as they are tested.
            device: Where the images are wanted.

        Returns:
            uint8, shape (n, channels, height, width).

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
        #: What else is done to a training image, uint8 (channels, height, width); it draws as those of `FileImages` do.
        self.augment: Callable[[Tensor], Tensor] | None = None

    def load(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Tensor:
        if key is None:
            return to_device(self.images[torch.from_numpy(indices)], device)
        if self.augment is None:
            return self._shifted(indices, key, device)
        with torch.random.fork_rng(devices=[]):
            changed = []
            shifted = self._shifted(indices, key, torch.device("cpu"))
            for seed, image in zip(_transform_seeds(key, indices), shifted, strict=True):
                _seed_transforms(seed)
                changed.append(self.augment(image))
        return to_device(_batch(changed), device)

    def _shifted(self, indices: IntArray, key: AugmentKey, device: torch.device) -> Tensor:
        images = to_device(self.images[torch.from_numpy(indices)], device)
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


class DecodedImages(ImageSource):
    """Images that are decoded when they are asked for, and converted to RGB: see `hybridpar.data.decode`.

    The transforms may draw from torch's CPU generator as torchvision's do. They run under a seed of their own for each
    image, and the generator's state is restored after it.

    Args:
        labels: Class of each image, int64 of shape (samples,); or which classes it has, bool of (samples, classes).
        augment: From a PIL image to a uint8 tensor (3, height, width), in training.
        prepare: The same in testing; nothing random.
        strict: End the training on an image that cannot be read, and do not do without it.
    """

    in_memory = False

    def __init__(
        self,
        labels: Tensor,
        *,
        augment: Callable[[Image.Image], Tensor],
        prepare: Callable[[Image.Image], Tensor],
        strict: bool = False,
    ) -> None:
        self.labels = labels
        self.augment = augment
        self.prepare = prepare
        self.strict = strict
        #: Classes with damaged files in which one was found that can be read.
        self._readable: set[int] = set()

    @abstractmethod
    def open(self, index: int) -> Image.Image:
        """An image in RGB, upright; its pixels may be decoded later, when they are first used.

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

    def load(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Tensor:
        return self._read(indices, key, device, strict=True).images

    def load_readable(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Loaded:
        """Decode some images, and leave out those that cannot be read; see `ImageSource.load_readable`."""
        return self._read(indices, key, device, strict=self.strict)

    def _read(self, indices: IntArray, key: AugmentKey | None, device: torch.device, *, strict: bool) -> Loaded:
        images, kept, damaged = [], [], []
        # Far from each other: files that were damaged together lie beside each other.
        stride = max(1, len(self) // SUBSTITUTES)
        tries = 1 if key is None else min(SUBSTITUTES, len(self))
        # Transforms draw from torch's CPU generator, which is put back afterwards.
        with nullcontext() if key is None else torch.random.fork_rng(devices=[]):
            for index, seed in zip(indices.tolist(), _transform_seeds(key, indices), strict=True):
                problem = None
                for place in range(tries):
                    one = (index + place * stride) % len(self)
                    if place:
                        seed = _transform_seeds(key, np.array([one]))[0]
                    try:
                        images.append(self._load(one, seed))
                    except DataError as error:
                        if strict:
                            raise
                        if key is not None:
                            self._require_readable(one, error)
                        problem = problem or error
                        damaged.append(error.what)
                        continue
                    kept.append(one)
                    break
                else:
                    if key is not None and problem is not None:
                        raise problem
        found = np.array(kept, dtype=np.int64)
        if not images:
            return Loaded(torch.empty(0, 3, 1, 1, dtype=torch.uint8), found, tuple(damaged))
        return Loaded(to_device(_batch(images), device), found, tuple(damaged))

    def _require_readable(self, index: int, problem: DataError) -> None:
        """Refuse a class none of whose training images can be read, once one of them could not."""
        label = self.labels[index]
        if label.ndim or int(label) in self._readable:
            return
        others = (self.labels == label).nonzero().flatten().tolist()
        for other in others:
            with suppress(DataError):
                decode(self.open(other), self.name(other))
                self._readable.add(int(label))
                return
        raise DataError(
            f"none of the {len(others):,} training images of a class can be read: {problem.what}",
            "A class without images cannot be learned.",
            "Replace the files of the class, or remove it.",
        ) from problem

    def _load(self, index: int, seed: int | None) -> Tensor:
        """Decode and change one image; None as a seed prepares it as it is tested."""
        image = self.open(index)
        try:
            if seed is None:
                return self.prepare(image)
            _seed_transforms(seed)
            return self.augment(image)
        except Exception:
            # Pixels are decoded inside the transform: was it they, or the transform itself?
            decode(self.open(index), self.name(index))
            raise


def _transform_seeds(key: AugmentKey | None, indices: IntArray) -> list[Any]:
    """A seed for the transforms of each image; None for each in testing."""
    if key is None:
        return [None] * len(indices)
    return list((counter_hash(*key, Draw.TRANSFORM, indices) >> np.uint64(1)).tolist())


def _seed_transforms(seed: int) -> None:
    """Seed torch's CPU generator, which transforms draw from."""
    # Not torch.manual_seed, which would also reseed the generators of all GPUs.
    torch.default_generator.manual_seed(seed)


def _batch(images: list[Tensor]) -> Tensor:
    """Images of one size as one tensor; in a loader process it lies in shared memory from the start."""
    batch: Tensor = default_collate(images)
    return batch


class FileImages(DecodedImages):
    """Image files, decoded when they are asked for and converted to RGB.

    Args:
        root: Directory that `paths` are relative to.
        paths: Image files.
        labels: Class of each file; or a tensor as of `DecodedImages`.
        augment: As of `DecodedImages`.
        prepare: As of `DecodedImages`.
        strict: As of `DecodedImages`.
    """

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        labels: Sequence[int] | Tensor,
        *,
        augment: Callable[[Image.Image], Tensor],
        prepare: Callable[[Image.Image], Tensor],
        strict: bool = False,
    ) -> None:
        whole = labels if isinstance(labels, Tensor) else torch.tensor(labels, dtype=torch.int64)
        super().__init__(whole, augment=augment, prepare=prepare, strict=strict)
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
        path = self.path(index)
        return open_image(path, str(path))

    def name(self, index: int) -> str:
        return str(self.path(index))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor without making the host wait: to a GPU it goes through page-locked memory."""
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def imagenet_transforms(
    size: int, config: DataConfig, mean: Sequence[float] = IMAGENET_MEAN, *, flip: bool = True
) -> tuple[v2.Compose, v2.Compose]:
    """The usual augmentation and test preparation of ImageNet models (Szegedy et al. 2015; He et al. 2016)."""
    augmentation, images = config.augmentation, config.images
    changes = random_changes(augmentation, images, 0.5 if flip else 0.0, size, mean)
    augment = v2.Compose([random_crop(size, augmentation, images), *changes, *random_erasing(augmentation, mean)])
    mode = interpolation_of(images.interpolation or DEFAULT_INTERPOLATION)
    resize = v2.Resize(round(size / (images.crop or CROP_RATIO)), mode, antialias=True)
    prepare = v2.Compose([resize, v2.CenterCrop(size), v2.PILToTensor()])
    return augment, prepare


class Decoding(TypedDict):
    """How decoded images are used: the arguments of `DecodedImages` of the same names.

    Attributes:
        augment: From a PIL image to a uint8 tensor, in training.
        prepare: The same in testing.
        strict: End the training on an image that cannot be read.
    """

    augment: Callable[[Image.Image], Tensor]
    prepare: Callable[[Image.Image], Tensor]
    strict: bool


def decoding(config: DataConfig, size: int, *, flip: bool = True) -> Decoding:
    """What the options say of images that are decoded."""
    mean = config.images.mean or IMAGENET_MEAN
    augment, prepare = imagenet_transforms(size, config, mean, flip=flip)
    if config.images.test is not None:
        _, prepare = imagenet_transforms(config.images.test, config, mean)
    return {"augment": augment, "prepare": prepare, "strict": config.data_options.bad == "error"}


def augment_in_memory(data: ImageData, augmentation: Augmentation, images: Images) -> None:
    """Let the training images of a data set in memory be changed as options say, after they were shifted."""
    source = data.train
    if not isinstance(source, MemoryImages):
        return
    source.flip = source.flip and augmentation.hflip is None  # else the probability that is given is used
    changes = random_changes(augmentation, images, 0.0, data.sample_shape[-1], data.mean)
    changes += random_erasing(augmentation, data.mean)
    source.augment = v2.Compose(changes) if changes else None


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
        erasing: Erases rectangles of training images to noise once they are normalised; None does not.
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
    erasing: NoiseErasing | None = None
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
    parts: Callable[[Decoding], Iterable[DecodedImages]],
    *,
    size: int = USUAL_SIZE,
    flip: bool = True,
    **more: Any,
) -> ImageData:
    """A data set whose images are decoded when they are asked for."""
    size = config.images.size or size
    train, test = parts(decoding(config, size, flip=flip))
    return ImageData(
        name=name, class_names=tuple(class_names), sample_shape=(3, size, size), train=train, test=test, **more
    )


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
    augmentation, images = config.augmentation, config.images
    data = replace(data, mean=images.mean or data.mean, std=images.std or data.std, test_size=images.test)
    augment_in_memory(data, augmentation, images)
    if augmentation.erase and augmentation.erase_mode != "const":
        erasing = NoiseErasing(augmentation.erase, augmentation.erase_mode == "pixel", data.sample_shape)
        data = replace(data, erasing=erasing)
    return data


def describe_data(data: ImageData) -> str:
    """One line on a data set: samples, classes, size of the images, and what was ignored.

    Args:
        data: The data set.
    """
    channels, height, width = data.sample_shape
    size = f"{height}x{width}" + ("" if channels == 3 else f", {channels} channel{'' if channels == 1 else 's'}")
    images = f"{len(data.train):,} training and {len(data.test):,} test images"
    told = f"{data.name}, {images}, {data.classes:,} class{'' if data.classes == 1 else 'es'}, {size}"
    return f"{told}; ignored: {', '.join(data.ignored)}" if data.ignored else told
