"""Fixtures for tests of observation: records of steps and epochs, information on the run, a clock."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hybridpar.observe.records import EpochRecord, RunInfo, StepRecord
from tests.run.run_directories import step_record


@pytest.fixture
def make_step() -> Callable[..., StepRecord]:
    def make(step: int, **fields: object) -> StepRecord:
        plain = {"epoch": 0, "loss": 2.0 / step, "step_ms": 20.0, "grad_norm": None, "residual_norm": None}
        return step_record(step, **{**plain, "residual_norms": None, **fields})

    return make


@pytest.fixture
def make_epoch() -> Callable[..., EpochRecord]:
    def make(epoch: int, **fields: object) -> EpochRecord:
        return replace(EpochRecord(epoch, 10 * (epoch + 1), 0.875, 0.5, 0.75, 12.3), **fields)

    return make


@pytest.fixture
def info(tmp_path: Path) -> RunInfo:
    notes = ("allocator: glibc [top_pad]",)
    return RunInfo("resnet18", "cifar10", 2, "cpu", 2, 20, 10, 11_181_642, 64, tmp_path, notes=notes)


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()
