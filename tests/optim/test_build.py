"""Optimizers against torch's own, and the learning rate as a function of the step alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from hybridpar.config import OptimizerConfig
from hybridpar.errors import CheckpointError
from hybridpar.optim.build import (
    build_optimizer,
    fill_momentum,
    load_optimizer_state,
    optimizer_state,
    parameter_groups,
    rate_factor,
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


def test_weight_decay_spares_norms_biases_and_vectors():
    model = Mixed()
    decaying, exempt = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(parameter)] for parameter in decaying["params"]} == {"conv.weight", "head.weight", "table"}
    assert decaying["weight_decay"] == 0.1
    assert exempt["weight_decay"] == 0.0
    assert len(decaying["params"]) + len(exempt["params"]) == len(names)


def test_a_shared_parameter_is_in_one_group_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert [len(group["params"]) for group in parameter_groups(model, 0.1)] == [1]


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"momentum": 0.9}, lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9)),
        ({"momentum": 0.0}, lambda groups: torch.optim.SGD(groups, lr=0.05)),
        (
            {"momentum": 0.9, "nesterov": True},
            lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
        ),
        ({"optimizer": "adamw"}, lambda groups: torch.optim.AdamW(groups, lr=0.05)),
    ],
)
def test_steps_are_those_of_torchs_plain_optimizer(options, reference):
    ours = Mixed()
    theirs = copy.deepcopy(ours)
    steps(ours, build_optimizer(ours, OptimizerConfig(lr=0.05, weight_decay=0.1, **options)))
    decays = ("conv.weight", "head.weight", "table")
    groups = [
        {"params": [p for n, p in theirs.named_parameters() if (n in decays) == decaying], "weight_decay": decay}
        for decaying, decay in ((True, 0.1), (False, 0.0))
    ]
    steps(theirs, reference(groups))
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)


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


CONFIG = OptimizerConfig(warmup_epochs=2.0, lr_schedule="cosine")


def factors(config, total=100, per_epoch=10):
    return [rate_factor(step, total, per_epoch, config) for step in range(total)]


def test_warm_up_is_linear_and_reaches_the_peak():
    warm = factors(CONFIG)[:20]
    assert warm == [pytest.approx((step + 1) / 20) for step in range(20)]


def test_cosine_falls_from_the_peak_to_zero():
    rates = factors(CONFIG)[20:]
    assert rates[0] == 1.0
    assert rates[40] == pytest.approx(0.5)
    assert rates == sorted(rates, reverse=True)
    assert 0 <= rates[-1] < 0.001
    # Loshchilov and Hutter 2017, equation 5, with a minimum of zero.
    assert rates[10] == pytest.approx((1 + math.cos(math.pi * 10 / 80)) / 2)


def test_step_schedule_divides_by_ten_at_each_fraction():
    rates = factors(OptimizerConfig(warmup_epochs=0.0, lr_schedule="step", step_epochs=(0.5, 0.75)))
    assert rates[:50] == [1.0] * 50
    assert rates[50:75] == [pytest.approx(0.1)] * 25
    assert rates[75:] == [pytest.approx(0.01)] * 25


def test_constant_schedule_keeps_the_peak():
    assert factors(OptimizerConfig(warmup_epochs=0.0, lr_schedule="constant")) == [1.0] * 100


def test_warm_up_takes_at_most_half_of_a_short_run():
    rates = factors(OptimizerConfig(warmup_epochs=50.0, lr_schedule="constant"), total=10)
    assert rates[:5] == [pytest.approx(step / 5) for step in range(1, 6)]
    assert rates[5:] == [1.0] * 5


def test_a_run_of_one_step_trains_at_the_peak():
    assert factors(OptimizerConfig(), total=1) == [1.0]


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"optimizer": "adamw"}])
def test_state_survives_another_order_of_parameters(options):
    config = OptimizerConfig(**options)
    one = Mixed()
    first = build_optimizer(one, config)
    steps(one, first)
    saved = copy.deepcopy(optimizer_state(first, one))
    other = copy.deepcopy(one)
    # A user's optimizer groups everything in one, in the opposite order.
    kind = torch.optim.SGD if config.optimizer == "sgd" else torch.optim.AdamW
    settings = {"momentum": 0.9, "nesterov": config.nesterov} if config.optimizer == "sgd" else {}
    second = kind(list(reversed(list(other.parameters()))), lr=0.05, fused=True, **settings)
    load_optimizer_state(second, other, saved)
    by_name = dict(other.named_parameters())
    for name, values in saved["state"].items():
        for key, value in values.items():
            assert torch.equal(second.state[by_name[name]][key], value), (name, key)


def test_loaded_state_goes_on_bit_for_bit():
    config = OptimizerConfig(optimizer="adamw")
    one = Mixed()
    first = build_optimizer(one, config)
    steps(one, first)
    other, saved = copy.deepcopy(one), copy.deepcopy(optimizer_state(first, one))
    second = build_optimizer(other, config)
    load_optimizer_state(second, other, saved)
    steps(one, first)
    steps(other, second)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


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


def test_state_can_be_saved_without_pickled_classes(tmp_path):
    model = Mixed()
    optimizer = build_optimizer(model, OptimizerConfig(optimizer="adamw"))
    steps(model, optimizer)
    saved = optimizer_state(optimizer, model)
    torch.save(saved, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert loaded["kind"] == "AdamW"
    assert loaded["state"].keys() == dict(model.named_parameters()).keys()
