"""Tests `optimize` and `restore` with norms: convolutions and norms are swapped together, each by its record."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn

from hybridpar.models import model_fingerprint
from hybridpar.partition.trace import trace_model
from hybridpar.sync.batchnorm import BatchNormPool
from hybridpar.tvm_kernels import Database, norm_kernels, optimize, restore
from hybridpar.tvm_kernels.batch_norm_act import SecondDerivativeError
from hybridpar.tvm_kernels.choice import use_choices
from hybridpar.tvm_kernels.layers import NormLayer, conv_norm_shapes, tunable_layers
from hybridpar.tvm_kernels.norm_swap import fused_norms
from hybridpar.tvm_kernels.shapes import ConvNormShape, Layout, NormShape
from tests.tvm_kernels.norms import images
from tests.tvm_kernels.standin import NormStandIn, norm_record

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
    yield NormStandIn(monkeypatch)
    use_choices(before)


def block() -> nn.Module:
    return Block().to(memory_format=torch.channels_last)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Result, gradients and buffers."""
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), *model.buffers()]


def records(*shapes: NormShape, **fields: object) -> Database:
    return Database("the test's", [norm_record(shape, **fields) for shape in shapes])


def test_a_norm_runs_fused_where_its_record_says_so_alone(norms: NormStandIn) -> None:
    model, x = block(), images(2, 3, 9, 9)
    right = step(copy.deepcopy(model), x)
    assert optimize(model, records(FIRST)) is model
    for one, two in zip(step(model, x), right, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert norms.calls == {"forward": {FIRST: 1}, "backward": {FIRST: 1}}


@pytest.mark.parametrize("fields", [{"ms": 3.0}, {"threads": 2}, {"device": "another CPU"}, {"rows": 99}])
def test_without_a_record_that_wins_it_is_torch(norms: NormStandIn, fields: dict[str, object]) -> None:
    model, x = block(), images(2, 3, 9, 9)
    right = step(copy.deepcopy(model), x)
    optimize(model, records(FIRST, SECOND, **fields))
    for one, two in zip(step(model, x), right, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    assert not norms.calls["forward"]


def test_a_partial_batch_is_another_shape(norms: NormStandIn) -> None:
    model = optimize(block(), records(FIRST, SECOND))
    step(model, images(1, 3, 9, 9))
    assert not norms.calls["forward"]
    step(model, images(2, 3, 9, 9))
    assert norms.calls["forward"] == {FIRST: 1, SECOND: 1}


def test_where_kernels_cannot_it_is_torch(norms: NormStandIn) -> None:
    model = optimize(block(), records(FIRST, SECOND))
    model(torch.randn(2, 3, 9, 9, dtype=torch.float64).to(torch.float32).contiguous())  # the convolutions turn it
    count = norms.calls["forward"].total()
    model.to(memory_format=torch.contiguous_format)
    model(torch.randn(2, 3, 9, 9))
    model.double()(torch.randn(2, 3, 9, 9, dtype=torch.float64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.float()(images(2, 3, 9, 9))
    assert norms.calls["forward"].total() == count


def test_evaluation_and_frozen_statistics(norms: NormStandIn) -> None:
    model, x = block(), images(2, 3, 9, 9)
    step(model, x)
    for freeze in (lambda one: one.eval(), lambda one: one.train().norm.eval()):
        freeze(model)
        right = step(copy.deepcopy(model), x)
        other = optimize(copy.deepcopy(model), records(FIRST, SECOND))
        for one, two in zip(step(other, x), right, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert norms.calls["backward"] == {FIRST: 2, SECOND: 2}


def test_a_second_derivative_is_refused_by_name(norms: NormStandIn) -> None:
    model, x = optimize(block(), records(FIRST)), images(2, 3, 9, 9).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    with pytest.raises(SecondDerivativeError, match="batch_norm_act has no second derivative"):
        gradient.sum().backward()


def test_everything_stays_and_everything_comes_back(norms: NormStandIn) -> None:
    model = block()
    calls: list[str] = []
    model.stem.register_forward_hook(lambda *_: calls.append("hook"))
    classes = [type(module) for module in model.modules()]
    own = [set(vars(module)) for module in model.modules()]
    before = {name: (id(one), one.data_ptr()) for name, one in model.named_parameters()}
    state, fingerprint, text = model.state_dict(), model_fingerprint(model), repr(model)
    optimize(model, records(FIRST))
    optimize(model, records(FIRST, SECOND))
    assert fused_norms(model) == {"stem.1": "silu", "norm": "none"}
    assert {name: (id(one), one.data_ptr()) for name, one in model.named_parameters()} == before
    assert list(model.state_dict()) == list(state)
    assert model_fingerprint(model) == fingerprint
    assert repr(model).replace("DepthwiseConv2d", "Conv2d") == text
    model.load_state_dict(state)
    model(images(2, 3, 9, 9))
    assert calls == ["hook"]
    assert norms.calls["forward"] == {FIRST: 1, SECOND: 1}, "the records of the last call count"
    assert restore(restore(model)) is model
    assert [type(module) for module in model.modules()] == classes
    assert [set(vars(module)) for module in model.modules()] == own


def test_a_hook_that_would_see_what_is_no_more_keeps_its_layers(norms: NormStandIn) -> None:
    seen: list[Tensor] = []
    model, x = block(), images(2, 3, 9, 9)
    hook = model.stem[1].register_forward_hook(lambda _, __, output: seen.append(output.clone()))
    right = step(copy.deepcopy(model), x)
    optimize(model, records(FIRST, SECOND, NormShape(FIRST.rows, 8, "none")))
    for one, two in zip(step(model, x), right, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*seen)
    hook.remove()
    around = nn.Sequential(nn.Sequential(nn.BatchNorm2d(8)), nn.ReLU())
    around[0].register_forward_hook(lambda *_: None)
    assert fused_norms(optimize(around, Database())) == {"0.0": "none"}


def test_a_swapped_model_can_be_saved_as_what_it_was(norms: NormStandIn) -> None:
    model, x = optimize(block(), records(FIRST, SECOND)).eval(), images(2, 3, 9, 9)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert not fused_norms(loaded)
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)


def test_before_and_after_a_partition(norms: NormStandIn) -> None:
    x = images(2, 3, 9, 9)
    graphs = [trace_model(model, (x,)).graph for model in (block(), optimize(block(), records(FIRST)))]
    names = [[(node.op, node.name, node.target) for node in graph.nodes] for graph in graphs]
    assert names[0] == names[1]
    model = block()
    stage = fx.GraphModule(model, trace_model(model, (x,)).graph)
    right = step(copy.deepcopy(model), x)
    optimize(model, records(FIRST, SECOND))
    norms.calls["backward"].clear()  # tracing has compared the graph with the model
    for one, two in zip(step(stage, x), right, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert norms.calls["backward"] == {FIRST: 1, SECOND: 1}
    alone = fx.GraphModule(block(), trace_model(block(), (x,)).graph)
    assert set(fused_norms(optimize(alone, records(FIRST)))) == {"stem.1", "norm"}


def test_pooled_statistics_of_fused_norms(norms: NormStandIn) -> None:
    plain = block()
    fused = optimize(copy.deepcopy(plain), records(FIRST, SECOND))
    batches = [images(2, 3, 9, 9) for _ in range(3)]
    for model in (plain, fused):
        pool = BatchNormPool(model)
        assert len(pool.layers) == 2
        for batch in batches:
            model(batch).square().mean().backward()
            pool.fold()
        pool.commit(pool.sums)
        pool.release()
    assert norms.calls["backward"] == {FIRST: 3, SECOND: 3}
    for one, two in zip(plain.buffers(), fused.buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------- what there is to be tuned


@pytest.mark.parametrize("optimized", [False, True])
def test_norms_are_found_beside_convolutions(norms: NormStandIn, optimized: bool) -> None:
    model = block()
    if optimized:
        optimize(model, Database())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    convolutions, found = tunable_layers(model, (2, 3, 9, 9))
    assert [layer.name for layer in convolutions] == ["depthwise"]
    assert found == [
        NormLayer("stem.1", FIRST, Layout.CHANNELS_LAST),
        NormLayer("norm", SECOND, Layout.CHANNELS_LAST, "depthwise"),
    ]
    (pair,) = conv_norm_shapes(convolutions, found)
    assert pair == (convolutions[0], ConvNormShape(convolutions[0].shape, SECOND.act))
    assert pair[1].norm == SECOND
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not norms.calls["forward"], "nothing was computed"
    _, found = tunable_layers(model.to(memory_format=torch.contiguous_format), (2, 3, 9, 9), layout=Layout.CONTIGUOUS)
    assert {layer.layout for layer in found} == {Layout.CONTIGUOUS}


def test_strict_is_no_obstacle_to_looking(norms: NormStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "strict")
    assert len(tunable_layers(optimize(block(), Database()), (2, 3, 9, 9))[1]) == 2


def test_nobody_waits_for_kernels_that_nobody_wants(norms: NormStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_kernels, "table", lambda: pytest.fail("kernels were loaded"))
    for database in (Database(), records(FIRST, SECOND, ms=3.0)):
        step(optimize(block(), database), images(2, 3, 9, 9))
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "off")
    step(optimize(block(), records(FIRST, SECOND)), images(2, 3, 9, 9))
