"""What `hybridpar train` promises of a run, short of starting processes: see tests/machine/test_launch.py for those."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from hybridpar import Trainer
from hybridpar.config import TrainConfig
from hybridpar.errors import CheckpointError, HybridparError, RunDirectoryError, TrainingError, UsageError
from hybridpar.formats.checkpoint_files import latest_checkpoint, list_checkpoints
from hybridpar.observe.metrics import read_metrics
from hybridpar.run import opening, served_trainer
from hybridpar.run.part import Part
from hybridpar.train.checkpoint import load_checkpoint
from tests.ranks import run_ranks
from tests.runs import assert_same_state, check_run, saved_state, small_disk, train, train_rank
from tests.small_nets import plain

STEPS = 12  # two epochs of six


def saved_steps(run_dir: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(run_dir / "checkpoints")]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An undisturbed run with dropout."""
    run_dir = tmp_path_factory.mktemp("straight")
    assert train(run_dir, "dropping") == 0
    return run_dir


def test_an_error_before_the_first_step_closes_the_trainer(tmp_path):
    problem = CheckpointError("a checkpoint that does not fit")
    ends = mock.patch.object(Trainer, "_end", autospec=True, side_effect=Trainer._end)
    with mock.patch.object(opening, "resume", side_effect=problem), ends as end:
        with pytest.raises(CheckpointError):
            train(tmp_path / "run")
    end.assert_called_once_with(mock.ANY, problem)


def test_arguments_that_no_optimizer_takes_are_refused_before_data_are_loaded(tmp_path):
    with mock.patch.object(opening, "load_data", side_effect=AssertionError("loaded")):
        with pytest.raises(UsageError, match="sgd has no argument 'eps'"):
            train(tmp_path, optimizer="sgd:eps=1")


def test_who_cannot_recall_options_joins_as_the_others_are_asked_to(tmp_path, monkeypatch):
    train(tmp_path, steps=1)
    joined = mock.Mock(wraps=served_trainer.join_servers)
    monkeypatch.setattr(served_trainer, "join_servers", joined)
    with pytest.raises(UsageError, match="--weights is default"):
        train(tmp_path, sync="ps:servers=0", weights="default", resume=True)
    joined.assert_called_once()


# ------------------------------------------------------------------------------------------------- what a run leaves


def test_a_run_leaves_its_files_and_learns(straight):
    summary = check_run(straight, steps=STEPS)
    assert summary["workers"] == 1
    assert summary["resumed_from"] is None
    table = read_metrics(straight)
    assert [epoch.step for epoch in table.epochs] == [6, 12]
    assert table.epochs[1].test_loss < table.epochs[0].test_loss
    assert summary["test_accuracy"] == table.epochs[-1].test_accuracy
    options = json.loads((straight / "run.json").read_text())["options"]
    assert options["batch_size"] == 16
    assert saved_steps(straight) == [6, 12]


def test_the_same_seed_gives_the_same_bits_and_another_does_not(straight, tmp_path):
    train(tmp_path / "same", "dropping")
    assert_same_state(straight, tmp_path / "same")
    train(tmp_path / "other", "dropping", seed=1)
    assert not torch.equal(saved_state(straight)["head.weight"], saved_state(tmp_path / "other")["head.weight"])


def refused(world, directory, options):
    with pytest.raises(UsageError, match="fixed has 1,000 outputs, and the data has 10 classes"):
        train(Path(directory), "fixed", **options)
    return Path(directory).exists()


@pytest.mark.parametrize("options", [{}, {"stages": 2}])
def test_a_head_that_does_not_fit_the_classes_is_refused_before_anything_is_written(tmp_path, options):
    assert run_ranks(refused, 2, str(tmp_path / "run"), options) == [False, False]


class Watch(Part):
    """Keeps the steps that it sees, and ends the run after the third."""

    def __init__(self):
        self.seen, self.closed = [], False

    def step(self, run, step):
        self.seen.append(step.record.step)
        run.stopping = len(self.seen) == 3

    def close(self, run):
        self.closed = True


def test_a_part_sees_every_step_and_may_end_the_run(tmp_path, monkeypatch):
    watch, opened = Watch(), opening.open_parts
    monkeypatch.setattr(opening, "open_parts", lambda run: [watch, *opened(run)])
    assert train(tmp_path) == 0
    assert watch.seen == [1, 2, 3]
    assert watch.closed
    check_run(tmp_path, ended="interrupted", steps=3)
    assert saved_steps(tmp_path) == [3]


