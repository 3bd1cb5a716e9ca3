"""Tests the accuracy benchmarks: folds, confidence intervals, what is trained, and tables that several may add to.

The tables decide which codec and which outer loop may be chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.rig import folds
from benchmarks.rig.folds import FOLDS, fold_of, train_missing
from benchmarks.rig.records import claimed, read_records
from benchmarks.sync import accuracy
from benchmarks.sync.accuracy import Run, difference

RUN = Run(method="onebit", lr=0.01, fold=0, seed=1, epochs=1)


def test_each_image_is_tested_in_one_fold_and_a_fold_holds_each_digit_alike() -> None:
    labels = torch.arange(1797) % 10
    parts = [fold_of(labels, fold) for fold in range(FOLDS)]
    assert torch.equal(torch.cat([tested for _, tested in parts]).sort().values, torch.arange(1797))
    for trained, tested in parts:
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
    assert difference(differences)[1] == verdict


def test_a_run_says_the_same_again_and_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(labels: Tensor, fold: int) -> tuple[Tensor, Tensor]:
        trained, tested = fold_of(labels, fold)
        return trained[:32], tested[:16]

    monkeypatch.setattr(folds, "fold_of", few)
    first, second = (accuracy.train(RUN) for _ in range(2))
    assert first == second
    assert first.ratio > 28


def test_what_is_in_a_table_or_is_trained_by_another_is_not_trained_again(tmp_path: Path) -> None:
    table = tmp_path / "new" / "rows.csv"
    wanted = [RUN, replace(RUN, method="a,b"), replace(RUN, fold=1)]
    trained: list[Run] = []

    def train(run: Run) -> Run:
        trained.append(run)
        return replace(run, loss=float("inf"), accuracy=97.5)

    table.parent.mkdir()
    with claimed(table, wanted[2].key) as mine:
        assert mine
        train_missing(Run, wanted, table, train)
    train_missing(Run, wanted, table, train)
    assert trained == wanted
    assert read_records(Run, table)[1] == replace(
        wanted[1], loss=float("inf"), accuracy=97.5, ratio=pytest.approx(float("nan"), nan_ok=True)
    )
