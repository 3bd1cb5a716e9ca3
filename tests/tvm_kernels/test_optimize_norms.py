"""Tests `optimize` and `restore` with norms: they are swapped together with convolutions, and need no records."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn

from hybridpar.partition.trace import trace_model
from hybridpar.tvm_kernels import Database, norm_kernels, norm_swap, optimize
from hybridpar.tvm_kernels.choice import use_choices
from hybridpar.tvm_kernels.norm_swap import fused_norms, why_stock
from hybridpar.tvm_kernels.shapes import Layout, NormShape
from tests.tvm_kernels.norms import images, step
from tests.tvm_kernels.standin import NormStandIn

FIRST, SECOND = NormShape(2 * 81, 8, "silu"), NormShape(2 * 81, 8, "none")


class Block(nn.Module):
    """A norm with an activation and one without, around a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU(inplace=True))
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        result: Tensor = self.norm(self.depthwise(y)) + y
        return result


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> Iterator[NormStandIn]:
    """Kernels that torch computes; what is chosen by is put back."""
    before = use_choices(None)
    monkeypatch.setattr(norm_swap, "LEAST_VALUES", 0)
    yield NormStandIn(monkeypatch)
    use_choices(before)


def block() -> nn.Module:
    return Block().to(memory_format=torch.channels_last)


def test_norms_run_fused_where_they_are_large_enough(norms: NormStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = block(), images(2, 3, 9, 9)
    right = step(copy.deepcopy(model), x)
    assert optimize(model, Database()) is model
    for least, fused in ((FIRST.rows * FIRST.channels, {FIRST: 1, SECOND: 1}), (1 << 20, {})):
        monkeypatch.setattr(norm_swap, "LEAST_VALUES", least)
        other = optimize(copy.deepcopy(model), Database())
        norms.calls["forward"].clear()
        for one, two in zip(step(other, x), right, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
        assert norms.calls["forward"] == fused


def test_why_a_norm_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, where = torch.device("cpu"), (Layout.CHANNELS_LAST, torch.device("cpu"), "float32")
    monkeypatch.setattr(norm_kernels, "table", lambda: {"stands": "in"})
    large, small = NormShape(1 << 20, 32, "relu"), NormShape(64, 8, "relu")
    assert why_stock(large, *where) == ""
    assert "below" in why_stock(small, *where)
    assert "channels_last" in why_stock(large, Layout.CONTIGUOUS, cpu, "float32")
    assert "float32" in why_stock(large, Layout.CHANNELS_LAST, cpu, "bfloat16")
    assert "CPU" in why_stock(large, Layout.CHANNELS_LAST, torch.device("cuda", 0), "float32")
    monkeypatch.setattr(norm_kernels, "table", dict)
    assert "no kernels here" in why_stock(large, *where)
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "off")
    assert why_stock(large, *where) == "HYBRIDPAR_KERNELS is off"


def test_before_and_after_a_partition(norms: NormStandIn) -> None:
    x = images(2, 3, 9, 9)
    graphs = [trace_model(model, (x,)).graph for model in (block(), optimize(block(), Database()))]
    names = [[(node.op, node.name, node.target) for node in graph.nodes] for graph in graphs]
    assert names[0] == names[1]
    model = block()
    stage = fx.GraphModule(model, trace_model(model, (x,)).graph)
    right = step(copy.deepcopy(model), x)
    optimize(model, Database())
    norms.calls["backward"].clear()  # tracing has compared the graph with the model
    for one, two in zip(step(stage, x), right, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert norms.calls["backward"] == {FIRST: 1, SECOND: 1}
    alone = fx.GraphModule(block(), trace_model(block(), (x,)).graph)
    assert set(fused_norms(optimize(alone, Database()))) == {"stem.1", "norm"}


# -------------------------------------------------------------------------------------------- what there is to be tuned
