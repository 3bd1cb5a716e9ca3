"""Clipping by value and adaptive clipping against torch's and timm's."""

from __future__ import annotations

import pytest
from timm.utils import dispatch_clip_grad
from torch import nn

from hybridpar import Trainer
from hybridpar.config import TrainConfig
from hybridpar.optim.build import build_optimizer
from tests.train.test_trainer import assert_equal, make_batch, make_model


@pytest.mark.parametrize(("mode", "limit"), [("value", 0.001), ("agc", 0.01)])
@pytest.mark.parametrize("guard", [True, False])
def test_a_trainer_clips_as_timms_loop_does(mode, limit, guard):
    config = TrainConfig(clip_grad=f"{limit},mode={mode}", guard=guard)
    with Trainer(make_model(), config=config) as trainer:
        for step in range(2):
            trainer.step(make_batch(step))
    model = make_model()
    optimizer = build_optimizer(model, config)
    for step in range(2):
        images, labels = make_batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        parameters = list(model.parameters())
        dispatch_clip_grad(parameters[:-2] if mode == "agc" else parameters, limit, mode)
        optimizer.step()
    assert_equal(trainer.model, model)
