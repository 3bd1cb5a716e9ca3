"""Optimizers by name against torch's and timm's own, their groups, and their state by parameter name."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from hybridpar.config import OptimizerConfig
from hybridpar.config.optimizer import TORCH_OPTIMIZERS, Groups
from hybridpar.errors import CheckpointError, UsageError
from hybridpar.optim.build import (
    Rates,
    build_optimizer,
    fill_momentum,
    load_optimizer_state,
    optimizer_state,
    parameter_groups,
    state_copies,
)


class Mixed(nn.Module):
    """One of everything that decays or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.batch = nn.BatchNorm2d(4)
        self.group = nn.GroupNorm(2, 4)
        self.layer = nn.LayerNorm((4, 2))
        self.head = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(4))
        self.table = nn.Parameter(torch.ones(2, 4))


def steps(model, optimizer, count=3):
    for number in range(count):
        torch.manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


@pytest.mark.parametrize(
    ("listed", "groups", "decaying"),
    [
        ((), Groups(), {"conv.weight", "head.weight", "table"}),
        ({"table"}, Groups(no_decay=("conv.*",)), {"head.weight"}),
        ((), Groups(decay_all=True), {name for name, _ in Mixed().named_parameters()}),
        ({"table"}, Groups(decay_all=True), {name for name, _ in Mixed().named_parameters()} - {"table"}),
    ],
    ids=["no norms, biases, vectors", "nor what model and user name", "all", "all but what the model names"],
)
def test_which_parameters_decay(listed, groups, decaying):
    model = Mixed()
    model.no_weight_decay = lambda: listed
    made = parameter_groups(model, 0.1, groups)
    found = {id(parameter): group["weight_decay"] for group in made for parameter in group["params"]}
    assert {name: found[id(one)] for name, one in model.named_parameters()} == {
        name: 0.1 if name in decaying else 0.0 for name, _ in model.named_parameters()
    }


def test_a_shared_parameter_is_in_one_group_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert [len(group["params"]) for group in parameter_groups(model, 0.1, Groups())] == [1]


def plain_groups(model):
    decays = ("conv.weight", "head.weight", "table")
    return [
        {"params": [p for n, p in model.named_parameters() if (n in decays) == decaying], "weight_decay": decay}
        for decaying, decay in ((True, 0.1), (False, 0.0))
    ]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("sgd:momentum=0", {"momentum": 0.0}),
        ("sgd", {"momentum": 0.9}),
        ("rmsprop", {}),
        ("sgd:nesterov", {"momentum": 0.9, "nesterov": True}),
        ("adamw", {}),
        ("rmsprop:eps=0.03,alpha=0.9", {"alpha": 0.9, "eps": 0.03}),
        ("nadam:betas=0.8/0.9", {"betas": (0.8, 0.9)}),
        ("adam:amsgrad=true", {"amsgrad": True}),
        ("adagrad", {}),
        ("timm/lamb", {}),
        ("timm/lion:betas=0.9/0.95", {"betas": (0.9, 0.95)}),
        ("timm/rmsproptf:alpha=0.8", {"alpha": 0.8}),
    ],
)
def test_optimizers_by_name_are_torchs_and_timms(text, arguments):
    ours, theirs = Mixed(), Mixed()
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerConfig(lr=0.05, weight_decay=0.1, optimizer=text)
    steps(ours, build_optimizer(ours, config))
    if (name := config.optim.name).startswith("timm/"):
        reference = create_optimizer_v2(plain_groups(theirs), name[5:], lr=0.05, momentum=0.9, **arguments)
    else:
        reference = getattr(torch.optim, TORCH_OPTIMIZERS[name])(plain_groups(theirs), lr=0.05, **arguments)
    steps(theirs, reference)
    for (label, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=label)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("adamv", ("'adamv'", "adam")),
        ("timm/lamp", ("'timm/lamp'", "timm/lamb")),
        ("adamw:amsgrat=True", ("'amsgrat'", "amsgrad")),
        ("timm/lion:eps=0.001", ("timm/lion has no argument 'eps'",)),
        ("adam:weight_decay=0.1", ("adam:weight_decay=0.1", "--weight-decay")),
        ("sgd:lr=0.1", ("sgd:lr=0.1", "--lr")),
        ("adamw:2=3", ("no name of an argument",)),
        ("muon", ("2D", "timm/muon")),
        ("timm/adahessian", ("second derivatives",)),
        ("sgd:maximize=maybe", ("maximize=maybe\nIt must be on or off.",)),
        ("adamw:eps=nan", ("eps=nan\nIt must be a number.",)),
        ("adamw:eps=on", ("eps=True\nIt must be a number.",)),
        ("sgd:dampening=1e400", ("Numbers are finite.",)),
    ],
)
def test_what_no_optimizer_can_be_made_of_is_one_error(text, said):
    with pytest.raises(UsageError) as caught:
        build_optimizer(Mixed(), OptimizerConfig(optimizer=text))
    assert all(part in str(caught.value) for part in said)


