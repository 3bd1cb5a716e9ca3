"""Tests what a worker keeps of a run with parameter servers beside its model: the moving average and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hybridpar.config import TrainConfig
from hybridpar.planner.planned_run import PlannedRun
from hybridpar.planner.resolve import resolve
from hybridpar.run import served_trainer
from hybridpar.run.served_trainer import ServedTrainer
from hybridpar.server.process import Process, ServerWorld


@pytest.fixture(params=["ps", "ps-async"])
def trainer(request, monkeypatch) -> Iterator[ServedTrainer]:
    """Of a model with one weight of 0, whose average began with 0."""
    monkeypatch.setattr(served_trainer, "Servers", stand_in)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = TrainConfig(
        sync=request.param, amp="fp16", model_ema="0.5", lr=0.02, lr_schedule="plateau:patience=0,warmup=0"
    )
    process = Process(0, 2, 1, mock.MagicMock(), "a token")
    world = ServerWorld(process, torch.device("cpu"), 1.0)
    world.go_over(stand_in(model, config))
    plan = PlannedRun(resolve(config, 2))
    with ServedTrainer(model, config=config, world=world, plan=plan, total_steps=10, steps_per_epoch=1) as made:
        made.engine.follow(1)
        torch.nn.init.ones_(model.weight)
        yield made


def stand_in(model: torch.nn.Module, config: TrainConfig, *_: object) -> mock.MagicMock:
    """Servers of which nobody asks anything."""
    barrier, clipping = config.parameter_servers.waits_for_all, SimpleNamespace(by_norm=False)
    return mock.MagicMock(worker=0, barrier=barrier, clipping=clipping, links=[])


def averaged(trainer: ServedTrainer) -> float:
    (average,) = trainer.engine.averages
    return float(average.state_dict()["weight"])


def test_a_skipped_step_leaves_the_average_only_where_all_workers_skip_it(trainer):
    trainer.engine.follow(3, counts=False)
    assert averaged(trainer) == (0.0 if (not trainer.independent) else 0.75)
    trainer.engine.follow(4)
    assert averaged(trainer) == (0.5 if (not trainer.independent) else 0.875)


def test_who_is_not_in_step_follows_what_worker_0_says_of_rates(trainer):
    trainer.steps_done = 3
    for _ in range(2):
        trainer.note_metric(0.5)
    assert trainer._rate_factor() == pytest.approx(0.1)
    trainer.hear(0.01)
    assert trainer._rate_factor() == pytest.approx(0.1), "this worker decides itself"
    trainer.world.members = (1, 0)
    trainer.hear(None)
    assert trainer._rate_factor() == pytest.approx(0.1)
    trainer.hear(0.01)
    assert trainer._rate_factor() == pytest.approx(0.1 if (not trainer.independent) else 0.01)
