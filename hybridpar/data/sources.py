"""Data sets: sources of batches over map-style data sets of (image, label) or over images in memory.

A source gives the same image for the same (seed, epoch, index), whoever asks and in whatever company: every image is
changed under a seed of its own, from which torch, numpy and Python draw. Scaling to floats is left to the loader: a
uint8 batch is a quarter of the bytes to hand between processes and to a GPU.
"""

from __future__ import annotations

import dataclasses
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.transforms import v2

from hybridpar.config import DataConfig
from hybridpar.config.data import USUAL_SIZE, data_set_kind
from hybridpar.data.augment import (
    MODES,
    as_mode,
    eval_transform,
    open_image,
    random_changes,
    random_erasing,
    shift_and_flip,
    train_transform,
)
from hybridpar.data.labels import divided, labels_of
from hybridpar.data.sampling import COPY, AugmentKey, Draw, IntArray, bounded, counter_hash
from hybridpar.errors import DataError, check, counted
from hybridpar.registry import Registry

#: Images that are tried in the place of one that cannot be read, all over the data set, before training ends.
SUBSTITUTES = 20

#: Mean and standard deviation of each channel of pixels in [0, 1].
Statistics = tuple[tuple[float, ...], tuple[float, ...]]

#: What torchvision's ImageNet weights expect.
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
            for image, index in zip(self._shifted(indices, key, torch.device("cpu")), indices.tolist(), strict=True):
                _seed_generators(key, index)
                changed.append(self.augment(image))
        return to_device(_batch(changed), device)

    def _shifted(self, indices: IntArray, key: AugmentKey, device: torch.device) -> Tensor:
        def drawn(draw: Draw, bound: int) -> Tensor:
            return to_device(torch.from_numpy(bounded(counter_hash(*key, draw, indices), bound)), device)

        images = to_device(self.images[torch.from_numpy(indices % COPY)], device)
        rows, columns = (drawn(draw, 2 * self.pad + 1) for draw in (Draw.ROW, Draw.COLUMN))
        return shift_and_flip(images, rows, columns, drawn(Draw.FLIP, 2) == 1 if self.flip else None, self.pad)


class ImageFiles(Dataset[tuple[Image.Image, Any]]):
    """Image files as a map-style data set of (image, label); a JPEG is decoded when its pixels are first used.

    Args:
        root: Directory that `paths` are relative to.
        paths: Image files.
        labels: Class of each file; or which classes it has, bool of shape (samples, classes).
    """

    def __init__(self, root: Path, paths: Sequence[str], labels: Sequence[int] | Tensor) -> None:
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
        """The file of a sample.

        Args:
            index: The sample.
        """
        return str(self.root / os.fsdecode(bytes(self._paths[index])))


