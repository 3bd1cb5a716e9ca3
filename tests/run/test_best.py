"""`--keep-best` and `--stop-early`: which epochs are the best, which checkpoints stay, when a run ends early."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridpar import Evaluation, Trainer
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.observe.metrics import read_metrics
from hybridpar.observe.records import EpochRecord
from hybridpar.run.best import MetricRule, keep_rule, stop_rule
from hybridpar.train.checkpoint import load_checkpoint
from hybridpar.train.checkpoint_files import list_checkpoints
from tests.ranks import run_ranks
from tests.runs import check_run, train, train_rank


def epochs_of(*accuracies: float, losses: tuple[float, ...] = ()) -> list[EpochRecord]:
    losses = losses or (1.0,) * len(accuracies)
    return [
        EpochRecord(epoch, 6 * epoch + 6, accuracy, loss, 1.0, 1.0)
        for epoch, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True))
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [("0", "from 1 on"), ("many", "from 1 on"), ("test_los:3", "Did you mean test_loss"), ("test_loss:", "from 1 on")],
)
def test_other_rules_are_refused(text, said):
    with pytest.raises(UsageError, match=said):
        stop_rule(TrainConfig(stop_early=text))


def test_a_figure_of_an_average_needs_an_average():
    with pytest.raises(UsageError, match="Add for instance --model-ema"):
        keep_rule(TrainConfig(keep_best="ema_test_loss:1"))
    with pytest.raises(UsageError, match="--stop-early with --sync ps"):
        TrainConfig(stop_early="3", sync="ps").check()


def test_the_best_are_ranked_by_the_figure_and_earlier_ones_win():
    tested = epochs_of(0.5, 0.9, 0.9, 0.7, losses=(2.0, 0.3, math.nan, 0.2))
    assert [one.epoch for one in MetricRule("test_accuracy", 3).best(tested)] == [1, 2, 3]
    assert [one.epoch for one in MetricRule("test_loss", 2).best(tested)] == [3, 1]
    assert MetricRule("test_accuracy", 1).best([]) == []


@pytest.fixture
def accuracies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Results that tests of the model have, in place of the real ones."""
    left = [0.5, 0.9, 0.3, 0.8, 0.4, 0.1, 0.2, 0.2]
    monkeypatch.setattr(Trainer, "evaluate", lambda self, batches: Evaluation(left.pop(0), 1 - left[0], 10))
    return left


@pytest.mark.parametrize(("best", "kept"), [("1", [12, 30]), ("3", [6, 12, 24, 30]), ("test_loss:1", [6, 30])])
def test_checkpoints_of_the_best_epochs_stay(accuracies, tmp_path, best, kept):
    train(tmp_path, epochs=5, keep=1, keep_best=best)
    assert [int(path.name.removeprefix("step-")) for path in list_checkpoints(tmp_path / "checkpoints")] == kept
    told = check_run(tmp_path)["best"]
    assert told["step"] == (6 if "loss" in best else 12)
    assert told["metric"] == ("test_loss" if "loss" in best else "test_accuracy")


def test_a_run_stops_early_also_after_it_was_resumed(accuracies, tmp_path, capsys):
    assert train(tmp_path, epochs=8, stop_early="3", fault="TERM@0:20") == 143
    assert "stopped early" not in capsys.readouterr().out
    assert train(tmp_path, epochs=8, stop_early="3", resume=True) == 0
    said = capsys.readouterr().out
    assert "stopped early: no better test_accuracy than 0.9000 of epoch 2 in the 3 epochs since" in said
    summary = check_run(tmp_path, steps=30)
    assert summary["best_test_accuracy"] == 0.9
    assert summary["epochs"] == 5
    assert load_checkpoint(tmp_path).step == 30
    assert train(tmp_path, epochs=8, stop_early="3", resume=True) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert "nothing left to train" in said
    assert "a larger --stop-early goes on" in said
    assert train(tmp_path, epochs=8, stop_early="4", resume=True) == 0
    assert [epoch.test_accuracy for epoch in read_metrics(tmp_path).epochs] == [0.5, 0.9, 0.3, 0.8, 0.4, 0.1]


def test_all_workers_stop_early_at_the_same_step(tmp_path: Path):
    options = {"lr": 0.0001, "momentum": 0.0, "stop_early": "test_accuracy:2", "epochs": 9}
    assert run_ranks(train_rank, 2, tmp_path / "early", "plain", None, options) == [0, 0]
    early = check_run(tmp_path / "early")["steps"]
    assert early < 54
    assert early % 6 == 0
