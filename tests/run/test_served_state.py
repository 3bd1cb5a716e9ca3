"""Tests what a worker keeps of a run with parameter servers beside its model: the moving average and the loss scale."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hybridpar.config import TrainConfig
from hybridpar.config.rates import OnPlateau
from hybridpar.models.random_state import random_state
from hybridpar.optim.ema import ModelAverage
from hybridpar.optim.schedule import Plateau
from hybridpar.run import served_state
from hybridpar.run.position import Standing
from hybridpar.run.served_state import ServedState
from hybridpar.server.clipping import Clipping
from hybridpar.train.checkpoint import CheckpointData


@pytest.fixture(params=[True, False], ids=["ps", "ps-async"])
def state(request, monkeypatch) -> ServedState:
    """Of a model with one weight of 0, whose average began with 0."""
    monkeypatch.setattr(ServedState, "_open_links", lambda *_: mock.Mock())
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    place = SimpleNamespace(rank=0, workers=2)
    kept = (None, request.param, Clipping(), Standing())
    made = ServedState(TrainConfig(amp="fp16"), "linear", model, [], place, *kept)
    made.average = ModelAverage(model, 0.5)
    made.follow(1)
    torch.nn.init.ones_(model.weight)
    return made


def averaged(state: ServedState) -> float:
    return float(state.average.state_dict()["weight"])


def test_a_skipped_step_leaves_the_average_only_where_all_workers_skip_it(state):
    state.follow(3, applied=False)
    assert averaged(state) == (0.0 if state._barrier else 0.75)
    state.follow(4)
    assert averaged(state) == (0.5 if state._barrier else 0.875)


def test_who_is_not_in_step_follows_what_worker_0_says_of_rates(state):
    state._plateau = Plateau(0.02, OnPlateau(patience=0))
    state._at.step = 3
    assert state.tells == (None if state._barrier else 1.0)
    for _ in range(2):
        state.note_metric(0.5, 10, 1)
    assert state.lowered == pytest.approx(0.1)
    state.hear(0.01)
    assert state.lowered == pytest.approx(0.1), "this worker decides itself"
    state._place.rank = 1
    state.hear(None)
    assert state.lowered == pytest.approx(0.1)
    state.hear(0.01)
    assert state.lowered == (pytest.approx(0.1) if state._barrier else 0.01)
    assert state.tells is None


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_are_not_in_step_go_on_with_loss_scales_of_their_own(state, workers, monkeypatch):
    shared, own = ({"scale": scale, "steps": 1.0} for scale in (4.0, 2.0))
    local = {"random": random_state(torch.device("cpu")), "server": {"own_steps": 3, "codecs": [], "loss_scale": own}}
    data = CheckpointData(3, "", {}, {"loss_scale": shared}, local, workers)
    monkeypatch.setattr(served_state, "load_checkpoint", lambda *_: data)
    with torch.random.fork_rng():
        state._load_own(Path())
    assert state.loss_scale.state_dict() == (own if workers == 2 and not state._barrier else shared)
