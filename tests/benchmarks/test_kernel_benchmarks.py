"""Tests the kernel benchmarks: sums over layers, and parts of a training step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from benchmarks.kernels import norms, training
from benchmarks.kernels.parts import measure_parts
from benchmarks.rig.paired import Paired
from hybridpar.tvm_kernels import Database, norm_swap
from hybridpar.tvm_kernels.choice import use_choices
from hybridpar.tvm_kernels.shapes import Direction, Layout, NormShape
from tests.small_nets import separable
from tests.tvm_kernels.standin import NormStandIn, all_records, tuned

SHAPE = NormShape(4 * 64, 8, "relu")


def test_a_network_is_the_sum_of_its_layers_as_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "least_values", lambda: 1024)
    slow, fast = NormShape(16, 8, "none"), NormShape(1024, 8, "relu6")

    def times(stock: float, fused: float, compiled: float, *, loaded: bool) -> Paired:
        each = {"stock": stock, "fused": fused, "compiled": compiled}
        return Paired({name: (ms,) * 20 for name, ms in each.items()}, 0, 0.0, loaded)

    found = {
        slow: norms.Found(times(1, 2, 0.5, loaded=False), 7.0, 0.5, 1e-7),
        fast: norms.Found(times(9, 3, 6, loaded=True), 5.0, 2.5, 1e-7),
    }
    first, second, total = norms.rows_of("mobilenet_v2", 32, {slow: 3, fast: 1}, found)
    assert [first["shape"], second["shape"], total["shape"]] == ["16x8 none", "1024x8 relu6", "all"]
    assert (first["verdict"], second["verdict"], total["verdict"]) == ("stock", "tuned", "met")
    assert (first["times_stock"], first["as_chosen"]) == ("0.5000", "1.0000")
    assert (second["times_stock"], second["floor_share"]) == ("3.0000", "0.8333")
    # 3 * 1 + 9 with torch, 3 * 1 + 3 as chosen.
    assert (total["stock_ms"], total["chosen_ms"], total["times_stock"]) == ("12.0000", "6.0000", "2.0000")
    assert float(str(total["as_chosen"])) == pytest.approx(math.exp(math.log(3) / 4), abs=1e-4)
    assert total["floor_ms"] == "4.0000"
    assert (total["compiled_ms"], total["compiled_times_stock"], total["compile_s"]) == ("7.5000", "1.6000", "12.0")
    assert total["loaded"] is True
    assert len({tuple(row) for row in (first, second, total)}) == 1, "one table, one set of columns"


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