def test_timm_that_is_missing_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        build_optimizer(Mixed(), OptimizerConfig(optimizer="timm/lamb"))
    assert caught.value.fix == "Install it: pip install 'hybridpar[timm]'"


_COUNTED = (
    *("adamw:amsgrad", "rmsprop:centered", "timm/lamb", "timm/lion", "timm/adan", "timm/mars", "timm/nesterov"),
    *("timm/adafactorbv", "timm/cadafactor"),
)


@pytest.mark.parametrize("name", [*TORCH_OPTIMIZERS, *_COUNTED])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_tensors_that_an_optimizer_keeps_are_counted(name, momentum):
    model = nn.Linear(64, 64, bias=False)
    config = OptimizerConfig(optimizer=f"{name}:momentum={momentum}" if name in ("sgd", "rmsprop") else name)
    optimizer = build_optimizer(model, config)
    steps(model, optimizer, count=1)
    kept = sum(value.numel() for value in optimizer.state[model.weight].values() if getattr(value, "ndim", 0))
    assert state_copies(config) == pytest.approx(kept / 64**2, abs=0.98 if name == "adafactor" else 0.04)


def test_rates_are_scaled_by_parameter():
    model = Mixed()
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.5, optimizer="sgd:head_lr=0.1"))
    Rates(optimizer).set(0.5)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert len(optimizer.param_groups) == 4
    assert found[id(model.head.weight)] == (pytest.approx(0.025), 5e-4)
    assert found[id(model.head.bias)] == (pytest.approx(0.025), 0.0)
    assert found[id(model.conv.weight)] == (pytest.approx(0.25), 5e-4)


@pytest.mark.parametrize("name", ["adamw", "timm/lamb", "timm/adan", "timm/lion", "adafactor", "rmsprop"])
def test_state_of_any_optimizer_goes_on_bit_for_bit(name, tmp_path):
    config = OptimizerConfig(optimizer=name, lr=0.01)
    one, other = Mixed(), Mixed()
    first = build_optimizer(one, config)
    steps(one, first)
    other.load_state_dict(one.state_dict())
    torch.save(optimizer_state(first, one), tmp_path / "state.pt")
    second = build_optimizer(other, config)
    load_optimizer_state(second, other, torch.load(tmp_path / "state.pt", weights_only=True))
    steps(one, first)
    steps(other, second)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_parameter_that_joins_late_starts_with_momentum_zero():
    torch.manual_seed(0)
    late, reference = nn.Linear(3, 3), nn.Linear(3, 3)
    reference.load_state_dict(late.state_dict())
    optimizer = build_optimizer(late, OptimizerConfig(lr=0.05, weight_decay=0.0))
    late.weight.grad = torch.ones(3, 3)
    late.bias.grad = None
    fill_momentum(optimizer)
    optimizer.step()
    late.bias.grad = torch.ones(3)
    fill_momentum(optimizer)
    optimizer.step()
    # Both took their first step with m = g; only the weight has taken a second one, with m = 0.9 g + g.
    torch.testing.assert_close(late.bias, reference.bias - 0.05)
    torch.testing.assert_close(late.weight, reference.weight - 0.05 * (1 + 1.9))


@pytest.mark.parametrize(("text", "kind"), [("sgd:nesterov", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_state_survives_another_order_of_parameters(text, kind):
    one = Mixed()
    first = build_optimizer(one, OptimizerConfig(optimizer=text))
    steps(one, first)
    saved = copy.deepcopy(optimizer_state(first, one))
    other = copy.deepcopy(one)
    # A user's optimizer groups everything in one, in the opposite order.
    second = kind(list(reversed(list(other.parameters()))), lr=0.05, fused=True)
    load_optimizer_state(second, other, saved)
    by_name = dict(other.named_parameters())
    for name, values in saved["state"].items():
        for key, value in values.items():
            assert torch.equal(second.state[by_name[name]][key], value), (name, key)


def test_loaded_state_has_the_parameters_memory_format():
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, OptimizerConfig())
    steps(model, optimizer)
    saved = optimizer_state(optimizer, model)
    for values in saved["state"].values():
        for key in values:
            values[key] = values[key].contiguous()
    load_optimizer_state(optimizer, model, saved)
    assert optimizer.state[model[0].weight]["momentum_buffer"].stride() == model[0].weight.stride()


def test_state_of_another_kind_of_optimizer_is_refused():
    model = Mixed()
    saved = optimizer_state(build_optimizer(model, OptimizerConfig()), model)
    with pytest.raises(CheckpointError) as caught:
        load_optimizer_state(build_optimizer(model, OptimizerConfig(optimizer="adamw")), model, saved)
    assert "state of SGD, this run uses AdamW" in caught.value.what
