"""Numbers the classes of a data set whose labels are words or numbers, one or several for each image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.errors import DataError


@dataclass(frozen=True)
class LabelledPart:
    """Labels of the training or the test images, as they were found.

    Attributes:
        labels: The labels of each image; several where `several`.
        sources: Where each stands, for messages ("line 7 of train.csv").
        several: Whether images may have several labels, or none.
    """

    labels: Sequence[Sequence[str]]
    sources: Sequence[str]
    several: bool = False


def number_labels(
    train: LabelledPart, test: LabelledPart, names: Sequence[str] | None = None
) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """Number the classes, and give each image its target."""
    several = train.several or test.several
    if names is None:
        names = sorted({label for labels in train.labels for label in labels}, key=_order)
    numbers = {name: number for number, name in enumerate(names)}
    if not numbers:
        raise DataError("no training image has a label", "A data set needs at least one class.")
    return tuple(names), _targets(train, numbers, several), _targets(test, numbers, several)


def _targets(part: LabelledPart, numbers: dict[str, int], several: bool) -> Tensor:
    targets = torch.zeros(len(part.labels), len(numbers), dtype=torch.bool) if several else torch.zeros(0)
    numbered = []
    for row, labels in enumerate(part.labels):
        for label in labels:
            if label not in numbers:
                known = ", ".join(list(numbers)[:8]) + (", ..." if len(numbers) > 8 else "")
                raise DataError(
                    f"{part.sources[row]} has the label {label!r}, which is none of the {len(numbers)} classes",
                    f"The classes are those of the training images: {known}",
                    "Correct the label, or add training images of that class.",
                )
            if several:
                targets[row, numbers[label]] = True
        if not several:
            if not labels:
                raise DataError(f"{part.sources[row]} has no label", fix="Give it one, or remove the image.")
            numbered.append(numbers[labels[0]])
    return targets if several else torch.tensor(numbered, dtype=torch.int64)


def _order(label: str) -> tuple[bool, int, str]:
    """Numbers first, by value; then words."""
    number = label.isascii() and label.isdigit()
    return not number, int(label) if number else 0, label
