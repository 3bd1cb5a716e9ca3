"""What a test found, in figures: held against numbers counted by hand, and against scikit-learn."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from hybridpar.observe.results import BINS, TestResult


def a_result(targets, predictions, confidences, classes=("a", "b", "c"), **more):
    targets, predictions = np.array(targets), np.array(predictions)
    count = len(classes)
    figures = {"accuracy": float((targets == predictions).mean()), "loss": 0.5, "images": len(targets), "unreadable": 0}
    return TestResult(
        tuple(classes),
        **{**figures, **more},
        right_of_class=np.bincount(targets[targets == predictions], minlength=count),
        images_of_class=np.bincount(targets, minlength=count),
        targets=targets,
        predictions=predictions,
        confidences=np.array(confidences, dtype=np.float64),
        in_top5=np.ones(len(targets), dtype=bool),
    )


def test_rows_of_the_confusion_matrix_are_classes_and_columns_what_they_were_taken_for() -> None:
    rng = np.random.default_rng(0)
    targets, predictions = rng.integers(0, 3, 50), rng.integers(0, 3, 50)
    result = a_result(targets, predictions, rng.random(50))
    assert np.array_equal(result.confusion, confusion_matrix(targets, predictions))


def test_a_class_without_images_has_no_accuracy() -> None:
    result = a_result([0, 0, 1], [0, 1, 1], [0.9, 0.8, 0.7])
    assert [row["accuracy"] for row in result.by_class] == [0.5, 1.0, None]
    assert "c " not in result.text()


def test_the_calibration_error_is_that_of_its_bins() -> None:
    # Two bins: (0.6, 0.6667] with confidence 0.65 and accuracy 1/2, and (0.9333, 1] with 0.95 and 1.
    result = a_result([0, 1, 2, 2], [0, 0, 2, 2], [0.64, 0.66, 0.94, 0.96])
    assert result.calibration_error == pytest.approx(0.5 * abs(0.65 - 0.5) + 0.5 * abs(0.95 - 1.0))
    assert result.calibration["images"] == [*[0] * 9, 2, *[0] * 4, 2]


def test_ends_of_bins_belong_to_the_bin_below_them() -> None:
    result = a_result([0, 0, 0, 0], [0, 0, 0, 0], [0.0, 1 / BINS, 14 / BINS, 1.0])
    assert result.calibration["images"] == [2, *[0] * 12, 1, 1]


def test_pairs_are_named_by_how_often_they_are_confused() -> None:
    result = a_result([0, 0, 1, 2, 2], [1, 1, 0, 2, 2], [0.5] * 5)
    assert result.text().splitlines()[-1] == "mistaken  a for b 2x, b for a 1x"


def test_a_loss_that_is_not_finite_is_null_in_json() -> None:
    result = a_result([0], [0], [math.nan], loss=math.inf)
    figures = json.loads(json.dumps(result.plain(), allow_nan=False))
    assert figures["test_loss"] is None
    assert figures["test_accuracy"] == 1.0


def test_images_of_several_classes_have_neither_matrix_nor_calibration() -> None:
    result = TestResult(("a", "b"), 0.5, 0.7, 4, 1, np.array([3, 4]), np.array([4, 4]))
    figures = result.plain()
    assert figures["confusion"] is figures["calibration_error"] is figures["top5_accuracy"] is None
    assert [one["accuracy"] for one in figures["classes"]] == [0.75, 1.0]
    assert "1 images cannot be read" in result.text()
