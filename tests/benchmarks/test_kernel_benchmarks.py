"""Tests the kernel benchmarks: sums over layers, and parts of a training step."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.kernels.parts import measure_parts
from tests.small_nets import separable


def step_of(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(4, 3, 8, 8)).square().mean().backward()


def test_a_step_is_taken_apart() -> None:
    net = separable()
    without = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    parts = measure_parts(lambda: step_of(net), 2)
    assert min(parts.values()) > 0
    assert measure_parts(lambda: step_of(without), 2) == {"depthwise": 0.0, "norm+activation": 0.0}
