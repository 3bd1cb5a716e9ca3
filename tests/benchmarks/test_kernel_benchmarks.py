"""Tests the kernel benchmarks: sums over layers, and parts of a training step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.kernels import training
from benchmarks.kernels.parts import measure_parts
from hybridpar.tvm_kernels import Database, norm_swap
from hybridpar.tvm_kernels.choice import use_choices
from hybridpar.tvm_kernels.shapes import Direction, Layout, NormShape
from tests.small_nets import separable
from tests.tvm_kernels.standin import NormStandIn, all_records, tuned

SHAPE = NormShape(4 * 64, 8, "relu")


def step_of(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(4, 3, 8, 8)).square().mean().backward()


def test_a_step_is_taken_apart() -> None:
    net = separable()
    without = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    parts = measure_parts(lambda: step_of(net), 2)
    assert min(parts.values()) > 0
    assert measure_parts(lambda: step_of(without), 2) == {"depthwise": 0.0, "norm+activation": 0.0}


def test_what_runs_on_kernels_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "on")
    monkeypatch.setattr(norm_swap, "LEAST_VALUES", 0)
    made = NormStandIn(monkeypatch)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8)
    net = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    records = all_records("4x8x8x8 k3x3 s1x1 p1x1 d1x1", Layout.CHANNELS_LAST)
    before = use_choices(None)
    try:
        method = training.Method(net, Layout.CHANNELS_LAST, Database("", records))
        with tuned(records) as kernels:
            assert min(measure_parts(lambda: step_of(method.model), 1).values()) > 0
        assert made.calls["backward"] == {SHAPE: 1}
        assert kernels.calls == dict.fromkeys(Direction, 1)
        plain = training.Method(net, Layout.CHANNELS_LAST, Database("", records), norms=False)
        step_of(plain.model)
        assert made.calls["backward"] == {SHAPE: 1}
    finally:
        use_choices(before)
