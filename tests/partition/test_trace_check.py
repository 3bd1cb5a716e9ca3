from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.partition.dry_run import StageRunner
from hybridpar.errors import TraceError
from hybridpar.partition.planning import partition_model
from hybridpar.partition.split import split_model
from hybridpar.partition.stage import run_stages
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import find_units
from tests.models.test_state import restless, snapshot
from tests.partition import hidden_nets as nets
from tests.partition.nets import ROWS

#: Bodies that are in the graph as they are, also where they are the model's own code.
RECORDED = (nets.Reversed, nets.StraightThrough, nets.NoGrad, nets.Decorated, nets.GradSwitch)

#: Bodies that are kept as a sub-module, and what the model is told that has such code itself.
WHOLE = {
    nets.Autocast: "runs under autocast",
    nets.IsTensor: "would not compute the same",
    nets.AsksIsTensor: "would not compute the same",
    nets.PythonRandom: "random numbers of Python or NumPy",
    nets.LayerDrop: "random numbers of Python or NumPy",
    nets.NumpyRandom: "random numbers of Python or NumPy",
    nets.OwnGenerator: "attribute 'numbers'",
    nets.Counting: "attribute 'steps'",
    nets.WarmingUp: "attribute 'steps'",
    nets.Remembering: "attribute 'before'",
    nets.ForwardHook: "hook",
    nets.BackwardHook: "hook",
}


