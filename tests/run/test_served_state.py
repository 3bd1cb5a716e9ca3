"""Tests what a worker keeps of a run with parameter servers beside its model: the moving average over steps."""

from __future__ import annotations

import pytest
import torch

from hybridpar.config import TrainConfig
from hybridpar.optim.ema import ModelAverage
from hybridpar.run.position import Standing
from hybridpar.run.served_state import ServedState


@pytest.fixture(params=[True, False], ids=["ps", "ps-async"])
def state(request, monkeypatch) -> ServedState:
    """Of a model with one weight of 0, whose average began with 0."""
    monkeypatch.setattr(ServedState, "_open_links", lambda *_: None)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    made = ServedState(TrainConfig(), "linear", model, [], None, None, request.param, Standing())
    made.average = ModelAverage(model, 0.5)
    made.follow(1)
    torch.nn.init.ones_(model.weight)
    return made


def averaged(state: ServedState) -> float:
    return float(state.average.state_dict()["weight"])


def test_the_average_moves_once_for_each_step_since_the_last_answer(state):
    state.follow(2)
    assert averaged(state) == 0.5
    state.follow(2)
    assert averaged(state) == 0.5
    state.follow(4)
    assert averaged(state) == 0.875


def test_a_skipped_step_leaves_the_average_only_where_all_workers_skip_it(state):
    state.follow(3, applied=False)
    assert averaged(state) == (0.0 if state._barrier else 0.75)
    state.follow(4)
    assert averaged(state) == (0.5 if state._barrier else 0.875)
