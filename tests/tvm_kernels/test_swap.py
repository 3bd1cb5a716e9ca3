"""Tests how convolutions of a model are swapped: only the class and the speed change."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import fx, nn

from hybridpar.models import model_fingerprint
from hybridpar.partition.trace import trace_model
from hybridpar.tvm_kernels import choice, optimize, restore
from hybridpar.tvm_kernels.database import Database, append_records
from hybridpar.tvm_kernels.layers import tunable_layers
from hybridpar.tvm_kernels.shapes import Direction, Layout
from hybridpar.tvm_kernels.swap import DepthwiseConv2d
from tests.tvm_kernels.standin import StandIn, all_records


class Block(nn.Module):
    """Depthwise layers of all kinds, and layers that look like some."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.plain = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.same = nn.Conv2d(8, 8, 5, padding="same", groups=8, bias=False)
        self.valid = nn.Conv2d(8, 8, 3, padding="valid", groups=8, stride=2)
        self.multiplied = nn.Conv2d(8, 16, 3, groups=8)
        self.reflected = nn.Conv2d(16, 16, 3, padding=1, groups=16, padding_mode="reflect")
        self.grouped = nn.Conv2d(16, 16, 3, groups=4)
        self.uneven = nn.Conv2d(16, 16, 2, padding="same", groups=16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


SWAPPED = {"plain", "same", "valid"}


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that numpy computes; what is chosen by is put back."""
    made = StandIn()
    monkeypatch.setattr(choice, "make_kernels", made)
    before = choice.use_choices(None)
    yield made
    choice.use_choices(before)


def records_of(model: nn.Module, *sizes: int, layout: Layout = Layout.CHANNELS_LAST) -> Database:
    found, _ = tunable_layers(model, sizes, layout=layout)
    return Database("the test's", [record for layer in found for record in all_records(layer.shape, layer.layout)])


def test_only_what_the_op_can_do_is_swapped(kernels):
    model = optimize(Block(), Database())
    assert {name for name, one in model.named_modules() if type(one) is DepthwiseConv2d} == SWAPPED


@pytest.mark.parametrize("layout", Layout)
def test_a_swapped_model_computes_the_same(kernels, layout):
    model = Block().to(memory_format=torch.channels_last if layout is Layout.CHANNELS_LAST else torch.contiguous_format)
    x = torch.randn(2, 3, 24, 24)
    x = x.contiguous(memory_format=torch.channels_last) if layout is Layout.CHANNELS_LAST else x
    right = model(x)
    gradients = torch.autograd.grad(right.square().mean(), model.parameters())
    optimize(model, records_of(model, 2, 3, 24, 24, layout=layout))
    found = model(x)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().mean(), model.parameters()), gradients, rtol=1e-4, atol=1e-5
    )
    assert kernels.calls == dict.fromkeys(Direction, 3 if layout is Layout.CHANNELS_LAST else 0)


def test_nothing_but_the_class_changes_and_that_comes_back(kernels):
    model = Block()
    calls: list[str] = []
    hook = model.plain.register_forward_hook(lambda *_: calls.append("hook"))
    before = {name: (id(one), one.data_ptr()) for name, one in model.named_parameters()}
    layers, state, fingerprint = dict(model.named_modules()), model.state_dict(), model_fingerprint(model)
    for change, kind in ((lambda one: optimize(one, Database()), DepthwiseConv2d), (restore, nn.Conv2d)):
        assert change(model) is model
        assert type(model.plain) is kind
        assert dict(model.named_modules()) == layers
        assert {name: (id(one), one.data_ptr()) for name, one in model.named_parameters()} == before
        assert model_fingerprint(model) == fingerprint
        model.load_state_dict(state)
        model(torch.randn(1, 3, 24, 24))
        assert calls.pop() == "hook"
    hook.remove()
    assert repr(optimize(Block(), Database())).replace("DepthwiseConv2d", "Conv2d") == repr(model)


def test_a_swapped_model_can_be_copied_and_saved(kernels):
    model = optimize(Block(), Database())
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    x = torch.randn(1, 3, 24, 24)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        assert type(other.plain) is DepthwiseConv2d
        assert torch.equal(other(x), model(x))


def test_a_file_is_read_and_reported(kernels, tmp_path, caplog):
    append_records(tmp_path / "k.jsonl", all_records("1x8x24x24 k3x3 s1x1 p1x1 d1x1", Layout.CHANNELS_LAST))
    model = optimize(Block(), tmp_path / "k.jsonl", report=True)
    assert "3 depthwise convolution(s) choose from 3 record(s), and 0 BatchNorm layer(s) are fused" in caplog.text
    model(torch.randn(1, 3, 24, 24).contiguous(memory_format=torch.channels_last))
    assert kernels.calls[Direction.FORWARD] == 1


def test_what_was_partitioned_before_is_swapped_too(kernels):
    model = Block()
    stage = fx.GraphModule(model, trace_model(model, (torch.randn(1, 3, 24, 24),)).graph)
    optimize(model, records_of(model, 1, 3, 24, 24))
    stage(torch.randn(1, 3, 24, 24).contiguous(memory_format=torch.channels_last))
    assert kernels.calls[Direction.FORWARD] == 3


def test_parametrised_layers_are_left_alone(kernels):
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, groups=8)))
    optimize(model, Database())
    assert not any(isinstance(one, DepthwiseConv2d) for one in model.modules())


class Fickle(nn.Module):
    """Goes another way where values say so, which only a real run shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, groups=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if float(x.sum()) == 0.0 else x


def test_a_model_that_wants_values_is_run():
    assert [one.name for one in tunable_layers(Fickle(), (1, 3, 9, 9))[0]] == ["layer"]
