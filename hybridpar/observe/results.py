"""What a test found: accuracy by class, which class was taken for which, and whether the confidence is right.

`TestResult` has the figures, as text, as JSON, and as CSV files; the picture of the confusion matrix is drawn by
`confusion_picture.py`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Bins of the confidence in which it is compared with the accuracy, as in Guo et al. 2017.
BINS = 15

#: Classes of which there is a confusion matrix at most.
MOST_CLASSES = 2000

#: Classes, and confused pairs, that the text names.
_NAMED = 5


@dataclass(frozen=True)
class Bin:
    """The images whose confidence is in one interval.

    Attributes:
        above: Lower end of the interval, which it does not contain; the first one contains 0.
        up_to: Upper end.
        images: Number of images.
        confidence: Mean confidence; None without images.
        accuracy: Part of them that is classified right; None without images.
    """

    above: float
    up_to: float
    images: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class TestResult:
    """The result of a test, image by image.

    Attributes:
        classes: Names of the classes.
        accuracy: Part of the images that is classified right, 0 to 1.
        loss: Mean loss.
        images: Number of images.
        unreadable: Images that could not be read and are not in any figure.
        right_of_class: Images of each class that are classified right, shape (classes,); where an image may have
            several classes, images of which it is said rightly whether they have the class.
        images_of_class: Images that this is out of, shape (classes,).
        targets: Class of each image, shape (images,); None where an image may have several, as the next three.
        predictions: The class that the model gave it.
        confidences: Probability of that class.
        in_top5: Whether its class is among the five most probable ones.
    """

    __test__ = False  # Not a test case, whatever pytest makes of its name.

    classes: tuple[str, ...]
    accuracy: float
    loss: float
    images: int
    unreadable: int
    right_of_class: NDArray[np.int64]
    images_of_class: NDArray[np.int64]
    targets: NDArray[np.int64] | None = None
    predictions: NDArray[np.int64] | None = None
    confidences: NDArray[np.float64] | None = None
    in_top5: NDArray[np.bool_] | None = None

    @cached_property
    def top5_accuracy(self) -> float | None:
        """Part of the images whose class is among the five most probable ones; None where they may have several."""
        return None if self.in_top5 is None else float(self.in_top5.mean())

    @cached_property
    def class_accuracies(self) -> list[float | None]:
        """Accuracy of each class; None of one without images."""
        pairs = zip(self.right_of_class.tolist(), self.images_of_class.tolist(), strict=True)
        return [right / images if images else None for right, images in pairs]

    @cached_property
    def confusion(self) -> NDArray[np.int64] | None:
        """How many images of a class (row) were taken for which (column), shape (classes, classes).

        None where images may have several classes, or there are more than `MOST_CLASSES`.
        """
        count = len(self.classes)
        if self.targets is None or self.predictions is None or count > MOST_CLASSES:
            return None
        pairs = np.bincount(self.targets * count + self.predictions, minlength=count * count)
        return pairs.reshape(count, count).astype(np.int64)

    @cached_property
    def calibration(self) -> list[Bin]:
        """The reliability table: confidence and accuracy in 15 intervals of equal width.

        Guo et al. 2017, "On Calibration of Modern Neural Networks", section 2: bin m has the images whose confidence is
        in ((m - 1) / 15, m / 15]. Empty where images may have several classes.
        """
        if self.confidences is None or self.targets is None:
            return []
        right = self.targets == self.predictions
        edges = np.arange(BINS + 1) / BINS
        known = np.nan_to_num(self.confidences)  # of scores that are no numbers
        places = np.clip(np.searchsorted(edges, known, side="left") - 1, 0, BINS - 1)
        table = []
        for place in range(BINS):
            inside = places == place
            images = int(inside.sum())
            confidence = float(known[inside].mean()) if images else None
            accuracy = float(right[inside].mean()) if images else None
            table.append(Bin(float(edges[place]), float(edges[place + 1]), images, confidence, accuracy))
        return table

    @cached_property
    def calibration_error(self) -> float | None:
        """Expected calibration error: the mean over images of |accuracy - confidence| of their bin.

        Guo et al. 2017, equation 3. None where images may have several classes.
        """
        parts = [
            one.images * abs(one.accuracy - one.confidence)
            for one in self.calibration
            if one.accuracy is not None and one.confidence is not None
        ]
        return sum(parts) / self.images if parts else None

    def plain(self) -> dict[str, Any]:
        """All figures, as JSON has them."""
        classes = zip(
            *(self.classes, self.images_of_class.tolist(), self.right_of_class.tolist(), self.class_accuracies),
            strict=True,
        )
        return {
            "test_accuracy": self.accuracy,
            "top5_accuracy": self.top5_accuracy,
            "test_loss": self.loss if math.isfinite(self.loss) else None,
            "images": self.images,
            "unreadable_images": self.unreadable,
            "calibration_error": self.calibration_error,
            "calibration": [vars(one) for one in self.calibration],
            "classes": [dict(zip(("class", "images", "right", "accuracy"), one, strict=True)) for one in classes],
            "confusion": None if self.confusion is None else self.confusion.tolist(),
        }

    def text(self) -> str:
        """The figures that most readers want, in a few lines."""
        lines = [f"accuracy  {100 * self.accuracy:.2f} % of {self.images:,} images"]
        if self.top5_accuracy is not None and len(self.classes) > _NAMED:
            lines[0] += f", {100 * self.top5_accuracy:.2f} % among the first five"
        if self.unreadable:
            lines.append(f"          {self.unreadable:,} images cannot be read and do not count")
        lines.append(f"loss      {self.loss:.4f}")
        if self.calibration_error is not None:
            lines.append(f"ECE       {100 * self.calibration_error:.2f} % (confidence against accuracy, {BINS} bins)")
        known = [(one, name) for one, name in zip(self.class_accuracies, self.classes, strict=True) if one is not None]
        worst = [f"{name} {100 * one:.1f} %" for one, name in sorted(known, key=lambda pair: pair[0])[:_NAMED]]
        lines.append(f"lowest    {', '.join(worst)}")
        if mistakes := self.mistakes(_NAMED):
            told = [f"{true} for {taken} {count:,}x" for true, taken, count in mistakes]
            lines.append(f"mistaken  {', '.join(told)}")
        return "\n".join(lines)

    def mistakes(self, most: int) -> list[tuple[str, str, int]]:
        """The pairs of classes that are confused most often."""
        if self.targets is None or self.predictions is None:
            return []
        wrong = self.targets != self.predictions
        pairs, counts = np.unique(self.targets[wrong] * len(self.classes) + self.predictions[wrong], return_counts=True)
        order = np.argsort(-counts, kind="stable")[:most]
        return [
            (self.classes[pair // len(self.classes)], self.classes[pair % len(self.classes)], count)
            for pair, count in zip(pairs[order].tolist(), counts[order].tolist(), strict=True)
        ]

    def tables(self) -> dict[str, str]:
        """The CSV files of the test by name: `classes.csv`, `calibration.csv` and `confusion.csv`."""
        rows = zip(self.classes, self.images_of_class, self.right_of_class, self.class_accuracies, strict=True)
        files = {"classes.csv": _csv([("class", "images", "right", "accuracy"), *rows])}
        if self.calibration:
            files["calibration.csv"] = _csv(
                [tuple(vars(self.calibration[0])), *(tuple(vars(one).values()) for one in self.calibration)]
            )
        if self.confusion is not None:
            head = ("class \\ taken for", *self.classes)
            body = [(name, *row) for name, row in zip(self.classes, self.confusion.tolist(), strict=True)]
            files["confusion.csv"] = _csv([head, *body])
        return files


def _csv(rows: Sequence[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