def seed_all() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def step_of(model: nn.Module, batches: list[Tensor], stages: int) -> list[Any]:
    """Outputs, gradients and buffers of a few steps; with stages, cut into as many as that and run as a pipeline."""
    units = find_units(trace_model(model, [batches[0]]), [batches[0]]) if stages else None
    cut = []
    if units is not None:
        count = len(units.graph)
        cut = split_model(units, [index * min(stages, count) // count for index in range(count)])
    seed_all()
    results: list[Any] = []
    for batch in batches:
        if cut:
            runner = StageRunner(cut)
            runner.start(batch)
            outputs = [runner.forward(index) for index in range(len(cut))]
            for index in reversed(range(len(cut))):
                runner.backward(index, outputs[-1].square().sum() if index == len(cut) - 1 else None)
            output = outputs[-1]
        else:
            output = model(batch)
            output.square().sum().backward()
        results.append(output.detach().clone())
    results += [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    results += [one.clone() for one in model.buffers()]
    with torch.no_grad():
        results.append(run_stages([stage.eval() for stage in cut], batches[0]) if cut else model.eval()(batches[0]))
    return results


def assert_trains_as_the_whole(model: nn.Module) -> None:
    batches = [torch.randn(*ROWS) for _ in range(3)]
    wanted = step_of(copy.deepcopy(model), batches, 0)
    found = step_of(model, batches, 3)
    assert len(wanted) == len(found)
    for one, other in zip(wanted, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("body", RECORDED)
def test_custom_functions_and_no_grad_blocks_are_in_the_graph(body: Any) -> None:
    for model in (nets.Within(body), nets.itself(body)):
        assert trace_model(model, [torch.randn(*ROWS)]).leaves == ()
        assert_trains_as_the_whole(model)


@pytest.mark.parametrize("body", WHOLE)
def test_what_a_graph_does_not_have_is_kept_in_a_sub_module(body: Any) -> None:
    model = nets.Within(body)
    assert trace_model(model, [torch.randn(*ROWS)]).leaves == ("blocks.0", "blocks.1")
    assert_trains_as_the_whole(model)


@pytest.mark.parametrize("body", WHOLE)
def test_what_a_graph_does_not_have_is_refused_in_the_model_itself(body: Any) -> None:
    with pytest.raises(TraceError, match=rf"(?s){body.__name__}.*({WHOLE[body]})"):
        trace_model(nets.itself(body), [torch.randn(*ROWS)])


#: What is not seen without values, and so in the graph of a model on the meta device.
UNSEEN = (nets.IsTensor, nets.AsksIsTensor)


@pytest.mark.parametrize("body", [*RECORDED, *(body for body in WHOLE if body not in UNSEEN)])
def test_without_memory_all_is_kept_whole_that_a_graph_may_not_have(body: Any) -> None:
    model, examples = nets.Within(body).to("meta"), [torch.randn(*ROWS)]
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    assert trace_model(model, examples).leaves == (() if body in RECORDED else ("blocks.0", "blocks.1"))
    after = {path: dict(vars(module)) for path, module in model.named_modules()}
    assert before.keys() == after.keys()
    assert all(one.is_meta for one in (*model.parameters(), *model.buffers()))
    if body not in RECORDED:
        with pytest.raises(TraceError, match=body.__name__):
            trace_model(nets.itself(body).to("meta"), examples)


def test_a_parameter_with_new_memory_in_every_pass_is_refused_or_whole() -> None:
    model = nets.Within(nets.Renormed)
    weight = model.blocks[0].linear.weight
    before = weight.clone(), weight.data_ptr()
    with pytest.raises(TraceError, match="Renormed"):
        trace_model(nets.itself(nets.Renormed), [torch.randn(*ROWS)])
    assert trace_model(model, [torch.randn(*ROWS)]).leaves == ("blocks.0", "blocks.1")
    assert torch.equal(weight, before[0])
    assert weight.data_ptr() == before[1]


@pytest.mark.parametrize("body", [nets.Checkpointed, nets.OldCheckpointed, nets.CheckpointedDropout])
def test_a_checkpoint_whose_second_pass_counts_is_refused(body: Any) -> None:
    with pytest.raises(TraceError, match=r"'blocks\.0' .*checkpoint") as caught:
        trace_model(nets.Within(body), [torch.randn(*ROWS)])
    assert "--recompute" in caught.value.fix
    with pytest.raises(TraceError, match=r"forward of .* itself uses torch\.utils\.checkpoint"):
        trace_model(nets.itself(body), [torch.randn(*ROWS)])


class ShapeBranch(nets.Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.shape[0] > 4 else x


def test_a_branch_on_a_shape_is_not_said_to_depend_on_data() -> None:
    body = ShapeBranch
    with pytest.raises(TraceError, match=body.__name__) as caught:
        trace_model(nets.itself(body), [torch.randn(*ROWS)])
    assert "data" not in caught.value.why
    assert "a tensor's shape or type" in caught.value.why
    assert_trains_as_the_whole(nets.Within(body))


def test_a_partition_leaves_the_model_as_it_was() -> None:
    model, example = restless(), torch.randn(*ROWS)
    before = snapshot(model)
    made = partition_model(model, example, 2, passes=2)
    assert snapshot(model) == before
    assert made.units.traced.leaves == ("1",)
    with pytest.raises(TraceError, match="Restless"):
        partition_model(model[1], example, 1)
    assert snapshot(model) == before


class Follower(nn.Module):
    """A frozen copy that follows a layer in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.copy = copy.deepcopy(self.layer).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.copy.weight.lerp_(self.layer.weight, 0.1)
        return self.layer(x) - self.copy(x)


def test_a_parameter_that_forward_changes_is_refused_and_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Follower())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TraceError, match=r"'1\.copy\.weight'.* 1\.copy \(Linear\)"):
        trace_model(model, [torch.randn(*ROWS)])
    assert all(one.is_leaf and torch.equal(one, before[name]) for name, one in model.named_parameters())
    with pytest.raises(TraceError, match=r"'1\.copy\.weight'"):
        trace_model(model.to("meta"), [torch.randn(*ROWS)])


def test_a_cache_that_the_first_pass_fills_is_no_counter() -> None:
    class Lazy(nets.Body):
        def __init__(self) -> None:
            super().__init__()
            self.size: int | None = None
            self.seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.size = x.shape[1]
            self.seen = x.detach()
            return self.linear(x)

    traced = trace_model(nets.itself(Lazy), [torch.randn(*ROWS)])
    assert (traced.leaves, traced.constants) == ((), {})


calls = {"count": 0}


def count_calls(x: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Differs from call to call, in a way that nothing can put back."""
    calls["count"] += 1
    return x.detach() * (1e-4 * calls["count"] if x.dtype in dtypes else 0.0)


torch.fx.wrap("count_calls")


def test_where_results_differ_by_little_float64_decides() -> None:
    class Rounding(nets.Body):
        dtypes: tuple[torch.dtype, ...] = (torch.float32,)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + count_calls(x, self.dtypes)

    class Different(Rounding):
        dtypes = (torch.float32, torch.float64)

    assert trace_model(nets.Within(Rounding), [torch.randn(*ROWS)]).leaves == ()
    with pytest.raises(TraceError, match="would not compute the same"):
        trace_model(nets.Within(Different), [torch.randn(*ROWS)])


def test_a_model_that_takes_only_what_it_is_given_is_compared_on_that() -> None:
    class Picky(nets.Body):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.view(5, 6).sqrt())

    class Careful(nets.Within):
        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(x, torch.fx.Proxy) and (x.shape[0] != 5 or bool((x < 0).any())):
                raise ValueError("five positive samples")
            return super().forward(x)

    assert trace_model(Careful(Picky), [torch.rand(*ROWS)]).leaves == ()
    with pytest.raises(TraceError, match="Counting"):
        trace_model(nets.itself(nets.Counting), [torch.rand(*ROWS)])


class Scaled(nn.Module):
    """Multiplies by a tensor that it holds in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("buffer", torch.ones(12))
        self.held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.scale())

    def scale(self) -> Tensor:
        scale: Tensor = self.held[0]
        return scale


class InNamespace(Scaled):
    def scale(self) -> Tensor:
        scale: Tensor = self.held.scale
        return scale


@pytest.mark.parametrize("holder", ["list", "view", "namespace"])
def test_stages_compute_with_tensors_that_the_model_holds_in_containers(holder: str) -> None:
    model, x = InNamespace() if holder == "namespace" else Scaled(), torch.randn(*ROWS)
    scale = model.get_buffer("buffer")[:6] if holder == "view" else torch.ones(6)
    model.held = SimpleNamespace(scale=scale) if holder == "namespace" else [scale]
    stages = partition_model(model, x, 2, measure=False).stages
    (model.get_buffer("buffer") if holder == "view" else scale).fill_(5)
    assert torch.equal(run_stages(stages, x), model(x))
    scale.requires_grad_(True)
    run_stages(stages, x).sum().backward()
    assert scale.grad is not None
