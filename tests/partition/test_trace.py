from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from torch import nn

from hybridpar.errors import TraceError, UsageError
from hybridpar.partition.split import split_model
from hybridpar.partition.stage import run_stages
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import find_units
from tests.partition.nets import ROWS, Branching, Buffers, Containers, Defaults, Modes


def test_ordinary_models_are_traced_as_they_are() -> None:
    traced = trace_model(torchvision.models.resnet18(), [torch.randn(2, 3, 32, 32)])
    assert (traced.leaves, traced.eval_graph) == ((), None)


def test_a_sub_module_that_cannot_be_traced_is_kept_whole() -> None:
    traced = trace_model(Containers(), [torch.randn(*ROWS)])
    assert set(traced.leaves) == {"nested", "join"}


def test_what_only_training_cannot_trace_is_whole_in_evaluation_too() -> None:
    class Norm(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.num_batches_tracked.add_(1)
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, self.training
            )

    traced = trace_model(nn.Sequential(nn.Linear(6, 6), Norm(6)), [torch.randn(*ROWS)])
    assert (traced.leaves, traced.eval_graph) == (("1",), None)


class Counting(nn.Module):
    """Counts its forward passes in a buffer, in one of the ways in which people do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(6, 6), way
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "in place":
            self.passes.add_(1)
        elif self.way == "operator":
            self.passes += 1
        elif self.way == "out":
            torch.add(self.passes, 1, out=self.passes)
        elif self.way == "view":
            self.passes.view(1)[0] = self.passes + 1
        elif self.way == "list":
            torch._foreach_add_([self.passes], 1.0)
        elif self.way == "replaced":
            self.passes = self.passes + 1
        else:  # first on the buffer alone, then on what is traced
            self.passes.mul_(1).add_(x.detach().mean() * 0 + 1)
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return self.linear(x)


@pytest.mark.parametrize("way", ["in place", "operator", "out", "view", "list", "replaced", "half traced"])
def test_a_counter_in_a_buffer_counts_forward_passes_and_not_traces(way: str) -> None:
    model, example = nn.Sequential(nn.Linear(6, 6), Counting(way), nn.Linear(6, 2)), torch.randn(*ROWS)
    units = find_units(trace_model(model, [example]), [example])
    assert units.traced.leaves == ("1",)
    assert model[1].passes == 0
    assert torch.equal(model[1].mean, torch.zeros(6)), "a tensor, and the one it was"
    stages = split_model(units, [0, 1, 1])
    twin = copy.deepcopy(model)
    for passes in (1, 2, 3):
        assert torch.equal(run_stages(stages, example), twin(example))
        assert model[1].passes == passes
        assert torch.equal(model[1].mean, twin[1].mean)


@pytest.mark.parametrize("way", ["in place", "replaced"])
def test_a_counter_that_only_the_model_itself_could_keep_is_refused(way: str) -> None:
    model = Counting(way)
    with pytest.raises(TraceError, match=r"Counting, line .*self\.passes") as caught:
        trace_model(model, [torch.randn(*ROWS)])
    assert "passes" in caught.value.why
    assert "sub-module of its own" in caught.value.fix
    assert model.passes == 0


def test_random_numbers_that_do_not_depend_on_the_input_stay_random() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand(6)

    model, example = nn.Sequential(nn.Linear(6, 6), Noise()), torch.randn(*ROWS)
    before = torch.get_rng_state()
    traced = trace_model(model, [example])
    assert torch.equal(before, torch.get_rng_state())
    assert (traced.leaves, traced.constants) == (("1",), {})
    with pytest.raises(TraceError, match="Noise") as caught:
        trace_model(Noise(), [example])
    assert "random numbers" in caught.value.why


def test_what_cannot_be_traced_names_module_operation_and_way_out() -> None:
    with pytest.raises(TraceError) as caught:
        trace_model(Branching(), [torch.randn(*ROWS)])
    assert "Branching" in caught.value.what
    assert "if x.sum() > 0:" in caught.value.what
    assert "sub-module" in caught.value.fix


def test_modes_are_traced_apart_where_they_differ() -> None:
    traced = trace_model(Modes(), [torch.randn(*ROWS)])
    assert traced.eval_graph is not None
    assert len(traced.eval_graph.nodes) != len(traced.graph.nodes) or str(traced.eval_graph) != str(traced.graph)


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = Buffers()
    model.first.eval()
    before = (set(vars(model)), [module.training for module in model.modules()], list(model.state_dict()))
    traced = trace_model(model, [torch.randn(*ROWS)])
    assert (set(vars(model)), [module.training for module in model.modules()], list(model.state_dict())) == before
    assert len(traced.constants) == 2, "the literal and the plain attribute"


def test_arguments_with_defaults_keep_them_and_others_can_be_given() -> None:
    rows = torch.randn(*ROWS)
    one = trace_model(Defaults(), [rows])
    assert [node.name for node in one.graph.nodes if node.op == "placeholder"] == ["x"]
    two = trace_model(Defaults(), [rows, torch.ones(6)])
    assert [node.target for node in two.graph.nodes if node.op == "placeholder"] == ["x", "mask"]


def test_a_missing_input_is_named() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    with pytest.raises(TraceError, match="needs 'y'"):
        trace_model(Two(), [torch.randn(2)])


def test_an_input_shape_that_the_model_refuses_names_the_place() -> None:
    model = torchvision.models.resnet18()
    example = torch.randn(2, 1, 32, 32)
    with pytest.raises(UsageError) as caught:
        find_units(trace_model(model, [example]), [example])
    assert "conv1" in caught.value.what
    assert "(2, 1, 32, 32)" in caught.value.what


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_what_hides_its_operations_is_refused() -> None:
    plain = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    for wrapped, said in (
        (torch.jit.script(plain), "is a scripted module"),
        (torch.compile(plain), "is wrapped in"),
    ):
        with pytest.raises((TraceError, UsageError), match=said):
            trace_model(wrapped, [torch.randn(*ROWS)])


def test_a_model_without_shapes_is_refused() -> None:
    with pytest.raises(TraceError, match=r"1\.weight has no shape yet"):
        trace_model(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)), [torch.randn(*ROWS)])


def test_a_model_that_does_not_run_is_told_so() -> None:
    class Raising(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise FileNotFoundError("weights.bin")

    with pytest.raises(UsageError, match=r"Raising refuses its input of shape \(5, 6\)") as caught:
        trace_model(Raising(), [torch.randn(*ROWS)])
    assert caught.value.why == "FileNotFoundError: weights.bin"


def test_a_model_without_work_is_refused() -> None:
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(TraceError, match="computes nothing"):
        find_units(trace_model(Nothing(), [torch.randn(2)]), [torch.randn(2)])


class MovingMean(nn.Module):
    """Its mean stays 0 on inputs that are centred, as those of the comparison with the model may be."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * (x - x).sum()
        return x - self.mean


def test_a_tensor_that_is_computed_anew_is_kept_whatever_it_was_in_the_comparison() -> None:
    model = nn.Sequential(nn.Linear(4, 4), MovingMean(), nn.Linear(4, 4))
    assert trace_model(model, [torch.ones(2, 4)]).leaves == ("1",)
