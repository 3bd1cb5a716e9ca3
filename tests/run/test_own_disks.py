"""Tests runs whose workers do not share a run directory: each of them has a working directory of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hybridpar.comm.world import World
from hybridpar.errors import CheckpointError
from hybridpar.formats.checkpoint_files import read_manifest
from hybridpar.train.checkpoint import load_checkpoint
from tests.ranks import RankError, run_ranks
from tests.runs import assert_same_state, check_run, train, train_rank

RUN = Path("run")


def train_apart(world: World, base: Path, options: dict[str, Any]) -> int:
    """Train on a disk that only this rank sees."""
    disk = base / str(world.rank)
    disk.mkdir(exist_ok=True)
    os.chdir(disk)
    return train(RUN, "dropping", **options)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_worker_0_has_all_checkpoints_and_every_worker_needs_them_to_go_on(tmp_path):
    assert run_ranks(train_apart, 2, tmp_path, {"epochs": 1}) == [0, 0]
    first, other = tmp_path / "0" / "run", tmp_path / "1" / "run"
    assert names(first / "checkpoints" / "step-6") == sorted(
        [*read_manifest(first / "checkpoints" / "step-6")["files"], "manifest.json"]
    )
    assert load_checkpoint(first, rank=1).local is not None
    assert not (other / "checkpoints").exists()
    with pytest.raises(RankError) as caught:
        run_ranks(train_apart, 2, tmp_path, {"epochs": 2, "resume": True})
    assert CheckpointError.__name__ in str(caught.value)
    assert "does not have the checkpoint run/checkpoints/step-6 of worker 0" in str(caught.value)
    assert "Have the run directory on a disk that all machines see" in str(caught.value)
    shutil.copytree(first / "checkpoints", other / "checkpoints")
    assert run_ranks(train_apart, 2, tmp_path, {"epochs": 2, "resume": True}) == [0, 0]
    assert check_run(first)["resumed_from"] == 6
    run_ranks(train_rank, 2, tmp_path / "shared", "dropping", None, {"epochs": 1})
    run_ranks(train_rank, 2, tmp_path / "shared", "dropping", None, {"epochs": 2, "resume": True})
    assert_same_state(first, tmp_path / "shared")
