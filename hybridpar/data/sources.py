"""Data sets: what a model must know of one, and how it is made from map-style data sets of (image, label).

A data set is a function from a configuration to an `ImageData`. It hands one or two map-style data sets to
`image_data`, which does the rest: classes, division, size and channels, augmentation.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor
from torch.utils.data import TensorDataset
from torchvision.transforms import v2

from hybridpar.config import DataConfig
from hybridpar.config.data import TORCHVISION_SETS, USERS, USUAL_SIZE, data_set_kind, samples_of
from hybridpar.data.augment import eval_transform, random_changes, train_transform
from hybridpar.data.images import ImageSource, MemoryImages
from hybridpar.data.sampling import IntArray, split_by_class
from hybridpar.errors import DataError, HybridparError, check, counted, nearest, shortened
from hybridpar.formats.cache import locked

#: Mean and standard deviation of each channel of pixels in [0, 1].
Statistics = tuple[tuple[float, ...], tuple[float, ...]]

#: What torchvision's ImageNet weights expect.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
IMAGENET: Statistics = IMAGENET_MEAN, IMAGENET_STD

#: Parts of red, green and blue in grey (ITU-R BT.601).
GREY = (0.299, 0.587, 0.114)

#: Seed of fixed splits and of synthetic images: the data stay the same whatever --seed says.
FIXED_SEED = 20240229

#: Functions that load a data set from a configuration, in modules that are imported when they are asked for; what is
#: not here is torchvision's.
LOADERS = {
    "folder": "file_sets:load_folder",
    "csv": "file_sets:load_table",
    "hf/NAME": "library_sets:load_hub",
    USERS: "library_sets:load_users",
    "digits": "memory_sets:load_digits",
    "synthetic": "memory_sets:load_synthetic",
}

#: Where map-style data sets have the label of each sample, and the names of classes, without reading images.
_LABELS = ("targets", "labels", "y", "attr")
_NAMES = ("classes", "categories", "all_categories", "attr_names", "class_to_idx")


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """What a model was trained to tell apart, and on which images: in `run.json`, for where the data set is not.

    Attributes:
        class_names: Names of the classes, in the order of the labels and of the model's outputs.
        sample_shape: (channels, height, width) of a training image.
        mean: Mean of each channel of pixels in [0, 1], taken off.
        std: Standard deviation of each channel, divided by.
        test_size: Side of the images in testing, in pixels.
        whole: Images are tested whole, as those of data sets in memory are, and not as a cut-out of their middle.
        multi_label: An image may have several classes, or none: its target is then float32 of shape (classes,).
    """

    class_names: Annotated[tuple[str, ...], Field(min_length=1)]
    sample_shape: tuple[int, Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    test_size: Annotated[int, Field(gt=0)]
    whole: bool = False
    multi_label: bool = False

    @classmethod
    def of(cls, data: ImageData) -> ImageFacts:
        """The facts of a data set."""
        return cls(**{field.name: getattr(data, field.name) for field in fields(cls)})

    @classmethod
    def read(cls, plain: Any) -> ImageFacts | None:
        """The facts that a file holds; None where it holds none that can be used."""
        try:
            facts = TypeAdapter(cls).validate_python(plain)
        except ValidationError:
            return None
        return facts if len(facts.mean) == len(facts.std) == facts.sample_shape[0] else None


@dataclass(frozen=True, kw_only=True)
class ImageData(ImageFacts):
    """A data set: its images and what a model must know about them.

    Args:
        name: The name it was asked for by.
        train: Training images.
        test: Test images.
        ignored: What was found beside the images, such as "the table val.csv".
    """

    name: str
    train: ImageSource
    test: ImageSource
    ignored: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)


def image_data(
    config: DataConfig,
    parts: Sequence[Any],
    *,
    names: Sequence[str] | None = None,
    size: int = USUAL_SIZE,
    flip: bool = True,
    statistics: Statistics = IMAGENET,
    per_class: int | None = None,
    ignored: Sequence[str] = (),
) -> ImageData:
    """Make a data set of map-style data sets.

    Args:
        config: What the images become.
        parts: Training and test images, or one data set that is divided: items are (image, label), of which the image
            is Pillow's or a tensor, and the label a number or a zero or one for each class. A `TensorDataset` of uint8
            images (samples, 1 or 3, height, width) is held in memory, unless a derived class makes its items; others
            are read when they are asked for.
        names: Names of the classes; None: as the first part says, else numbers.
        size: Side of the images where options do not say it.
        flip: Whether a mirrored image is still one of its class, and images are mirrored where options do not say it.
        statistics: Mean and standard deviation of each channel, where options do not say them.
        per_class: Training images of each class of a set that is divided; None: 4 of 5.
        ignored: As of `ImageData`.

    Raises:
        DataError: Labels are missing, or of no class.
    """
    images, channels = config.images, config.images.channels
    size = images.size or size
    test_size = images.test or size
    mean = images.mean or _for_channels(statistics[0], channels)
    std = images.std or _for_channels(statistics[1], channels)
    labels = [labels_of(part) for part in parts]
    flipped = config.augmentation.hflip
    flipped = (0.5 if flip else 0.0) if flipped is None else flipped

    def source(part: int, indices: IntArray) -> ImageSource:
        dataset, chosen = parts[part], torch.from_numpy(indices)
        stored = next(iter(_tensors_of(dataset)), None)
        if stored is None or stored.dtype != torch.uint8 or stored.ndim != 4 or stored.shape[1] not in (1, 3):
            return ImageSource(
                dataset,
                labels[part][chosen],
                augment=train_transform(size, config, mean, std, flip=flipped),
                prepare=eval_transform(test_size, images),
                indices=indices,
                channels=channels,
                strict=config.data_options.bad == "error",
            )
        pixels = stored if len(indices) == len(dataset) else stored[chosen]
        changes = random_changes(size, config, mean, std, flip=0.0)  # images in memory are mirrored all at once
        augment = v2.Compose(changes) if changes else None
        return MemoryImages(_with_channels(pixels, channels), labels[part][chosen], flip=flipped, augment=augment)

    train, test = (source(*chosen) for chosen in _divided(labels, per_class))
    if not len(train) or not len(test):
        raise DataError(
            f"the data set {config.data} has {len(train):,} training and {len(test):,} test images",
            "Both are needed. Of a set without a test part, four of five images of each class are for training.",
            "Add images: at least two of a class, or a test part.",
        )
    return ImageData(
        name=samples_of(config.data),
        class_names=_class_names(parts[0], labels, names),
        sample_shape=(channels, size, size),
        train=train,
        test=test,
        mean=mean,
        std=std,
        test_size=test_size,
        whole=test.in_memory,
        multi_label=labels[0].ndim == 2,
        ignored=tuple(ignored),
    )


def _divided(labels: Sequence[Tensor], per_class: int | None) -> list[tuple[int, IntArray]]:
    """For training and for testing: which part of a data set, and which samples of it.

    Of each class of a set that has one part, `per_class` or 80 % are for training, always the same ones.
    """
    if len(labels) > 1:
        return [(part, np.arange(len(numbers))) for part, numbers in enumerate(labels)]
    (numbers,) = labels
    flat = numbers.numpy() if numbers.ndim == 1 else np.zeros(len(numbers), dtype=np.int64)
    wanted = [size * 4 // 5 if per_class is None else min(per_class, size - 1) for size in np.bincount(flat)]
    return [(0, indices) for indices in split_by_class(flat, [max(1, count) for count in wanted], FIXED_SEED)]


def _tensors_of(dataset: Any) -> tuple[Tensor, ...]:
    """What the items of a `TensorDataset` are taken from; nothing where a derived class makes them itself."""
    taken = getattr(type(dataset), "__getitem__", None) is TensorDataset.__getitem__
    tensors: tuple[Tensor, ...] = dataset.tensors if taken else ()
    return tensors


def labels_of(dataset: Any) -> Tensor:
    """Class of each sample, int64; or which classes it has, bool of shape (samples, classes)."""
    as_listed = getattr(dataset, "target_transform", None) is None
    listed = [getattr(dataset, name, ()) for name in _LABELS] if as_listed else []
    listed += _tensors_of(dataset)[1:]
    labels = next((each for each in listed if each is not None and len(each) == len(dataset)), None)
    if labels is None:
        labels = [dataset[index][1] for index in range(len(dataset))]
    if any(label is None for label in labels):
        raise DataError(f"a part of {type(dataset).__name__} has no labels", fix="Use the files that have them.")
    numbers = torch.as_tensor(np.asarray(labels))
    if numbers.ndim == 2 and numbers.shape[1] == 1:  # a column of classes
        numbers = numbers[:, 0]
    return numbers > 0 if numbers.ndim == 2 else numbers.long()


def listed_names(dataset: Any) -> list[str] | None:
    """Names of the classes that a map-style data set lists."""
    listed = (getattr(dataset, name, None) for name in _NAMES)
    names = next((names for names in listed if names is not None and len(names)), None)
    if isinstance(names, Mapping):  # of class_to_idx
        names = sorted(names, key=names.__getitem__)
    return None if names is None else [", ".join(name) if isinstance(name, tuple) else str(name) for name in names]


def _class_names(dataset: Any, labels: Sequence[Tensor], names: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the classes; numbers where the data set has none. Labels that are of no class are refused."""
    several = labels[0].ndim == 2
    least, most = 0, labels[0].shape[-1] - 1
    if not several:
        least, most = map(int, torch.aminmax(torch.cat([torch.zeros(1, dtype=torch.int64), *labels])))
    names = names or listed_names(dataset) or [str(number) for number in range(most + 1)]
    if several:
        return tuple(names[: most + 1])
    if least < 0 or most >= len(names):
        raise DataError(
            f"{type(dataset).__name__} has a label {least or most}, outside of its {len(names)} classes",
            fix="Its files are damaged or incomplete; replace them.",
        )
    return tuple(names)


