"""Fixtures for tests of observation: records of steps and epochs, information on the run, a clock."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from hybridpar.observe.records import EpochRecord, StepRecord
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
def facts() -> dict[str, object]:
    return {
        **{"model": "resnet18", "data": "cifar10", "workers": 2, "device": "cpu", "batch_size": 64, "seed": 7},
        **{"stages": 1, "replicas": 1, "micro_batches": 1, "schedule": "accumulate"},
        **{"codec": "none", "sync": "allreduce", "servers": 0},
    }


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()
