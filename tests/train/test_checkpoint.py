"""A checkpoint is whole or it is none, and gives back what it was given."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.errors import CheckpointError, RunDirectoryError
from hybridpar.formats.checkpoint_files import list_checkpoints, prune_checkpoints
from hybridpar.models.weights import read_weights as load_weights_of
from hybridpar.train import checkpoint
from hybridpar.train.checkpoint import CheckpointData, load_checkpoint, save_checkpoint
from tests.ranks import run_ranks
from tests.runs import small_disk

ALL_FILES = ("model.safetensors", "training-0.pt", "rank-0.pt", "manifest.json")


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
    assert load_file(saved / "model.safetensors").keys() == {"w", "b"}
    assert load_checkpoint(saved, rank=1).local is None


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
        assert message.count("worker 1: No space left on device") == message.count("worker ") == 1
        assert "step-3, the last whole checkpoint, is untouched" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    assert load_checkpoint(tmp_path).step == 3


@pytest.mark.parametrize("harm", ["cut", "flipped", "missing"])
@pytest.mark.parametrize("name", ["model.safetensors", "training-0.pt", "rank-0.pt"])
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


@pytest.mark.parametrize("text", ["", "[]", '{"version": 4, "step": "x"}', '{"version": 9}'])
def test_a_damaged_manifest_and_another_version_are_refused(saved, text):
    (saved / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="version 9" if "9" in text else "manifest"):
        load_checkpoint(saved)


def test_loading_runs_no_code(saved, tmp_path):
    witness = tmp_path / "witness"

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(witness),))

    torch.save({"w": Trap()}, saved / "training-0.pt")
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["files"]["training-0.pt"] = hashlib.sha256((saved / "training-0.pt").read_bytes()).hexdigest()
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(saved)
    assert not witness.exists()


class Kill:
    """Ends the process as `kill -9` does at one of the times at which a save changes files.

    Each file may be missing, half written or whole, and each directory may have its old name or its new one.
    """

    def __init__(self, at: int) -> None:
        self._left = at
        checkpoint._write = self._write
        Path.rename = lambda path, target: self._rename(path, target)

    def _is_now(self) -> bool:
        self._left -= 1
        return self._left < 0

    def _write(self, file: Path, content: object) -> str:
        if self._is_now():
            os.kill(os.getpid(), signal.SIGKILL)
        digest = WRITE(file, content)
        if self._is_now():
            os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return digest

    def _rename(self, path: Path, target: Path) -> Path:
        if self._is_now():
            os.kill(os.getpid(), signal.SIGKILL)
        return RENAME(path, target)


RENAME = Path.rename


def go_on(trainer: Trainer, directory: Path) -> tuple[int, torch.Tensor]:
    """Take a step from the newest checkpoint: the step of that, and the weights then."""
    trainer.load(directory)
    step = trainer.steps_done
    trainer.step((torch.ones(2, 4), torch.tensor([0, 1])))
    return step, trainer.model.weight.detach().clone()


def kill_at_all_times(world: World, directory: str) -> list[int]:
    """Kill a process while it saves, once at each time; the steps of the checkpoints that were gone on from."""
    path, found = Path(directory), []
    with Trainer(nn.Linear(4, 3), config=TrainConfig(model_ema="0.9", plan="none")) as trainer:
        for step in (1, 2):
            trainer.step((torch.ones(2, 4), torch.tensor([0, 1])))
            trainer.save(path / str(step))
        expected = dict(go_on(trainer, path / str(step)) for step in (1, 2))
        for before in ("1", "2"):  # another checkpoint is there, or one of the same step
            for at in itertools.count():
                shutil.rmtree(path / "run", ignore_errors=True)
                shutil.copytree(path / before, path / "run")
                trainer.load(path / "2")
                child = os.fork()
                if child == 0:
                    try:
                        Kill(at)
                        trainer.save(path / "run")
                        os._exit(0)
                    finally:
                        os._exit(1)
                ended = os.waitpid(child, 0)[1]
                step, weights = go_on(trainer, path / "run")
                assert torch.equal(weights, expected[step])
                found.append(step)
                if ended == 0:
                    break
                assert os.WTERMSIG(ended) == signal.SIGKILL
    return found


def test_a_process_that_is_killed_while_it_saves_leaves_a_run_that_goes_on(tmp_path):
    (found,) = run_ranks(kill_at_all_times, 1, str(tmp_path))
    # Two times for each of the five files, and the renaming; one of the same step that is there is renamed, too.
    assert found == [1] * 11 + [2] + [2] * 13


def test_weights_are_read_without_this_package(tmp_path):
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    net[2].weight = net[0].weight  # tied
    state = net.to(torch.float64).state_dict()
    path = save_checkpoint(tmp_path, CheckpointData(1, "f", dict(state), {}, {}, average=dict(state)), World())
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1  # whoever may read the others may read these
    for name in ("model", "model_ema"):
        other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
        other.load_state_dict(load_file(path / f"{name}.safetensors"))
        assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())


def test_what_safetensors_cannot_hold_is_saved_beside_it(tmp_path):
    state = {"w": torch.ones(2), "c": torch.tensor([1j], dtype=torch.complex128), "part._extra_state": {"seen": 3}}
    path = save_checkpoint(tmp_path, CheckpointData(1, "f", state, {}, {}), World())
    assert load_file(path / "model.safetensors").keys() == {"w"}
    loaded = load_checkpoint(path).model
    assert loaded.keys() == state.keys()
    assert torch.equal(loaded["c"], state["c"])
    assert loaded["part._extra_state"] == {"seen": 3}


def save_shards(world: World, directory: str) -> None:
    own = {f"{world.rank}.w": torch.full((2, 2), float(world.rank))} if world.rank != 1 else {}
    optimizer = {"kind": "SGD", "groups": [{"names": [*own]}], "state": {name: {"m": one} for name, one in own.items()}}
    average = own if world.is_main else None
    data = CheckpointData(1, "f", own, {"optimizer": optimizer}, {"rank": world.rank}, average=average)
    loaded = load_checkpoint(save_checkpoint(Path(directory), data, world), world.rank)
    assert (loaded.workers, loaded.local) == (3, {"rank": world.rank})


def test_parts_of_several_workers_are_read_together_by_an_index(tmp_path):
    run_ranks(save_shards, 3, str(tmp_path))
    index = json.loads((tmp_path / "step-1" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 32}
    assert sorted(index["weight_map"].items()) == [
        ("0.w", "model-00001-of-00002.safetensors"),
        ("2.w", "model-00002-of-00002.safetensors"),
    ]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "step-1" / file)[name], torch.full((2, 2), float(name[0])))
    loaded = load_checkpoint(tmp_path)
    assert loaded.model.keys() == loaded.training["optimizer"]["state"].keys() == {"0.w", "2.w"}
    assert loaded.average is not None
    assert loaded.average.keys() == {"0.w"}
    some = load_checkpoint(tmp_path, held={"2.w"}, stepped={"0.w"})
    assert (some.model.keys(), some.training["optimizer"]["state"].keys()) == ({"2.w"}, {"0.w"})
    assert load_weights_of(tmp_path / "step-1").keys() == {"0.w", "2.w"}


@pytest.mark.root
def test_a_really_full_disk_leaves_the_last_checkpoint(tmp_path):
    with small_disk(tmp_path / "disk", kilobytes=512) as disk:
        save(disk, 1)
        big = {"w": torch.zeros(1 << 18)}
        with pytest.raises(RunDirectoryError) as caught:
            save_checkpoint(disk, CheckpointData(2, "f", big, {}, {}), World())
        assert "No space left on device" in caught.value.what
        assert [path.name for path in disk.iterdir()] == ["step-1"]
        assert load_checkpoint(disk).step == 1


def test_pruning_takes_away_what_crashes_left_and_nothing_of_the_users(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-7.partial").mkdir()
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-1.replaced")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-by-step.txt").write_text("mine")
    prune_checkpoints(tmp_path, list_checkpoints(tmp_path)[-1:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-1", "step-by-step.txt"]