def test_two_workers_are_one_with_two_micro_batches(tmp_path):
    run_ranks(train_rank, 2, tmp_path / "two", "plain", None, {})
    train(tmp_path / "alone", micro_batches=2)
    assert check_run(tmp_path / "two", steps=STEPS)["workers"] == 2
    two, alone = saved_state(tmp_path / "two"), saved_state(tmp_path / "alone")
    for name, value in two.items():
        if "running" in name:
            torch.testing.assert_close(value, alone[name], rtol=1e-6, atol=1e-7, msg=name)
        else:
            assert torch.equal(value, alone[name]), name
    losses = [read_metrics(tmp_path / name).steps["loss"] for name in ("two", "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# ---------------------------------------------------------------------------------------------- interrupt and resume


@pytest.mark.parametrize("forward", [2, 5, 11])  # the first one checks the model
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(straight, tmp_path, forward):
    assert train(tmp_path, "dropping", fault=f"TERM@0:{forward}") == 143
    # The step under way had been told before that nobody wants to stop; the next one ends the run.
    check_run(tmp_path, ended="interrupted", steps=forward + 1)
    torch.manual_seed(1234)
    assert train(tmp_path, "dropping", resume=True) == 0
    assert check_run(tmp_path, steps=STEPS)["resumed_from"] == forward + 1
    assert_same_state(straight, tmp_path)
    uninterrupted, resumed = (read_metrics(path) for path in (straight, tmp_path))
    assert uninterrupted.steps["loss"].tolist() == resumed.steps["loss"].tolist()
    assert [end.train_loss for end in uninterrupted.epochs] == [end.train_loss for end in resumed.epochs]


def test_all_workers_stop_at_the_same_step_and_resume_bit_for_bit(tmp_path):
    options = {"micro_batches": 2, "clip_grad": 0.5, "checkpoints": "never"}
    run_ranks(train_rank, 2, tmp_path / "straight", "dropping", None, {**options, "checkpoints": "epoch"})
    codes = run_ranks(train_rank, 2, tmp_path / "resumed", "dropping", "TERM@1:9", options)
    assert codes[1] == 143
    stopped = check_run(tmp_path / "resumed", ended="interrupted")["steps"]
    assert 5 <= stopped <= 7
    assert saved_steps(tmp_path / "resumed") == [stopped]
    options = {**options, "resume": True, "checkpoints": "epoch"}
    run_ranks(train_rank, 2, tmp_path / "resumed", "dropping", None, options)
    check_run(tmp_path / "resumed", steps=STEPS)
    assert_same_state(tmp_path / "straight", tmp_path / "resumed")


def test_any_number_of_workers_resumes_and_converges(tmp_path):
    options = {"epochs": 6, "lr": 0.1}
    run_ranks(train_rank, 2, tmp_path, "dropping", "TERM@0:8", options)
    assert train(tmp_path, "dropping", resume=True, fault="TERM@0:10", **options) == 143
    run_ranks(train_rank, 3, tmp_path, "dropping", None, {**options, "resume": True})
    summary = check_run(tmp_path, steps=36)
    assert summary["workers"] == 3
    assert summary["resumed_from"] == 20
    assert summary["test_accuracy"] >= 0.9


def test_an_epoch_that_is_shorter_for_more_workers_is_just_over(tmp_path):
    # 50 samples: four steps for one worker, of which the last has 2 samples; three for two workers.
    options = {"data": "synthetic:samples=50"}
    train(tmp_path, fault="TERM@0:3", **options)
    assert load_checkpoint(tmp_path).training["extra"]["epoch_step"] == 4
    run_ranks(train_rank, 2, tmp_path, "plain", None, {**options, "resume": True})
    check_run(tmp_path, steps=6)


def test_resuming_a_finished_run_says_so_and_changes_nothing(straight, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert train(tmp_path / "run", "dropping", resume=True) == 0
    said = capsys.readouterr().out
    assert f"nothing left to train: the run in {tmp_path / 'run'} has done all of its 12 steps" in said
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_run_that_was_stopped_before_its_last_test_makes_it_when_it_is_resumed(tmp_path, capsys):
    train(tmp_path, "dropping", steps=4, fault="TERM@0:3")
    assert check_run(tmp_path, ended="interrupted")["steps"] == 4
    assert train(tmp_path, "dropping", steps=4, resume=True) == 0
    assert check_run(tmp_path, steps=4)["test_accuracy"] is not None
    assert "nan" not in capsys.readouterr().out


def test_a_run_can_start_from_the_checkpoint_of_another(straight, tmp_path):
    before = sorted(path.relative_to(straight) for path in straight.rglob("*"))
    middle = straight / "checkpoints" / "step-6"
    assert train(tmp_path, "dropping", resume_from=middle) == 0
    assert_same_state(straight, tmp_path)
    assert sorted(path.relative_to(straight) for path in straight.rglob("*")) == before


@pytest.mark.parametrize(
    ("option", "value"), [("batch_size", 8), ("seed", 5), ("data", "digits"), ("data", "synthetic:samples=80")]
)
def test_another_order_of_samples_is_refused(straight, tmp_path, option, value):
    for options in ({"run_dir": tmp_path, "resume_from": straight}, {"run_dir": straight, "resume": True}):
        before = sorted(tmp_path.rglob("*")), sorted(straight.rglob("*"))
        with pytest.raises(HybridparError) as caught:
            train(model="dropping", **{option: value}, **options)
        assert f"--{option.replace('_', '-')}" in caught.value.what
        assert "Resume with" in caught.value.fix
        assert before == (sorted(tmp_path.rglob("*")), sorted(straight.rglob("*")))


def test_a_scripts_checkpoint_has_no_place_in_the_data(tmp_path):
    with Trainer(plain(), config=TrainConfig()) as trainer:
        path = trainer.save(tmp_path / "script")
    with pytest.raises(CheckpointError, match="does not say where in the data"):
        train(tmp_path / "run", resume_from=path)


# -------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("every", "keep", "saved"),
    [("5", 2, {10, 12}), ("never", 2, set()), ("epoch", 1, {12}), ("1/60s", 3, {10, 11, 12})],
)
def test_the_last_checkpoints_and_the_best_are_kept(tmp_path, capsys, every, keep, saved):
    train(tmp_path, checkpoints=f"{every},keep={keep}")
    assert (f"written  {tmp_path}/checkpoints" in capsys.readouterr().out) == (every != "never")
    best = max(read_metrics(tmp_path).epochs, key=lambda epoch: (epoch.test_accuracy, -epoch.epoch)).step
    reported = check_run(tmp_path)["best"]
    if every == "never":
        assert reported is None
    else:
        saved = {*saved, best}
        assert reported["step"] == best
        assert (tmp_path / reported["checkpoint"] / "model.safetensors").exists()
    assert set(saved_steps(tmp_path)) == saved


def test_the_model_is_tested_every_so_many_epochs_and_after_the_last(tmp_path):
    train(tmp_path, epochs=5, test_every=2, model_ema=0.9, checkpoints="epoch,keep=9")
    epochs = read_metrics(tmp_path).epochs
    assert [end.epoch for end in epochs if end.test_accuracy is not None] == [1, 3, 4]
    assert [end.epoch for end in epochs if end.ema_test_loss is not None] == [1, 3, 4]
    assert [end.epoch for end in epochs] == [0, 1, 2, 3, 4]
    assert len(saved_steps(tmp_path)) == 5
    train(tmp_path, epochs=6, test_every=9, resume=True)
    assert [end.epoch for end in read_metrics(tmp_path).epochs if end.test_accuracy is not None] == [1, 3, 4, 5]


def test_seconds_save_too(tmp_path, monkeypatch):
    clock = iter(range(0, 100_000, 7))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    train(tmp_path, epochs=1, checkpoints="10s,keep=9")
    assert len(saved_steps(tmp_path)) >= 3


# ------------------------------------------------------------------------------------------------------ bad endings


def diverge(world, directory, options):
    with pytest.raises(TrainingError) as caught:
        train(Path(directory), fault="NAN@1:5", checkpoints="1", **options)
    return str(caught.value)


def test_three_bad_steps_end_the_run_on_all_workers_and_the_last_good_checkpoint_stands(tmp_path):
    first, second = run_ranks(diverge, 2, str(tmp_path), {})
    assert first == second
    assert "steps 5 to 7" in first
    assert "first bad parameter: body.0.weight" in first
    # Steps that were rolled back are saved like others: they changed nothing.
    newest = load_checkpoint(tmp_path)
    assert all(torch.isfinite(value).all() for value in newest.model.values())
    run_ranks(train_rank, 2, tmp_path, "plain", None, {"resume": True})
    assert check_run(tmp_path, steps=STEPS)["skipped_steps"] >= 2


def test_without_the_guard_no_bad_step_is_saved(tmp_path):
    with pytest.raises(TrainingError):
        train(tmp_path, fault="NAN@0:5", checkpoints="1,keep=1", guard=False)
    newest = load_checkpoint(tmp_path)
    assert newest.step == 4
    assert all(torch.isfinite(value).all() for value in newest.model.values())


def test_a_worker_whose_loss_is_not_finite_has_the_others_save_nothing_either(tmp_path):
    options = {"guard": False, "sync": "outer:4", "timeout": 20.0}
    run_ranks(train_rank, 2, tmp_path, "plain", "NAN@1:6", options)  # between two exchanges its loss is its own
    assert saved_steps(tmp_path) == [12]


def test_a_request_that_fails_leaves_nothing_behind(straight, tmp_path):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text('{"version": 1')
    for model, options in (
        ("wide", {"resume_from": straight}),
        ("plain", {"resume_from": tmp_path / "damaged"}),
        ("plain", {"resume_from": tmp_path / "nowhere"}),
        ("plain", {"batch_size": 1}),
        ("wide", {"resume": True, "run_dir": straight}),
        ("missing", {}),
        ("broken", {}),
    ):
        before = {path: path.stat().st_mtime_ns for path in sorted(straight.rglob("*"))}
        with pytest.raises(HybridparError):
            train(model=model, **{"run_dir": tmp_path / "run", **options})
        assert not (tmp_path / "run").exists()
        assert {path: path.stat().st_mtime_ns for path in sorted(straight.rglob("*"))} == before


@pytest.mark.root
def test_a_full_disk_ends_the_run_and_loses_nothing_saved(tmp_path):
    with small_disk(tmp_path / "disk", kilobytes=600) as disk:
        with pytest.raises(RunDirectoryError) as caught:
            train(disk / "run", epochs=500, checkpoints="1,keep=500", plan="none")
        assert "full" in str(caught.value).lower()
        assert "resume" in caught.value.fix
        newest = latest_checkpoint(disk / "run" / "checkpoints")
        step = load_checkpoint(newest).step
        assert step > 1
        for old in list_checkpoints(disk / "run" / "checkpoints")[:-1]:
            (old / "model.safetensors").unlink()
            (old / "training-0.pt").unlink()
        assert train(disk / "run", steps=step + 2, resume=True, checkpoints="keep=1") == 0
        assert check_run(disk / "run", steps=step + 2)["resumed_from"] == step


# ------------------------------------------------------------------------------------------------------ fine-tuning

FINE = {"freeze": ("body.[01]",), "optimizer": "sgd:layer_decay=0.5,head_lr=2"}


def test_a_run_starts_from_weights_trains_what_is_not_frozen_and_is_resumed_to_the_bit(straight, tmp_path, capsys):
    fine = {**FINE, "weights": str(straight)}
    train(tmp_path / "whole", "dropping", **fine)
    assert "weights  " in capsys.readouterr().out
    began, ended = saved_state(straight), saved_state(tmp_path / "whole")
    for name in (key for key in began if "/" not in key):
        if name != "body.3.bias":  # the norm after it takes it away
            same = torch.equal(began[name], ended[name])
            assert same == name.startswith(("body.0.", "body.1.")), name  # with them the layer's running statistics

    train(tmp_path / "cut", "dropping", **fine, fault="TERM@0:7")
    moved = tmp_path / "moved"
    straight.rename(moved)  # weights are read at the start alone
    try:
        train(tmp_path / "cut", "dropping", **fine, resume=True)
    finally:
        moved.rename(straight)
    assert_same_state(tmp_path / "whole", tmp_path / "cut")


def test_fine_tuning_in_stages_is_that_of_one_process(straight, tmp_path):
    fine = {**FINE, "weights": str(straight), "batch_norm": "frozen", "micro_batches": 2, "steps": 6, "plan": "none"}
    train(tmp_path / "one", **fine)
    run_ranks(train_rank, 2, tmp_path / "cut", "plain", None, {**fine, "stages": 2})
    for name, value in saved_state(tmp_path / "one").items():
        torch.testing.assert_close(saved_state(tmp_path / "cut")[name], value, rtol=1e-5, atol=1e-6)
