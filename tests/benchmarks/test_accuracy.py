"""Tests the accuracy benchmark: folds, choice of the learning rate, pairs, confidence interval and report.

The table decides which codec may be chosen.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.sync import accuracy
from benchmarks.sync.accuracy import FOLDS, Run, best_rates, difference, fold_of, report


def run(method: str = "none", lr: float = 0.01, fold: int = 0, seed: int = 1, **more: float) -> Run:
    return Run(method=method, lr=lr, fold=fold, seed=seed, **more)  # type: ignore[arg-type]


def test_each_image_is_tested_in_one_fold() -> None:
    labels = torch.arange(1797) % 10
    tested = [fold_of(labels, fold)[1] for fold in range(FOLDS)]
    assert torch.equal(torch.cat(tested).sort().values, torch.arange(1797))


def test_a_fold_trains_on_the_rest_and_holds_each_digit_alike() -> None:
    labels = torch.arange(1797) % 10
    for fold in range(FOLDS):
        trained, tested = fold_of(labels, fold)
        assert len(trained) + len(tested) == 1797
        assert not set(trained.tolist()) & set(tested.tolist())
        of_digit = labels[tested].bincount(minlength=10)
        assert of_digit.max() - of_digit.min() <= 1


def test_the_best_rate_is_that_of_the_lowest_loss_where_accuracies_are_an_image_apart() -> None:
    runs = [
        run(lr=0.01, accuracy=98.352, loss=0.2),
        run(lr=0.02, accuracy=98.077, loss=0.1),
        run(lr=0.05, accuracy=97.5),
    ]
    assert best_rates(runs)["none"].lr == 0.02
    assert best_rates([*runs, run(lr=0.005, accuracy=98.7, loss=0.3)])["none"].lr == 0.005


def test_the_interval_is_students() -> None:
    # Differences -2, 0, 0, 0, 2: mean 0, deviation sqrt(2), and t of 4 degrees of freedom is 2.776.
    text = difference([-2.0, 0.0, 0.0, 0.0, 2.0])
    assert text.startswith(f"+0.00 [{-2.776 * math.sqrt(2 / 5):+.2f}, ")


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1, -0.1, 0.0, 0.1, -0.1], "met"),
        ([-0.6, -0.6, -0.6, -0.6, -0.6], "missed"),  # the mean is too low
        ([-2.0, 1.5, -2.0, 1.5, 0.5], "missed"),  # the mean is not known well enough
    ],
)
def test_the_target_asks_for_the_mean_and_for_the_interval(differences: Sequence[float], verdict: str) -> None:
    assert difference(differences).endswith(verdict)


def test_a_report_pairs_by_fold_and_seed(capsys: pytest.CaptureFixture[str]) -> None:
    base = [run(fold=fold, accuracy=90.0 + fold) for fold in range(5)]
    codec = [run("onebit", fold=fold, accuracy=91.0 + fold, ratio=30.0) for fold in reversed(range(5))]
    report([*base, *codec])
    assert "| `onebit` | 0.01 | 30.0x | 5 | 93.00 | +1.00 [+1.00, +1.00] | met |" in capsys.readouterr().out


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step, and 16 images to test on."""

    def few(labels: Tensor, fold: int) -> tuple[Tensor, Tensor]:
        trained, tested = fold_of(labels, fold)
        return trained[:32], tested[:16]

    monkeypatch.setattr(accuracy, "fold_of", few)


@pytest.mark.usefixtures("small")
def test_a_run_says_the_same_again_and_its_bytes() -> None:
    one, again = (accuracy.train(run("onebit", epochs=1)) for _ in range(2))
    assert (one.loss, one.accuracy) == (again.loss, again.accuracy)
    assert one.ratio > 28