class DecodedImages(ImageSource):
    """Images of a map-style data set of (image, label), which are decoded when they are asked for.

    Args:
        dataset: Its images are Pillow's or tensors. A method `name` may say what a sample is called in messages.
        augment: From a PIL image to a tensor (channels, height, width), in training.
        prepare: The same in testing; nothing random.
        labels: Class of each sample of the data set; or which classes it has, bool of shape (samples, classes); None:
            as it says.
        indices: The samples of the data set that are used; None: all.
        channels: Of the images.
        strict: End the training on an image that cannot be read, and do not do without it.
    """

    in_memory = False

    def __init__(
        self,
        dataset: Any,
        *,
        augment: Callable[[Image.Image], Tensor],
        prepare: Callable[[Image.Image], Tensor],
        labels: Tensor | None = None,
        indices: IntArray | None = None,
        channels: int = 3,
        strict: bool = False,
    ) -> None:
        self.dataset = dataset
        self.indices = np.arange(len(dataset)) if indices is None else indices
        self.labels = (labels_of(dataset) if labels is None else labels)[torch.from_numpy(self.indices)]
        self.augment = augment
        self.prepare = prepare
        self.mode = MODES[channels]
        self.strict = strict
        #: Classes with damaged files in which one was found that can be read.
        self._readable: set[int] = set()

    def name(self, index: int) -> str:
        """What an image is called in messages.

        Args:
            index: The sample.
        """
        sample = int(self.indices[index])
        name = getattr(self.dataset, "name", None)
        return str(name(sample)) if callable(name) else f"{sample} of {type(self.dataset).__name__}"

    def load(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Tensor:
        return self._read(indices, key, device, strict=True).images

    def load_readable(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Loaded:
        """Decode some images, and leave out those that cannot be read; see `ImageSource.load_readable`."""
        return self._read(indices, key, device, strict=self.strict)

    def _read(self, indices: IntArray, key: AugmentKey | None, device: torch.device, *, strict: bool) -> Loaded:
        images: list[Tensor] = []
        readable: list[int] = []
        damaged: list[str] = []
        with nullcontext() if key is None else kept_generators():
            for number in indices.tolist():
                copy, sample = divmod(number, COPY)
                problems: list[DataError] = []
                for candidate in self._candidates(sample) if key is not None else [sample]:
                    try:
                        images.append(self._load(candidate, key, copy))
                        readable.append(candidate)
                        break
                    except DataError as error:
                        if strict:
                            raise
                        problems.append(error)
                        damaged.append(error.what)
                        if key is not None:
                            self._require_readable(candidate, error)
                else:
                    if key is not None:
                        raise problems[0]
        batch = to_device(_batch(images), device) if images else torch.empty(0, 3, 1, 1, dtype=torch.uint8)
        return Loaded(batch, np.array(readable, dtype=np.int64), tuple(damaged))

    def _candidates(self, sample: int) -> Iterator[int]:
        """A sample and those that may take its place, far from each other: neighbours may be damaged together."""
        stride = max(1, len(self) // SUBSTITUTES)
        return ((sample + step * stride) % len(self) for step in range(min(SUBSTITUTES, len(self))))

    def _require_readable(self, index: int, problem: DataError) -> None:
        """Refuse a class none of whose training images can be read, once one of them could not."""
        label = self.labels[index]
        if label.ndim or int(label) in self._readable:
            return
        others = (self.labels == label).nonzero().flatten().tolist()
        for other in others:
            try:
                self._open(other).load()
                self._readable.add(int(label))
                return
            except Exception:  # whatever Pillow and the data set raise
                continue
        raise DataError(
            f"none of the {len(others):,} training images of a class can be read: {problem.what}",
            "A class without images cannot be learned.",
            "Replace the files of the class, or remove it.",
        ) from problem

    def _open(self, index: int) -> Image.Image:
        image = self.dataset[int(self.indices[index])][0]
        return image if isinstance(image, Image.Image) else v2.functional.to_pil_image(image)

    def _load(self, index: int, key: AugmentKey | None, copy: int) -> Tensor:
        """Decode and change one image; without a key it is prepared as it is tested."""
        try:
            image = self._open(index)
        except Exception as error:  # whatever Pillow and the data set raise
            raise self._unreadable(index, error) from error
        try:
            image = as_mode(image, self.mode)
            if key is None:
                return self.prepare(image)
            _seed_generators(key, index + copy * COPY)
            return self.augment(image)
        except Exception:
            # Pixels are decoded inside the transform: was it they, or the transform itself?
            try:
                self._open(index).load()
            except Exception as error:
                raise self._unreadable(index, error) from error
            raise

    def _unreadable(self, index: int, error: Exception) -> DataError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = "it is empty, or no image of a known format"
        return DataError(
            f"cannot read the image {self.name(index)}: {reason}",
            "Every image of the data set must be whole.",
            "Replace the image, or remove it from the data set.",
        )


def _seed_generators(key: AugmentKey, index: int) -> None:
    """Seed what the transforms of an image draw from."""
    seed = int(counter_hash(*key, Draw.TRANSFORM, np.array([index]))[0] >> np.uint64(1))
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
        ignored: What was found beside the images, such as "the table val.csv".
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


@dataclass(frozen=True)
class ImageFacts:
    """What a model was trained to tell apart, and on which images: in `run.json`, for where the data set is not.

    Attributes:
        class_names: Names of the classes, in the order of the model's outputs.
        sample_shape: (channels, height, width) of a training image.
        mean: Mean of each channel of pixels in [0, 1].
        std: Standard deviation of each channel.
        test_size: Side of the images in testing, in pixels.
        whole: Images are tested whole, as those of data sets in memory are, and not as a cut-out of their middle.
        multi_label: An image may have several classes, or none.
    """

    class_names: Annotated[tuple[str, ...], Field(min_length=1)]
    sample_shape: tuple[int, Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    test_size: Annotated[int, Field(gt=0)]
    whole: bool
    multi_label: bool

    @classmethod
    def of(cls, data: ImageData) -> ImageFacts:
        """The facts of a data set."""
        return cls(
            class_names=tuple(map(str, data.class_names)),
            sample_shape=data.sample_shape,
            mean=tuple(map(float, data.mean)),
            std=tuple(map(float, data.std)),
            test_size=data.test_size or data.sample_shape[-1],
            whole=data.test.in_memory,
            multi_label=data.multi_label,
        )

    @classmethod
    def read(cls, plain: Any) -> ImageFacts | None:
        """The facts that a file holds; None where it holds none that can be used."""
        try:
            facts = TypeAdapter(cls).validate_python(plain)
        except ValidationError:
            return None
        return facts if len(facts.mean) == len(facts.std) == facts.sample_shape[0] else None

    def plain(self) -> dict[str, Any]:
        """The facts as JSON has them."""
        return dataclasses.asdict(self)


def decoded_data(
    name: str,
    class_names: Sequence[str],
    config: DataConfig,
    datasets: Sequence[Any],
    labels: Sequence[Tensor],
    *,
    size: int = USUAL_SIZE,
    flip: bool = True,
    per_class: int | None = None,
    ignored: Sequence[str] = (),
) -> ImageData:
    """Map-style data sets for training and testing, or one that is divided, whose images are decoded when asked for."""
    images = config.images
    size, channels = images.size or size, images.channels
    mean, std = (
        for_channels(values, channels) for values in (images.mean or IMAGENET_MEAN, images.std or IMAGENET_STD)
    )
    train, test = (
        DecodedImages(
            datasets[part],
            augment=train_transform(size, config, mean, std, flip=flip),
            prepare=eval_transform(images.test or size, images),
            labels=labels[part],
            indices=indices,
            channels=channels,
            strict=config.data_options.bad == "error",
        )
        for part, indices in divided(labels, per_class)
    )
    shape = (channels, size, size)
    return ImageData(
        name=name,
        class_names=tuple(class_names),
        sample_shape=shape,
        train=train,
        test=test,
        mean=mean,
        std=std,
        ignored=tuple(ignored),
    )


def in_memory(
    name: str,
    class_names: Sequence[str],
    config: DataConfig,
    train: MemoryImages,
    test: MemoryImages,
    *,
    size: int,
    statistics: Statistics,
) -> ImageData:
    """A data set that is held in memory, in the size and the channels that options say, else in its usual ones."""
    size, channels = config.images.size or size, config.images.channels
    for part in (train, test):
        part.images = _with_channels(part.images, channels)
    mean, std = (for_channels(values, channels) for values in statistics)
    shape = (channels, size, size)
    names = tuple(class_names)
    return ImageData(name=name, class_names=names, sample_shape=shape, train=train, test=test, mean=mean, std=std)


def for_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Values of red, green and blue, or of grey, for another number of channels; that of transparency is 0.5."""
    if len(values) == channels:
        return tuple(values)
    colours = tuple(values[:3]) if len(values) > 1 else tuple(values) * 3
    if channels == 1:
        return (sum(weight * value for weight, value in zip(GREY, colours, strict=True)),)
    return (*colours, 0.5)[:channels]


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
        fits = not any("\ud800" <= letter <= "\udfff" for letter in name)
        check(fits, f"the name {name!a} of a class or directory is not UTF-8", "Files of a run are.", "Rename it.")
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
        size += f", {counted(channels, 'channel')}"
    if data.test_size not in (None, height):
        size += f", tested at {data.test_size}x{data.test_size}"
    images = f"{len(data.train):,} training and {len(data.test):,} test images"
    text = f"{data.name}, {images}, {counted(data.classes, 'class')}, {size}"
    return f"{text}; ignored: {', '.join(data.ignored)}" if data.ignored else text
