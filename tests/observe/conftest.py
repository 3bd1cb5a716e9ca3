"""Fixtures for tests of observation: records of steps and epochs, information on the run, a clock."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hybridpar.observe.records import EpochRecord, RunInfo, StepRecord


@pytest.fixture
def make_step() -> Callable[..., StepRecord]:
    def make(step: int, **fields: object) -> StepRecord:
        record = StepRecord(
            step=step,
            epoch=0,
            loss=2.0 / step,
            lr=0.05,
            samples=64,
            step_ms=20.0,
            compute_ms=15.0,
            exposed_sync_ms=3.0,
            data_ms=1.0,
            bytes_sent=1_000_000,
            skipped=False,
            grad_norm=None,
        )
        return replace(record, **fields)

    return make


@pytest.fixture
def make_epoch() -> Callable[..., EpochRecord]:
    def make(epoch: int, **fields: object) -> EpochRecord:
        record = EpochRecord(
            epoch=epoch, step=10 * (epoch + 1), test_accuracy=0.875, test_loss=0.5, train_loss=0.75, seconds=12.3
        )
        return replace(record, **fields)

    return make


@pytest.fixture
def info(tmp_path: Path) -> RunInfo:
    return RunInfo(
        model="resnet18",
        data="cifar10",
        workers=2,
        device="cpu",
        epochs=2,
        steps_total=20,
        steps_per_epoch=10,
        parameters=11_181_642,
        batch_size=64,
        run_dir=tmp_path,
        notes=("allocator: glibc [top_pad]",),
    )


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()
