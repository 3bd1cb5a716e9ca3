"""How far a run is; and `--checkpoints`: which epochs are the best, which checkpoints stay, when a run ends early."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hybridpar import Evaluation, Trainer
from hybridpar.config import TrainConfig
from hybridpar.config.train import Checkpoints, TrainedOptions
from hybridpar.errors import UsageError
from hybridpar.formats.checkpoint_files import list_checkpoints
from hybridpar.observe.metrics import read_metrics
from hybridpar.observe.records import EpochRecord
from hybridpar.run.state import RunningMean, RunState, best_epochs, why_over
from hybridpar.run.trained import find_trained
from hybridpar.train.checkpoint import load_checkpoint
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
    [
        ("stop=0", "at least 1"),
        ("stop=many", "a valid integer"),
        ("by=test_los", "'test_loss'"),
        ("best=0", "at least 1"),
        ("every=often", "60s"),
        ("every=epoch/never", "60s"),
        ("every=0", "60s"),
        ("every=200/300", "60s"),
        ("every=60s/30s", "60s"),
        ("every=1.5s", "60s"),
    ],
)
def test_other_rules_are_refused(text, said):
    with pytest.raises(UsageError, match=said):
        TrainConfig(checkpoints=text).check()


def test_a_checkpoint_says_how_far_a_run_is():
    config = TrainConfig(data="digits")
    losses, tested = RunningMean(3.0, 2), [*epochs_of(0.5), EpochRecord(1, 12, None, None, math.nan, 1.0)]
    state = RunState(epoch=2, epoch_step=3, losses=losses, seconds=5.0, tested=tested)
    again = RunState()
    again.go_on_from(state.to_extra(config), config, Path("step-3"))
    assert repr(again) == repr(state)
    assert again.elapsed == 5.0
    again.began = time.monotonic()
    assert again.elapsed >= 5.0, "an epoch took what it took before it was resumed, too"


def test_the_best_are_ranked_by_the_figure_and_earlier_ones_win():
    tested = epochs_of(0.5, 0.9, 0.9, 0.7, losses=(2.0, 0.3, math.nan, 0.2))
    assert [end.epoch for end in best_epochs(Checkpoints(best=3), tested)] == [1, 2, 3]
    assert [end.epoch for end in best_epochs(Checkpoints(best=2, by="test_loss"), tested)] == [3, 1]
    assert best_epochs(Checkpoints(), []) == []


def test_only_epochs_that_were_tested_count_towards_the_end():
    ends = epochs_of(0.5, 0.4, 0.3, 0.2)
    assert why_over(Checkpoints(stop=3), ends) is not None
    untested = [replace(end, test_accuracy=None) if end.epoch else end for end in ends]
    assert why_over(Checkpoints(stop=3), untested) is None


def test_the_best_epoch_by_another_figure_may_not_be_tested(tmp_path):
    train(tmp_path, epochs=3, test_every=3, checkpoints="epoch,keep=9,by=train_loss", lr=1e-9)
    assert check_run(tmp_path)["best"]["metric"] == "train_loss"


@pytest.fixture
def accuracies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Results that tests of the model have, in place of the real ones."""
    left = [0.5, 0.9, 0.3, 0.8, 0.4, 0.1, 0.2, 0.2]
    monkeypatch.setattr(Trainer, "evaluate", lambda self, batches: Evaluation(left.pop(0), 1 - left[0], 10))
    return left


@pytest.mark.parametrize(
    ("best", "staying"),
    [("best=1", [12, 30]), ("best=3", [6, 12, 24, 30]), ("by=test_loss", [6, 30])],
)
def test_checkpoints_of_the_best_epochs_stay(accuracies, tmp_path, best, staying):
    train(tmp_path, epochs=5, checkpoints=f"keep=1,{best}")
    assert [int(path.name.removeprefix("step-")) for path in list_checkpoints(tmp_path / "checkpoints")] == staying
    reported = check_run(tmp_path)["best"]
    assert reported["step"] == (6 if "loss" in best else 12)
    assert reported["metric"] == ("test_loss" if "loss" in best else "test_accuracy")


def test_a_trained_model_is_that_of_the_best_epoch_unless_another_is_asked_for(accuracies, tmp_path):
    train(tmp_path, epochs=3, checkpoints="keep=1")
    for weights, step, said in (
        (None, 12, "weights of step 12, the best by test_accuracy: "),
        ("best,raw", 12, "checkpoints/step-12"),
        ("last", 18, "weights of step 18, the last: "),
        ("last, raw", 18, "checkpoints/step-18"),
    ):
        trained = find_trained(str(tmp_path), TrainedOptions(weights=weights))
        assert trained.step == step
        assert said in str(trained)
    step = str(tmp_path / "checkpoints" / "step-18")
    assert find_trained(step, TrainedOptions()).step == 18
    for source, weights, said in (
        (step, "best", "with the checkpoint"),
        (str(tmp_path), "best,last", "or both"),
        (str(tmp_path), "first", "or both"),
        (str(tmp_path), "last,ema", "no moving average"),
    ):
        with pytest.raises(UsageError, match=said):
            find_trained(source, TrainedOptions(weights=weights))


def test_a_run_stops_early_also_after_it_was_resumed(accuracies, tmp_path, capsys):
    assert train(tmp_path, epochs=8, checkpoints="stop=3", fault="TERM@0:20") == 143
    assert "stopped early" not in capsys.readouterr().out
    assert train(tmp_path, epochs=8, checkpoints="stop=3", resume=True) == 0
    said = capsys.readouterr().out
    assert "stopped early: no better test_accuracy than 0.9000 of epoch 2 in the 3 epochs since" in said
    summary = check_run(tmp_path, steps=30)
    assert summary["best_test_accuracy"] == 0.9
    assert summary["epochs"] == 5
    assert load_checkpoint(tmp_path).step == 30
    assert train(tmp_path, epochs=8, checkpoints="stop=3", resume=True) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert "nothing left to train" in said
    assert "or stop= of --checkpoints goes on" in said
    assert train(tmp_path, epochs=8, checkpoints="stop=4", resume=True) == 0
    assert [epoch.test_accuracy for epoch in read_metrics(tmp_path).epochs] == [0.5, 0.9, 0.3, 0.8, 0.4, 0.1]


def test_all_workers_stop_early_at_the_same_step(tmp_path: Path):
    options = {"lr": 0.0001, "optimizer": "sgd:momentum=0", "checkpoints": "stop=2,by=test_accuracy", "epochs": 9}
    assert run_ranks(train_rank, 2, tmp_path / "early", "plain", None, options) == [0, 0]
    early = check_run(tmp_path / "early")["steps"]
    assert early < 54
    assert early % 6 == 0
