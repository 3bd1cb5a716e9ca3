"""Each parameter, and each buffer that changes, is in one stage; who only asks for its type or shape has a constant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.partition.check import compare_split, reference_step
from hybridpar.errors import PartitionError, TraceError
from hybridpar.models.deferred import DeferredModel
from hybridpar.partition.split import split_model
from hybridpar.partition.stage import Stage, run_stages
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import ModelUnits, find_units


class Net(nn.Module):
    """Four layers; `ask` is called before the first with the parameter of the last, `ask_back` the other way round."""

    def __init__(self, ask: Callable[..., Tensor] | None = None, ask_back: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.probe = nn.Parameter(torch.empty(0))  # is asked, and never used
        self.ask, self.ask_back = ask, ask_back

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.probe.device)
        x = x if self.ask is None else self.ask(x, self.head.weight)
        x = self.c(self.b(self.a(x).relu()).relu()).relu()
        return self.head(x if self.ask_back is None else self.ask_back(x, self.a.weight))


QUESTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dtype": lambda x, w: x.to(w.dtype),
    "device": lambda x, w: x.to(w.device),
    "device and dtype": lambda x, w: x.to(device=w.device, dtype=w.dtype),
    "shape": lambda x, w: x / w.shape[0],
    "size": lambda x, w: x / w.size(0) + w.size(dim=1),
    "whole size": lambda x, w: x + x.new_ones(w.size())[0, 0] + x.new_zeros(w.shape).sum() + w.shape.numel(),
    "numel": lambda x, w: x * (w.numel() / 100),
    "ndim": lambda x, w: x * w.ndim + w.dim() + w.stride()[0] + w.element_size(),
    "with the input's": lambda x, w: x * (w.shape[0] / x.shape[1]),
    "where it lies": lambda x, w: x * w.get_device() + torch.mul(x, w.is_cuda),
    "a size by number": lambda x, w: x * w.size(x.dim() - 1),
    "type_as": lambda x, w: x.type_as(w),
    "requires_grad": lambda x, w: torch.mul(x, w.requires_grad),
    "values": lambda x, w: x + w.mean(),
}
APART = QUESTIONS.keys() - {"a size by number", "type_as", "requires_grad", "values"}


def stages_of(model: nn.Module, shape: tuple[int, ...] = (4, 12)) -> tuple[ModelUnits, list[Stage]]:
    """The model in as many stages as it has units."""
    example = torch.randn(*shape)
    units = find_units(trace_model(model, [example]), [example])
    return units, split_model(units, range(len(units.graph)))


def require_one_owner(model: nn.Module, stages: list[Stage]) -> None:
    held = Counter(name for stage in stages for name, _ in stage.named_parameters(remove_duplicate=False))
    assert held == Counter(name for name, _ in model.named_parameters(remove_duplicate=False))
    homes = Counter(one for stage in stages for one in {id(parameter) for parameter in stage.parameters()})
    assert set(homes.values()) == {1}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("back", [False, True])
def test_a_stage_asks_anothers_parameter(question: str, back: bool) -> None:
    ask = QUESTIONS[question]
    model, example = Net(None, ask) if back else Net(ask), torch.randn(4, 12)
    units, stages = stages_of(model)
    require_one_owner(model, stages)
    if question in APART:
        assert len(units.graph) > 6
    cut = list(range(len(units.graph)))
    assert compare_split(units, cut, example, reference_step(model, example)).is_equal


class Tied(Net):
    """The values of one layer are used in another place, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        if way == "one parameter":
            self.c.weight = self.b.weight
        elif way == "one memory":
            self.c.weight = nn.Parameter(self.b.weight.data)
        elif way == "a flat vector":
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(self.parameters()), self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).relu()).relu()
        if self.way == "a function":
            x = linear(x, self.b.weight).relu()
        return self.head(self.c(x).relu())


@pytest.mark.parametrize("way", ["one parameter", "one memory", "a function", "a flat vector"])
def test_what_uses_one_parameters_values_is_in_one_stage(way: str) -> None:
    model, example = Tied(way), torch.randn(4, 12)
    units, stages = stages_of(model)
    require_one_owner(model, stages)
    apart = len({stage.index for stage in stages for name, _ in stage.named_parameters() if name[0] in "bc"})
    assert apart == (1 if way.startswith("one") else 2)
    assert len(stages) > 2
    assert compare_split(units, list(range(len(stages))), example, reference_step(model, example)).is_equal


