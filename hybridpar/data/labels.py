"""The classes of a data set: their names, the class of each sample, and which samples are for training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridpar.data.sampling import IntArray, split_by_class
from hybridpar.errors import DataError

#: Seed of fixed splits and of synthetic images: the data stay the same whatever --seed says.
FIXED_SEED = 20240229

#: Where map-style data sets have the label of each sample, and the names of classes, without reading images.
_LABELS = ("targets", "labels", "y", "attr")
_NAMES = ("classes", "categories", "all_categories", "attr_names", "class_to_idx")


def divided(labels: Sequence[Tensor], per_class: int | None = None) -> list[tuple[int, IntArray]]:
    """For training and for testing: which part of a data set, and which samples of it.

    Of each class of a set that has one part, `per_class` or 80 % are for training, always the same ones.
    """
    if len(labels) > 1:
        return [(part, np.arange(len(numbers))) for part, numbers in enumerate(labels[:2])]
    (numbers,) = labels
    flat = numbers.numpy() if numbers.ndim == 1 else np.zeros(len(numbers), dtype=np.int64)
    wanted = [size * 4 // 5 if per_class is None else min(per_class, size - 1) for size in np.bincount(flat)]
    return [(0, indices) for indices in split_by_class(flat, [max(1, count) for count in wanted], FIXED_SEED)]


def labels_of(dataset: Any) -> Tensor:
    """Class of each sample, int64; or which classes it has, bool of shape (samples, classes)."""
    as_listed = getattr(dataset, "target_transform", None) is None
    listed = [getattr(dataset, name, ()) for name in _LABELS] if as_listed else []
    labels = next((each for each in listed if each is not None and len(each) == len(dataset)), None)
    if labels is None:
        labels = [dataset[index][1] for index in range(len(dataset))]
    if any(label is None for label in labels):
        raise DataError(f"a part of {type(dataset).__name__} has no labels", fix="Use the files that have them.")
    numbers = torch.as_tensor(np.asarray(labels))
    if numbers.ndim == 2 and numbers.shape[1] == 1:  # a column of classes
        numbers = numbers[:, 0]
    return numbers > 0 if numbers.ndim == 2 else numbers.long()


def class_names_of(dataset: Any, labels: Sequence[Tensor]) -> tuple[str, ...]:
    """Names of the classes; numbers where the data set has none. Labels that are of no class are refused."""
    listed = (getattr(dataset, name, None) for name in _NAMES)
    names = next((names for names in listed if names is not None and len(names)), None)
    if isinstance(names, Mapping):  # of class_to_idx
        names = sorted(names, key=names.__getitem__)
    several = labels[0].ndim == 2
    count = labels[0].shape[1] if several else max(int(part.max()) + 1 for part in labels)
    if names is None:
        names = range(count)
    words = tuple(", ".join(name) if isinstance(name, tuple) else str(name) for name in names)
    outside = [int(part[(part < 0) | (part >= len(words))][0]) for part in labels if not _fits(part, len(words))]
    if outside and not several:
        raise DataError(
            f"{type(dataset).__name__} has a label {outside[0]}, outside of its {len(words)} classes",
            fix="Its files are damaged or incomplete; replace them.",
        )
    return words[:count] if several else words


def _fits(numbers: Tensor, classes: int) -> bool:
    return numbers.numel() == 0 or bool((numbers >= 0).all() and (numbers < classes).all())


def number_labels(
    parts: Sequence[Sequence[Sequence[str]]],
    where: Callable[[int, int], str],
    *,
    several: bool,
    names: Iterable[str] = (),
) -> tuple[tuple[str, ...], list[Tensor]]:
    """Number the classes of labels that are words, one or several for each image: those named, else those of part 0.

    `where` names a row of a part in messages.
    """
    words = tuple(names) or tuple(sorted({label for labels in parts[0] for label in labels}, key=_order))
    numbers = {name: number for number, name in enumerate(words)}
    targets = []
    for part, rows in enumerate(parts):
        for row, labels in enumerate(rows):
            strange = [label for label in labels if label not in numbers]
            if strange or (not several and len(labels) != 1):
                raise DataError(
                    f"{where(part, row)} has the label {strange[0]!r}, which is none of the {len(words)} classes"
                    if strange
                    else f"{where(part, row)} has {len(labels) or 'no'} labels",
                    "The classes are those of the training images.",
                    "Correct the label, or remove the image.",
                )
        if several:
            target = torch.zeros(len(rows), len(words), dtype=torch.bool)
            for row, labels in enumerate(rows):
                target[row, [numbers[label] for label in labels]] = True
        else:
            target = torch.tensor([numbers[labels[0]] for labels in rows], dtype=torch.int64)
        targets.append(target)
    return words, targets


def _order(label: str) -> tuple[bool, int, str]:
    """Numbers first, by value; then words."""
    number = label.isascii() and label.isdigit()
    return not number, int(label) if number else 0, label


def some(names: Iterable[str]) -> str:
    """The first names of many, and how many others there are."""
    every = sorted(names)
    shown = ", ".join(every[:5])
    return shown if len(every) <= 5 else f"{shown} and {len(every) - 5} more"
