"""A checkpoint is whole or it is none, and gives back what it was given."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from hybridpar.comm.world import World
from hybridpar.errors import CheckpointError, RunDirectoryError
from hybridpar.train import checkpoint
from hybridpar.train.checkpoint import (
    CheckpointData,
    load_checkpoint,
    save_checkpoint,
)
from hybridpar.train.checkpoint_files import (
    latest_checkpoint,
    prune_checkpoints,
    resolve_checkpoint,
)
from tests.ranks import run_ranks
from tests.runs import small_disk

ALL_FILES = ("model.pt", "training.pt", "rank-0.pt", "manifest.json")


def make_data(step=3, value=1.0):
    model = {"w": torch.full((2, 3), value), "b": torch.arange(3)}
    return CheckpointData(step, "f" * 16, model, {"rate": 0.5, "state": {"w": torch.ones(2)}}, {"random": [1, 2]})


def save(directory, step=3, value=1.0):
    return save_checkpoint(directory, make_data(step, value), World())


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path / "checkpoints")


def test_what_was_saved_is_loaded(saved):
    loaded, given = load_checkpoint(saved), make_data()
    assert (loaded.step, loaded.fingerprint, loaded.workers) == (3, "f" * 16, 1)
    assert torch.equal(loaded.model["w"], given.model["w"])
    assert loaded.model["b"].dtype == torch.int64
    assert loaded.training["rate"] == 0.5
    assert loaded.local == {"random": [1, 2]}
    assert sorted(path.name for path in saved.iterdir()) == sorted(ALL_FILES)
    assert [path.name for path in saved.parent.iterdir()] == ["step-3"]
    assert torch.load(saved / "model.pt", weights_only=True).keys() == {"w", "b"}
    assert load_checkpoint(saved, rank=1).local is None


def save_in_pieces(world, directory):
    data = make_data()
    path = save_checkpoint(Path(directory), CheckpointData(3, "f", data.model, {}, {"rank": world.rank}), world)
    loaded = load_checkpoint(path, world.rank)
    return loaded.workers, loaded.local


def test_every_worker_finds_its_own_part(tmp_path):
    assert run_ranks(save_in_pieces, 3, str(tmp_path)) == [(3, {"rank": rank}) for rank in range(3)]


def fail_on_one(world, directory):
    if world.rank == 1:
        checkpoint._write = full_disk
    try:
        save_checkpoint(Path(directory), make_data(step=9), world)
    except RunDirectoryError as error:
        return str(error)
    finally:
        checkpoint._write = WRITE
    return "saved"


WRITE = checkpoint._write


def full_disk(file, item):
    raise OSError(28, os.strerror(28))


def test_a_full_disk_on_one_worker_fails_all_of_them_and_leaves_the_older_one(tmp_path):
    save(tmp_path)
    for message in run_ranks(fail_on_one, 2, str(tmp_path)):
        assert message.count("worker 1: the disk is full") == message.count("worker ") == 1
        assert "step-3, the last whole checkpoint, is untouched" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    assert load_checkpoint(tmp_path).step == 3


@pytest.mark.parametrize("harm", ["cut", "flipped", "missing"])
@pytest.mark.parametrize("name", ["model.pt", "training.pt", "rank-0.pt"])
def test_a_damaged_file_is_found(saved, name, harm):
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    if harm == "missing":
        (saved / name).unlink()
    else:
        (saved / name).write_bytes(content[: len(content) // 2] if harm == "cut" else content)
    with pytest.raises(CheckpointError, match=name) as caught:
        load_checkpoint(saved)
    assert caught.value.fix


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 1, "step": "x", "files": []}'])
def test_a_damaged_manifest_is_refused(saved, text):
    (saved / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="manifest"):
        load_checkpoint(saved)


def test_another_version_is_refused_by_its_number(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(CheckpointError, match="of checkpoint version 99"):
        load_checkpoint(saved)


def test_loading_runs_no_code(saved, tmp_path):
    witness = tmp_path / "witness"

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(witness),))

    torch.save({"w": Trap()}, saved / "model.pt")
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["files"]["model.pt"] = {
        "bytes": (saved / "model.pt").stat().st_size,
        "sha256": checkpoint._sha256(saved / "model.pt"),
    }
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(saved)
    assert not witness.exists()


def test_a_run_directory_stands_for_its_newest_checkpoint(tmp_path):
    for step in (2, 10, 9):
        save(tmp_path / "checkpoints", step)
    assert resolve_checkpoint(tmp_path).name == "step-10"
    assert resolve_checkpoint(tmp_path / "checkpoints").name == "step-10"
    assert resolve_checkpoint(tmp_path / "checkpoints" / "step-2").name == "step-2"


def test_a_half_written_one_never_counts(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def crash(*arguments):
        raise KeyboardInterrupt  # as good as kill -9: nothing is cleaned up

    for place in ("_write", "_publish"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, place, crash)
            with pytest.raises(KeyboardInterrupt):
                save(tmp_path, 2)
        assert (tmp_path / "step-2.partial").is_dir()
        assert latest_checkpoint(tmp_path).name == "step-1"
    save(tmp_path, 2)
    assert latest_checkpoint(tmp_path).name == "step-2"


def test_a_crash_while_one_is_replaced_loses_neither(tmp_path, monkeypatch):
    save(tmp_path, 5, value=1.0)
    rename = Path.rename

    def crash_before_the_second(self, target):
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", crash_before_the_second)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 5, value=2.0)
    monkeypatch.undo()
    assert float(load_checkpoint(tmp_path).model["w"][0, 0]) == 1.0
    save(tmp_path, 5, value=3.0)
    assert float(load_checkpoint(tmp_path).model["w"][0, 0]) == 3.0
    prune_checkpoints(tmp_path, keep=1, best=())
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]


def test_pruning_takes_away_what_crashes_left_and_nothing_of_the_users(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-7.partial").mkdir()
    (tmp_path / "step-3").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-by-step.txt").write_text("mine")
    prune_checkpoints(tmp_path, keep=1, best=())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-1", "step-by-step.txt"]


@pytest.mark.root
def test_a_really_full_disk_leaves_the_last_checkpoint(tmp_path):
    with small_disk(tmp_path / "disk", kilobytes=512) as disk:
        save(disk, 1)
        big = {"w": torch.zeros(1 << 18)}
        with pytest.raises(RunDirectoryError) as caught:
            save_checkpoint(disk, CheckpointData(2, "f", big, {}, {}), World())
        assert "the disk is full" in caught.value.what
        assert [path.name for path in disk.iterdir()] == ["step-1"]
        assert load_checkpoint(disk).step == 1
