"""What a test found: accuracy by class, which class was taken for which, and whether the confidence is right.

`TestResult` has the figures, as text and as JSON; `page.py` draws the confusion matrix.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Bins of the confidence in which it is compared with the accuracy, as in Guo et al. 2017.
BINS = 15

#: Classes of which there is a confusion matrix at most.
MOST_CLASSES = 1000

#: Classes, and confused pairs, that the text names.
_NAMED = 5


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

    @property
    def top5_accuracy(self) -> float | None:
        """Part of the images whose class is among the five most probable ones; None where they may have several."""
        return None if self.in_top5 is None else float(self.in_top5.mean())

    @cached_property
    def by_class(self) -> list[dict[str, Any]]:
        """Images and accuracy of each class; the accuracy of one without images is None."""
        numbers = zip(self.classes, self.images_of_class.tolist(), self.right_of_class.tolist(), strict=True)
        return [
            {"class": name, "images": images, "right": right, "accuracy": right / images if images else None}
            for name, images, right in numbers
        ]

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
    def calibration(self) -> dict[str, list[float]] | None:
        """The reliability table: images in 15 intervals of their confidence, the sum of it, and how many are right.

        Guo et al. 2017, "On Calibration of Modern Neural Networks", section 2: bin m has the images whose confidence is
        in ((m - 1) / 15, m / 15]. None where images may have several classes.
        """
        if self.confidences is None:
            return None
        known = np.nan_to_num(self.confidences)
        bins = np.clip(np.ceil(BINS * known) - 1, 0, BINS - 1).astype(np.int64)
        columns = {"images": None, "confidence": known, "right": self.targets == self.predictions}
        return {name: np.bincount(bins, weights, BINS).tolist() for name, weights in columns.items()}

    @property
    def calibration_error(self) -> float | None:
        """Expected calibration error: the mean over images of |accuracy - confidence| of their bin.

        Guo et al. 2017, equation 3. None where images may have several classes.
        """
        if self.calibration is None or not self.images:
            return None
        gaps = np.array(self.calibration["right"]) - np.array(self.calibration["confidence"])
        return float(np.abs(gaps).sum()) / self.images

    def plain(self) -> dict[str, Any]:
        """All figures, as JSON has them."""
        return {
            "test_accuracy": self.accuracy,
            "top5_accuracy": self.top5_accuracy,
            "test_loss": self.loss if math.isfinite(self.loss) else None,
            "images": self.images,
            "unreadable_images": self.unreadable,
            "calibration_error": self.calibration_error,
            "calibration": self.calibration,
            "classes": self.by_class,
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
        known = sorted((row for row in self.by_class if row["images"]), key=lambda row: row["accuracy"])
        lowest = [f"{row['class']} {100 * row['accuracy']:.1f} %" for row in known[:_NAMED]]
        lines.append(f"lowest    {', '.join(lowest)}")
        if self.targets is not None and self.predictions is not None:
            wrong = self.targets != self.predictions
            pairs = Counter(zip(self.targets[wrong].tolist(), self.predictions[wrong].tolist(), strict=True))
            shown = [f"{self.classes[a]} for {self.classes[b]} {n:,}x" for (a, b), n in pairs.most_common(_NAMED)]
            lines += [f"mistaken  {', '.join(shown)}"] if shown else []
        return "\n".join(lines)