def number_labels(
    parts: Sequence[Any],
    labels: Sequence[Sequence[list[str]]],
    names: Sequence[str] = (),
    rows_of: Sequence[Callable[[int], str]] = (),
) -> list[str]:
    """Give data sets labels that are words, one or several for each image.

    Args:
        parts: The data sets.
        labels: The words of each image of each part.
        names: Names of the classes.
        rows_of: For each part, what the row of a label is called in messages; not given: what its image is called.

    Returns:
        The names of the classes: those that are given, else the words of the first part.
    """
    several = any(len(words) > 1 for rows in labels for words in rows)
    names = list(names) or sorted({word for words in labels[0] for word in words}, key=_order)
    numbers = {name: number for number, name in enumerate(names)}
    rows_of = rows_of or [part.name for part in parts]
    for part, rows, called in zip(parts, labels, rows_of, strict=True):
        target = np.zeros((len(rows), len(names)), bool) if several else np.zeros(len(rows), np.int64)
        for row, words in enumerate(rows):
            strange = [word for word in words if word not in numbers]
            if strange or not (several or words):
                said = f"the label {strange[0]!r}, which is none of the {len(names)} classes" if strange else "no label"
                rule, fix = "The classes are those of the training images.", "Correct the label, or remove the image."
                raise DataError(f"{called(row)} has {said}", rule, fix)
            if several:
                target[row, [numbers[word] for word in words]] = True
            else:
                target[row] = numbers[words[0]]
        part.labels = torch.from_numpy(target)
    return names


