from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
import torchvision
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks.partition.check import compare_split, random_convex_stages, reference_step
from benchmarks.partition.models import SWEEP, sweep_model
from hybridpar.comm.world import World
from hybridpar.errors import PartitionError, TraceError
from hybridpar.partition.split import split_model
from hybridpar.partition.stage import run_stages
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import ModelUnits, find_units
from tests.partition.nets import (
    CASES,
    IMAGES,
    Boxed,
    ChangesInEvaluation,
    ChangesInput,
    Residual,
    SeenChange,
    Shared,
    Views,
)
from tests.partition.random_nets import WIDTH, RandomNet, Step, random_nets
from tests.ranks import run_ranks


def units_of(model: torch.nn.Module, example: torch.Tensor) -> ModelUnits:
    return find_units(trace_model(model, [example]), [example])


@pytest.mark.parametrize("name", CASES)
def test_any_cut_of_a_hard_model_trains_as_the_whole(name: str) -> None:
    make, shape = CASES[name]
    model, example = make(), torch.randn(*shape)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    units = units_of(model, example)
    reference = reference_step(model, example)
    for stages in range(1, min(len(units.graph), 5) + 1):
        for seed in range(4):
            cut = random_convex_stages(units.graph, stages, random.Random(seed))
            difference = compare_split(units, cut, example, reference)
            assert difference.is_equal, (cut, difference)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@given(random_nets(), st.data())
@settings(max_examples=60, deadline=None)
def test_any_cut_of_any_model_trains_as_the_whole(model: RandomNet, data: st.DataObject) -> None:
    example = torch.randn(3, WIDTH, dtype=torch.float64)
    try:
        reference = reference_step(model, example)
    except RuntimeError:  # it changes in place what autograd needs: it cannot be trained uncut either
        reject()
    units = units_of(model, example)
    stages = data.draw(st.integers(1, min(len(units.graph), 5)))
    cut = random_convex_stages(units.graph, stages, random.Random(data.draw(st.integers(0, 9))))
    difference = compare_split(units, cut, example, reference)
    assert difference.is_equal, (cut, difference)


def test_a_value_that_is_changed_twice_under_one_name_is_each_time_the_one_before() -> None:
    steps = [
        *(Step("linear", 0, 0), Step("change", 1, 0), Step("linear", 0, 0), Step("linear", 0, 0)),
        *(Step("linear", 0, 2), Step("change", 1, 0), Step("linear", 0, 0)),
    ]
    torch.manual_seed(0)
    model, example = RandomNet(steps).double(), torch.randn(3, WIDTH, dtype=torch.float64)
    units, reference = units_of(model, example), reference_step(model, example)
    for stages in range(1, 6):
        for seed in range(10):
            cut = random_convex_stages(units.graph, stages, random.Random(seed))
            difference = compare_split(units, cut, example, reference)
            assert difference.is_equal, (cut, difference)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SWEEP)
def test_many_cuts_of_many_models(name: str) -> None:
    model, example = sweep_model(name)
    units, reference = units_of(model, example), reference_step(model, example)
    for stages in range(2, 9):
        for seed in range(10):
            cut = random_convex_stages(units.graph, stages, random.Random(1000 * stages + seed))
            assert compare_split(units, cut, example, reference, load=seed == 0).is_equal


def test_what_shares_state_stays_together() -> None:
    units = units_of(Shared(), torch.randn(5, 6))
    home = {node.name: index for index, nodes in enumerate(units.nodes) for node in nodes}
    assert home["mul"] == home["mul_1"], "both use the parameter `scale`"
    assert home["twice"] == home["twice_1"] or "alias" in home
    assert len(units.graph) >= 2


def test_what_aliases_a_changed_view_stays_together() -> None:
    units = units_of(Views(), torch.randn(5, 6))
    home = {node.name: index for index, nodes in enumerate(units.nodes) for node in nodes}
    assert home["getitem"] == home["mul_"] == home["add"] == home["last"]
    assert home["first"] != home["last"]


def test_what_reads_before_a_change_that_the_output_shows_stays_with_it() -> None:
    units = units_of(SeenChange(), torch.randn(5, 6))
    home = {node.name: index for index, nodes in enumerate(units.nodes) for node in nodes}
    assert home["add"] == home["mul"] == home["getitem"] == home["add_"]
    assert home["early"] != home["add"]


def test_what_cannot_be_sent_stays_with_its_users() -> None:
    units = units_of(Boxed(), torch.randn(5, 6))
    home = {node.name: index for index, nodes in enumerate(units.nodes) for node in nodes}
    assert home["boxing"] == home["unboxing"]
    assert home["item"] == home["mul"]
    assert home["first"] != home["boxing"]


def test_an_input_changed_through_a_view_is_refused() -> None:
    with pytest.raises(TraceError, match="changes its input 'x' in place") as caught:
        units_of(ChangesInput(), torch.randn(5, 6))
    assert "x.clone()" in caught.value.fix