class Statistics(Net):
    """Reads a buffer early that a later layer, or its own forward, changes."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("seen", torch.zeros(16))
        self.register_buffer("scale", torch.full((16,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        if self.way == "of a layer":
            x = x - self.norm.running_mean
        elif self.way == "in place" or (self.way == "in evaluation" and not self.training):
            x = x - self.seen
        elif self.way == "a constant":
            x = x * self.scale
        x = self.norm(self.b(x).relu())
        if self.training and self.way in ("in place", "in evaluation"):
            self.seen.lerp_(x.detach().mean(0), 0.1)
        if self.way == "a constant":
            x = x * self.scale
        return self.head(self.c(x).relu())


@pytest.mark.parametrize("way", ["of a layer", "in place", "a constant"])
def test_a_buffer_that_changes_is_read_where_it_changes(way: str) -> None:
    model, example = Statistics(way), torch.randn(4, 12)
    units, stages = stages_of(model)
    require_one_owner(model, stages)
    holders = Counter(name for stage in stages for name, _ in stage.named_buffers())
    assert holders.pop("scale") == (2 if way == "a constant" else 1)
    assert set(holders.values()) == {1}
    assert compare_split(units, list(range(len(stages))), example, reference_step(model, example)).is_equal


def test_evaluation_that_reads_a_buffer_before_training_changes_it_is_refused() -> None:
    with pytest.raises(PartitionError, match="in training, but evaluation needs it in stage"):
        stages_of(Statistics("in evaluation"))


class Heads(Net):
    """Only evaluation uses `c`: in one place, or in two."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        if not self.training:
            x = self.c(x)
        x = self.b(x)
        return self.head(x if self.training or self.places == 1 else self.c(x))


def test_a_layer_that_only_evaluation_uses_is_in_one_stage() -> None:
    model = Heads(1)
    _, stages = stages_of(model)
    require_one_owner(model, stages)
    with pytest.raises(PartitionError, match="in evaluation c and c_1 share memory and would be in several stages"):
        stages_of(Heads(2))


@pytest.mark.parametrize("question", sorted(APART))
def test_models_on_the_meta_device(question: str) -> None:
    ask, example = QUESTIONS[question], torch.randn(4, 12)
    deferred = DeferredModel(lambda: Net(ask, ask))
    units = find_units(trace_model(deferred.module, [example]), [example])
    stages = split_model(units, range(len(units.graph)))
    require_one_owner(deferred.module, stages)
    deferred.fill([name for name, _ in deferred.module.named_parameters()], example.device)
    assert torch.equal(run_stages(stages, example), Net(ask, ask)(example))


class Window(nn.Module):
    """A product with a part of a buffer, which is no node of a graph unless the module is kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.window[:12]


class Leaf(Window):
    fx_leaf = True


def test_a_model_on_the_meta_device_may_ask_for_its_device() -> None:
    def ask(x: Tensor, w: Tensor) -> Tensor:
        return x.to(next(deferred.module.parameters()).device)

    deferred = DeferredModel(lambda: Net(ask))
    example = torch.randn(4, 12)
    traced = trace_model(deferred.module, [example])
    assert "meta" not in str(traced.graph)


def test_values_that_a_model_on_the_meta_device_does_not_have_are_refused() -> None:
    example = [torch.randn(4, 12)]
    with pytest.raises(TraceError, match="values of its own while it is traced on the meta device"):
        trace_model(DeferredModel(lambda: nn.Sequential(Window(), nn.Linear(12, 3))).module, example)
    assert trace_model(DeferredModel(lambda: nn.Sequential(Leaf(), nn.Linear(12, 3))).module, example).constants == {}


class Number(Net):
    """Uses a number made of another, which the graph has from a tensor's values, in a later stage."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.abs().max().item() * 2
        return self.head(self.c(self.b(self.a(x)))) * size


def test_a_number_made_of_values_stays_with_who_uses_what_is_made_of_it() -> None:
    model, example = Number(), torch.randn(4, 12)
    units, _ = stages_of(model)
    cut = list(range(len(units.graph)))
    assert compare_split(units, cut, example, reference_step(model, example)).is_equal


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls / 10)


class CountsEarlier(nn.Module):
    """In evaluation what counts could run before the layers, which it follows in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.counts = nn.Linear(4, 4), nn.Linear(4, 4), Counts()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return self.counts(y) if self.training else y + self.counts(x)


def test_what_counts_is_in_one_stage_in_training_and_evaluation():
    _, stages = stages_of(CountsEarlier(), (2, 4))
    for training in (True, False):
        for stage in stages:
            stage.use_graph(training)
        calls = [[str(node.target) for node in stage.graph.nodes if node.op == "call_module"] for stage in stages]
        assert calls == [["a"], ["b"], ["counts"]]