def _order(label: str) -> tuple[float, str]:
    """Numbers first, by value; then words."""
    return int(label) if label.isdecimal() else np.inf, label


def _for_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Values of red, green and blue, or of grey, for another number of channels; that of transparency is 0.5."""
    if len(values) == channels:
        return tuple(values)
    colours = tuple(values[:3]) if len(values) > 1 else tuple(values) * 3
    if channels == 1:
        return (sum(weight * value for weight, value in zip(GREY, colours, strict=True)),)
    return (*colours, 0.5)[:channels]


def _with_channels(images: Tensor, channels: int) -> Tensor:
    """Images in grey, RGB or RGBA, from images in grey or RGB."""
    change = v2.functional.rgb_to_grayscale if channels == 1 else v2.functional.grayscale_to_rgb
    images = change(images)  # one channel three times takes no more memory
    return torch.cat([images, torch.full_like(images[:, :1], 255)], dim=1) if channels == 4 else images


@contextmanager
def reading(what: str, rule: str, fix: str, *, lock: Path | None = None) -> Iterator[None]:
    """Inside, whatever a library or the system finds wrong with files is one error.

    With `lock` they may be fetched, by one process at a time; those that wait find them there.
    """
    try:
        if lock is not None:
            lock.parent.mkdir(parents=True, exist_ok=True)
        with nullcontext() if lock is None else locked(lock):
            yield
    except HybridparError:
        raise
    except Exception as error:  # libraries let through whatever their back ends raise
        reason = error.__cause__ or error  # what is wrong with a file is the cause of an error that does not say it
        text = " ".join(str(getattr(reason, "strerror", None) or reason).split())
        text = text.replace("You can use download=True to download it", "").strip(" .")  # torchvision's, in Python
        raise DataError(f"cannot read {what}: {text or type(reason).__name__}", rule, fix) from error


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
    kind = data_set_kind(config.data)
    known = {**dict.fromkeys(TORCHVISION_SETS, "library_sets:load_torchvision"), **LOADERS}
    check(kind in known, f"unknown data set {shortened(repr(kind))}", fix=nearest(kind, known))
    reads = kind not in ("digits", "synthetic") or config.data_root == DataConfig().data_root
    what = f"--data {kind} reads no files, and --data-root is {config.data_root}"
    check(
        reads,
        what,
        "Images in one folder per class are the data set folder.",
        "Write --data folder, or no --data-root.",
    )
    load: Callable[[DataConfig], ImageData] = pkgutil.resolve_name(f"hybridpar.data.{known[kind]}")
    data = load(config)
    for name in (str(config.data_root), *data.class_names):
        fits = not any("\ud800" <= letter <= "\udfff" for letter in name)
        check(fits, f"the name {name!a} of a class or directory is not UTF-8", "Files of a run are.", "Rename it.")
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
    if data.test_size != height:
        size += f", tested at {data.test_size}x{data.test_size}"
    images = f"{len(data.train):,} training and {len(data.test):,} test images"
    text = f"{data.name}, {images}, {counted(data.classes, 'class')}, {size}"
    return f"{text}; ignored: {', '.join(data.ignored)}" if data.ignored else text
