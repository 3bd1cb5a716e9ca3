"""Tests the accuracy benchmark: folds, choice of the learning rate, pairs, confidence interval and report.

The table decides which codec may be chosen.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.sync import accuracy
from benchmarks.sync.accuracy import FOLDS, Run, difference, fold_of


def run(method: str = "none", lr: float = 0.01, fold: int = 0, seed: int = 1, **more: float) -> Run:
    return Run(method=method, lr=lr, fold=fold, seed=seed, **more)  # type: ignore[arg-type]


def test_each_image_is_tested_in_one_fold_and_a_fold_holds_each_digit_alike() -> None:
    labels = torch.arange(1797) % 10
    folds = [fold_of(labels, fold) for fold in range(FOLDS)]
    assert torch.equal(torch.cat([tested for _, tested in folds]).sort().values, torch.arange(1797))
    for trained, tested in folds:
        assert len(trained) + len(tested) == 1797
        assert not set(trained.tolist()) & set(tested.tolist())
        of_digit = labels[tested].bincount(minlength=10)
        assert of_digit.max() - of_digit.min() <= 1


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
