"""A run is found again, and nothing is overwritten by accident."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path

import pytest
import torch

from hybridpar.comm.world import World
from hybridpar.commands import COMMANDS
from hybridpar.config import TrainConfig
from hybridpar.errors import CheckpointError, RunDirectoryError, UsageError
from hybridpar.run import opening
from hybridpar.run.directory import (
    RunFolder,
    before_the_start,
    claim_folder,
    find_folder,
    recall_options,
)
from hybridpar.train.checkpoint import CheckpointData, save_checkpoint

BASE = Path("runs/resnet18-digits")


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def start(model="resnet18", **options) -> RunFolder:
    """What a run does at its start."""
    config = TrainConfig(**options)
    return claim_folder(find_folder(config, model), config, model)


def save(folder: RunFolder, step: int) -> Path:
    return save_checkpoint(folder.checkpoints, CheckpointData(step, "f", {"w": torch.ones(1)}, {}, {}), World())


def test_runs_without_a_name_are_numbered():
    assert [start().directory for _ in range(3)] == [BASE, Path(f"{BASE}-2"), Path(f"{BASE}-3")]


def test_two_runs_that_start_at_once_get_directories_of_their_own():
    config = TrainConfig()
    first, second = find_folder(config, "resnet18"), find_folder(config, "resnet18")
    assert claim_folder(first, config, "resnet18").directory == BASE
    assert claim_folder(second, config, "resnet18").directory == Path(f"{BASE}-2")


@pytest.mark.parametrize("run_dir", [Path("taken/run"), Path("taken")])
def test_a_directory_that_cannot_be_written_is_refused_before_anything_is_measured(run_dir):
    Path("taken").write_text("a file")
    with pytest.raises(RunDirectoryError, match=f"cannot write {run_dir}"):
        find_folder(TrainConfig(run_dir=run_dir), "resnet18")


def test_resume_without_a_name_takes_the_newest_run_that_has_a_checkpoint():
    save(start(), 3)
    second = start()
    newest = save(second, 4)
    start()
    resumed = find_folder(TrainConfig(resume=True), "resnet18")
    assert resumed == RunFolder(second.directory, newest)
    mine, other = start(data="hf/foo"), start(data="hf/foo-2")  # as the second run with hf/foo
    for folder in (mine, other):
        save(folder, 5)
        assert find_folder(TrainConfig(resume=True, data="hf/foo"), "resnet18").directory == mine.directory
    assert find_folder(TrainConfig(resume=True, data="hf/foo-2"), "resnet18").directory == other.directory


def restarted_as(monkeypatch, job, count):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))


def began(**options) -> Path:
    """A run with a checkpoint."""
    folder = start(run_dir=Path("mine"), **options)
    save(folder, 7)
    return folder.directory


def recall(named=(), model="resnet18", **options):
    return recall_options(TrainConfig(run_dir=Path("mine"), resume=True, given=frozenset(named), **options), model)


def test_a_resumed_run_takes_the_options_that_it_began_with():
    began(lr=0.5, optimizer="sgd:betas=0.3", data_root=Path("there"), steps=9, guard=False)
    config, lines = recall()
    assert lines == ()
    assert (config.lr, config.data_root, config.steps) == (0.5, Path("there"), 9)
    assert config.optimizer == "sgd:betas=0.3"
    assert not config.guard


def test_what_a_file_says_was_for_the_beginning(tmp_path):
    began(lr=0.5, epochs=3)
    file = tmp_path / "more.toml"
    file.write_text("[optimisation]\nlr = 0.1\nepochs = 9\n")
    words = ["resnet18", "--run-dir", "mine", "--config", str(file), "--epochs", "4"]
    for resume, lr in (((), 0.1), (("--resume",), 0.5)):
        asked = COMMANDS.get("train").parse("train", [*words, *resume])
        assert isinstance(asked, TrainConfig)
        config, _ = recall_options(asked, "resnet18")
        assert (config.lr, config.epochs) == (lr, 4)


def test_a_longer_run_is_not_ended_by_the_limit_of_the_one_before():
    began(steps=9)
    assert recall({"epochs"}, epochs=20)[0].steps is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model_arg": ("stem=cifar",)}, "--model-arg is stem=cifar"),
        ({"weights": "default"}, "--weights is default, and the run in mine began with none"),
        ({"model": "resnet34"}, "is of resnet18, not of resnet34"),
    ],
)
def test_what_a_resumed_run_cannot_change_is_refused(options, said):
    began()
    with pytest.raises(UsageError, match=said):
        recall(set(options), **options)


@pytest.mark.parametrize(
    ("began_with", "now", "then", "lines"),
    [
        ({"image_size": "64,crop=0.9"}, {"image_size": 64}, "64,crop=0.9", 0),
        ({"image_size": "64,crop=0.9"}, {"image_size": "test=96"}, "64,test=96,crop=0.9", 1),
        ({"data": "cifar10"}, {"data": "cifar10:download"}, "cifar10:download", 1),
        ({"optimizer": "sgd:momentum=0.9"}, {"optimizer": "sgd:momentum=0.8"}, "sgd:momentum=0.8", 1),
    ],
)
def test_what_is_left_out_of_a_named_option_is_as_the_run_began(began_with, now, then, lines):
    began(**began_with)
    config, said = recall(set(now), **now)
    assert [getattr(config, name) for name in now] == [then]
    assert len(said) == lines


@pytest.mark.parametrize(("restarts", "code"), [("0", 2), ("1", 1)])
def test_what_cannot_be_used_is_a_wrong_request_until_the_run_has_started(monkeypatch, restarts, code):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    with pytest.raises(CheckpointError) as caught, before_the_start():
        find_folder(TrainConfig(resume=True), "resnet18")
    assert caught.value.exit_code == code


def test_a_restarted_job_finds_its_own_run(monkeypatch):
    restarted_as(monkeypatch, "job-a", 0)
    mine = start()
    path = save(mine, 7)
    restarted_as(monkeypatch, "job-b", 0)
    save(start(), 8)
    restarted_as(monkeypatch, "job-a", 1)
    resumed = start()
    assert resumed == RunFolder(mine.directory, path, restarted=True)


def test_a_restarted_job_needs_the_checkpoint_that_it_started_from_only_until_it_has_one_itself(monkeypatch):
    source = save(start(run_dir=Path("source")), 3)
    restarted_as(monkeypatch, "job-a", 0)
    mine = start(resume_from=source)
    restarted_as(monkeypatch, "job-a", 1)
    assert start(resume_from=source) == RunFolder(mine.directory, source.absolute(), restarted=True)
    path = save(mine, 7)
    shutil.rmtree(source)
    assert start(resume_from=source) == RunFolder(mine.directory, path, restarted=True)


def test_a_worker_joins_by_the_options_of_its_run_without_its_loggers(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    began(lr=0.5, log=("wandb",))
    joined = []
    monkeypatch.setattr(opening, "join_workers", joined.append)
    asked = TrainConfig(run_dir=Path("mine"), resume=True, given=frozenset())
    opening.join(asked, "resnet18", contextlib.ExitStack())
    assert [config.lr for config in joined] == [0.5]
    with pytest.raises(UsageError, match="--log wandb needs wandb"):
        opening.recall(asked, "resnet18")


@pytest.mark.parametrize("text", ["[]", '"job-a"', "{", "[" * 100_000, "\xff"])
def test_a_damaged_run_beside_it_does_not_hide_a_jobs_own(text, monkeypatch):
    restarted_as(monkeypatch, "job-a", 0)
    mine = start()
    other = mine.directory.with_name(f"{mine.directory.name}-2")
    other.mkdir()
    (other / "run.json").write_text(text, encoding="latin-1")
    restarted_as(monkeypatch, "job-a", 1)
    assert start() == RunFolder(mine.directory, None, restarted=True)


def test_a_job_that_died_before_it_claimed_a_directory_does_not_take_a_foreign_one(monkeypatch):
    start(run_dir=Path("mine"))
    restarted_as(monkeypatch, "job-a", 1)
    with pytest.raises(UsageError, match="already holds a run"):
        start(run_dir=Path("mine"))


@pytest.mark.parametrize("now", ["48", "mean=0.5/0.5/0.5,std=0.5/0.5/0.5", "channels=1"])
def test_a_resumed_run_cannot_change_what_its_images_are(now):
    began(image_size="64,crop=0.9")
    with pytest.raises(UsageError, match="images as the model has seen them"):
        recall(["image_size"], image_size=now)