def test_a_change_that_only_evaluation_makes_is_not_torn_apart() -> None:
    units = units_of(ChangesInEvaluation(), torch.randn(5, 6))
    with pytest.raises(PartitionError, match="in evaluation mul_ and last share memory"):
        split_model(units, [0, 1])


def test_in_place_work_stays_in_place_inside_a_stage_and_is_copied_at_a_border() -> None:
    units = units_of(Residual(), torch.randn(*IMAGES))
    whole = split_model(units, [0] * len(units.graph))[0]
    assert "clone" not in whole.code
    names = [unit.name for unit in units.graph.units]
    parts = split_model(units, [int(index >= names.index("relu")) for index in range(len(names))])
    assert parts[1].code.count(".clone()") == 1
    assert "clone" not in parts[0].code


def test_stages_are_the_models_own_modules() -> None:
    model, example = torchvision.models.resnet18(), torch.randn(2, 3, 32, 32)
    units = units_of(model, example)
    stages = split_model(units, random_convex_stages(units.graph, 3, random.Random(0)))
    held = {name: value for stage in stages for name, value in stage.named_parameters()}
    assert all(held[name] is value for name, value in model.named_parameters())
    assert sum(len(list(stage.parameters())) for stage in stages) == len(list(model.parameters()))


def test_a_relayed_stage_takes_what_the_one_before_returns() -> None:
    model, example = torchvision.models.densenet121(), torch.randn(2, 3, 64, 64)
    units = units_of(model, example)
    stages = split_model(units, random_convex_stages(units.graph, 4, random.Random(3)), relay=True)
    for before, after in itertools.pairwise(stages):
        assert [item.name for item in before.outputs] == [item.name for item in after.inputs]
    model.eval()
    value: tuple[torch.Tensor, ...] = (example,)
    with torch.no_grad():
        for stage in stages:
            result = stage.eval()(*value)
            value = result
        assert torch.equal(result, model(example))


def test_a_copied_stage_is_independent() -> None:
    model, example = Residual(), torch.randn(*IMAGES)
    units = units_of(model, example)
    stages = split_model(units, random_convex_stages(units.graph, 2, random.Random(0)))
    twins = [copy.deepcopy(stage) for stage in stages]
    model.eval()
    expected = run_stages([stage.eval() for stage in stages], example)
    assert torch.equal(run_stages([twin.eval() for twin in twins], example), expected)
    with torch.no_grad():
        for twin in twins:
            for parameter in twin.parameters():
                parameter.zero_()
    assert torch.equal(run_stages(stages, example), expected)
    assert [twin.inputs for twin in twins] == [stage.inputs for stage in stages]


def test_wrong_assignments_are_refused() -> None:
    units = units_of(Residual(), torch.randn(*IMAGES))
    count = len(units.graph)
    with pytest.raises(PartitionError, match="needs"):
        split_model(units, [1] + [0] * (count - 1))
    with pytest.raises(PartitionError, match="stage 1 is empty"):
        split_model(units, [0] * (count - 1) + [2])
    with pytest.raises(PartitionError, match="units are assigned"):
        split_model(units, [0])


def _pipeline_rank(world: World) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, example = Residual(), torch.randn(4, 3, 8, 8)
    units = units_of(model, example[:2])
    stages = split_model(units, random_convex_stages(units.graph, 2, random.Random(2)), relay=True)
    stage = PipelineStage(stages[world.rank], world.rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.cross_entropy)
    target = torch.tensor([0, 1, 2, 3])
    if world.rank == 0:
        schedule.step(example)
    else:
        schedule.step(target=target)
    return {name: value.grad for name, value in stages[world.rank].named_parameters()}


def test_relayed_stages_run_in_torchs_own_pipeline() -> None:
    first, second = run_ranks(_pipeline_rank, 2)
    torch.manual_seed(0)
    model, example = Residual(), torch.randn(4, 3, 8, 8)
    for part, target in zip(example.split(2), torch.tensor([0, 1, 2, 3]).split(2), strict=True):
        (torch.nn.functional.cross_entropy(model(part), target) / 2).backward()
    found = {**first, **second}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-6, atol=1e-7)


class MakesBuffer(nn.Module):
    """Kept whole, as its first pass registers a buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", x.detach().abs().mean() + 1)
        return x / self.scale


class Skipping(nn.Module):
    """In evaluation what is kept whole needs nothing of the layer that is before it in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.last = nn.Linear(4, 4), MakesBuffer(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(self.late(y) if self.training else self.late(x) + y)


def test_what_is_kept_whole_stays_in_its_stage_in_evaluation() -> None:
    model, x = Skipping(), torch.ones(2, 4)
    units = find_units(trace_model(model, [x]), [x])
    stages = split_model(units, [int("first" not in unit.name) for unit in units.graph.units])
    assert [any(one is model.late for one in stage.modules()) for stage in stages] == [False, True]
