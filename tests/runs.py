"""Functions with which tests start short training runs and check their run directories.

Every run that a test finishes goes through `check_run`, so the files a user relies on are checked for each of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.data.sources import ImageFacts
from hybridpar.errors import UsageError
from hybridpar.formats.checkpoint_files import latest_checkpoint
from hybridpar.formats.file_reader import read_json
from hybridpar.observe.metrics import read_metrics
from hybridpar.observe.records import SUMMARY_FIGURES
from hybridpar.observe.timeline import Timeline, timeline_of
from hybridpar.plan import read_plan
from hybridpar.run.run import run_training
from hybridpar.train.checkpoint import load_checkpoint
from tests.small_nets import FAULT_VARIABLE

ROOT = Path(__file__).parents[1]

#: Six steps an epoch; a step takes a few milliseconds.
SMALL = {"data": "synthetic:samples=96", "image_size": 8, "batch_size": 16, "epochs": 2, "lr": 0.05}


def small_config(run_dir: Path, **options: Any) -> TrainConfig:
    return TrainConfig(**{**SMALL, "run_dir": run_dir, "tune_process": False, **options})


def small_arguments(run_dir: Path, *more: str, model: str = "tests.small_nets:plain") -> list[str]:
    """The same as command-line arguments."""
    options = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
    return ["train", model, *options, f"--run-dir={run_dir}", *more]


def train(run_dir: Path, model: str = "plain", *, fault: str | None = None, **options: Any) -> int:
    """Train a small model in this process, as the only worker."""
    with faulty(fault), restored_modes():
        return run_training(small_config(run_dir, **options), f"tests.small_nets:{model}")


def train_rank(world: World, run_dir: Path, model: str, fault: str | None, options: dict[str, Any]) -> int:
    """The same as one of several ranks, for `run_ranks`."""
    return train(run_dir, model, fault=fault, **options)


@contextmanager
def faulty(fault: str | None) -> Iterator[None]:
    if fault is not None:
        os.environ[FAULT_VARIABLE] = fault
    try:
        yield
    finally:
        os.environ.pop(FAULT_VARIABLE, None)


@contextmanager
def restored_modes() -> Iterator[None]:
    """A run sets modes of the whole process; the next test wants them back."""
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(False)


def command(arguments: Sequence[str], *, launcher: Sequence[str] = ("-m", "hybridpar"), **variables: str) -> Any:
    """Start `hybridpar ARGUMENTS` as a process of its own, with its output in pipes."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HYBRIDPAR_TUNED", "OMP_"))}
    return subprocess.Popen(
        [sys.executable, *launcher, *arguments],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def small_disk(place: Path, *, kilobytes: int) -> Iterator[Path]:
    """A file system that is soon full; the test is skipped where it cannot be mounted."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def check_run(run_dir: Path, *, ended: str = "finished", steps: int | None = None) -> dict[str, Any]:
    """Check what a run left behind, and return its summary."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary.keys() == {row.name for row in SUMMARY_FIGURES}
    assert summary["exit"] == ended
    if steps is not None:
        assert summary["steps"] == steps
    recorded = [int(step) for step in read_metrics(run_dir).steps["step"]]
    assert recorded == list(range(1, summary["steps"] + 1))
    plan = read_plan(run_dir / "plan.json")
    facts = json.loads((run_dir / "run.json").read_text())
    assert plan.model.name == facts["model"] == summary["model"]
    assert ImageFacts.read(facts["images"]) is not None
    assert plan.placement is not None
    assert plan.layout.replicas == summary["replicas"]
    assert len(plan.partition.stages) == summary["stages"]
    if summary["stages"] == 1:
        assert summary["replicas"] == summary["workers"]
    assert list(run_dir.glob("**/events.out.tfevents.*"))
    return summary


def saved_state(run_dir: Path) -> dict[str, Tensor]:
    """Everything that training goes on from, of the newest checkpoint: weights, buffers and optimizer state."""
    newest = latest_checkpoint(run_dir / "checkpoints")
    assert newest is not None, f"no checkpoint in {run_dir}"
    data = load_checkpoint(newest)
    state = dict(data.model)
    for name, values in data.training["optimizer"]["state"].items():
        state |= {f"{name}/{key}": value for key, value in values.items() if isinstance(value, Tensor)}
    return state


def assert_same_state(one: Path, other: Path) -> None:
    """The newest checkpoints of two runs hold the same bits."""
    first, second = saved_state(one), saved_state(other)
    assert first.keys() == second.keys()
    differing = [name for name in first if not torch.equal(first[name], second[name])]
    assert not differing, f"differ: {differing}"
    assert any("momentum" in name or "exp_avg" in name for name in first)


def read_timeline(path: Path) -> Timeline:
    """What a run wrote with --timeline."""
    return timeline_of(read_json(path, "the trace", UsageError, "Name another file."), str(path))
