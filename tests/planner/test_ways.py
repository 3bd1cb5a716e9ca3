"""Ways to compute a step: what is open, what is believed, and what stays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.plan import Plan
from hybridpar.planner import ways
from hybridpar.planner.trials import FIRST_STEPS, StepValues, time_in_turns
from hybridpar.planner.ways import Change, Way, Worth, choose_way, difference, open_changes
from hybridpar.train.trainer import open_trial
from tests.ranks import run_ranks
from tests.small_nets import plain

CPU = torch.device("cpu")
PLAIN = {"a": torch.tensor([3.0, 4.0]), "bias": torch.tensor([1e-9])}


@pytest.mark.parametrize(
    ("gradients", "loss", "said"),
    [
        (PLAIN, 1.0, ""),
        ({"a": torch.tensor([3.01, 4.0]), "bias": torch.tensor([-1e-9])}, 1.001, ""),
        ({"a": torch.tensor([3.5, 4.0]), "bias": torch.tensor([1e-9])}, 1.0, "the gradient of a is 0.1 times"),
        ({"a": torch.tensor([1e33, 4.0]), "bias": torch.tensor([1e-9])}, 1.0, "the gradient of a is inf times"),
        ({"a": torch.tensor([math.nan, 4.0]), "bias": torch.tensor([1e-9])}, 1.0, "the gradient of a is nan times"),
        ({"a": torch.tensor([3.0, 4.0]), "bias": torch.tensor([1.0])}, 1.0, "the gradient of bias is 1e+09 times"),
        ({"a": PLAIN["a"]}, 1.0, "gradients of other parameters"),
        (PLAIN, 1.1, "its loss is 1.1, and 1 in a plain step"),
        (PLAIN, math.nan, "its loss is nan"),
    ],
)
def test_a_step_that_computes_something_else_is_named(gradients: Mapping[str, Tensor], loss: float, said: str):
    found = difference(StepValues(loss, gradients), StepValues(1.0, PLAIN), ways.CLOSE)
    assert found.startswith(said) or said in found
    assert bool(found) == bool(said)


@dataclass
class Clockwork:
    """Steps that take a given time of a made-up clock, and compute what they are told to."""

    now: float = 0.0
    opened: int = 0
    steps: list[float] = field(default_factory=list)

    def open(self, took: Mapping[str, float], wrong: str = "") -> Any:
        def opening(model: nn.Module, config: TrainConfig, world: World, example: Tensor, plan: Plan | None) -> Any:
            name = next((name for name, change in CHANGES.items() if given(change, config)), "plain")
            self.opened += 1
            return Steps(self, took[name], wrong == name)

        return opening


@dataclass
class Steps:
    clock: Clockwork
    seconds: float
    wrong: bool

    taken: int = 0

    def step(self) -> None:
        self.taken += 1
        self.clock.steps.append(self.seconds)
        if math.isinf(self.seconds):
            raise RuntimeError("out of memory\nmore of it")
        self.clock.now += self.seconds * (3 if self.taken < FIRST_STEPS else 1)  # the first steps are slow

    def values(self) -> StepValues:
        self.step()
        return StepValues(1.0, {"a": torch.tensor([3.0, 1e20 if self.wrong else 4.0])})

    def close(self) -> None:
        self.clock.opened -= 1


CHANGES = {
    "both": {"memory_format": "channels_last", "amp": "bf16"},
    "channels_last": {"memory_format": "channels_last"},
    "bf16": {"amp": "bf16"},
}


def given(options: Mapping[str, object], config: TrainConfig) -> bool:
    return all(getattr(config, name) == value for name, value in options.items())


def chosen(monkeypatch: pytest.MonkeyPatch, took: Mapping[str, float], wrong: str = "", fidelity: str = "close") -> Way:
    clock = Clockwork()
    monkeypatch.setattr("hybridpar.planner.trials.time.perf_counter", lambda: clock.now)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(ways, "cpu_has_bf16", lambda: True)
    config = TrainConfig(fidelity=fidelity)  # type: ignore[arg-type]
    way = choose_way(plain(), config, (), World(), torch.zeros(4, 3, 8, 8), clock.open(took, wrong))
    assert clock.opened == 0, "all are closed"
    return way


def test_every_change_is_kept_that_makes_the_step_faster_and_the_next_is_tried_on_top(monkeypatch):
    way = chosen(monkeypatch, {"plain": 0.1, "channels_last": 0.08, "bf16": 9, "both": 0.04})
    assert way.options == {"memory_format": "channels_last", "amp": "bf16"}
    assert [(one.name, one.chosen) for one in way.worths] == [("channels_last", True), ("bf16", True)]
    assert [one.ratio for one in way.worths] == [pytest.approx(0.8), pytest.approx(0.5)]
    assert (way.plain_ms, way.eager_ms, way.step_ms) == (*map(pytest.approx, (100, 40)), (pytest.approx(40),))


def test_a_change_within_the_noise_is_left(monkeypatch):
    way = chosen(monkeypatch, {"plain": 0.1, "channels_last": 0.099, "bf16": 0.3, "both": 9})
    assert (way.options, way.step_ms) == ({}, (pytest.approx(100),))
    assert not any(one.chosen for one in way.worths)


def test_a_hopeless_change_takes_two_steps_and_no_turn(monkeypatch):
    clock = Clockwork()
    monkeypatch.setattr("hybridpar.planner.trials.time.perf_counter", lambda: clock.now)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    opening = clock.open({"plain": 0.1, "channels_last": 2.0})
    way = choose_way(plain(), TrainConfig(), (), World(), torch.zeros(4, 3, 8, 8), opening)
    assert way.worths == (Worth("channels_last", pytest.approx(20)),)
    assert way.options == {}
    assert clock.steps.count(2.0) == 2, "the step that is compared, and one that is timed"


def test_what_computes_something_else_or_fails_is_refused_by_name(monkeypatch):
    way = chosen(monkeypatch, {"plain": 0.1, "channels_last": 0.01, "bf16": math.inf, "both": 9}, "channels_last")
    assert way.options == {}
    refused = {one.name: one.why_not for one in way.worths}
    assert refused["channels_last"].startswith("the gradient of a is")
    assert refused["bf16"] == "RuntimeError: out of memory"
    assert len(refused) == 2, "what was refused is not tried again with more"


def test_a_format_that_lost_is_tried_once_more_in_16_bits(monkeypatch):
    way = chosen(monkeypatch, {"plain": 0.1, "channels_last": 0.11, "bf16": 0.08, "both": 0.06})
    assert way.options == {"memory_format": "channels_last", "amp": "bf16"}
    assert [(worth.name, worth.chosen) for worth in way.worths][1:] == [("bf16", True), ("bf16 in channels_last", True)]


def test_a_rival_that_fails_later_is_refused_alone(monkeypatch):
    class Failing(Steps):
        def values(self) -> StepValues:
            return StepValues(1.0, {"a": torch.tensor([3.0, 4.0])})

    clock = Clockwork()
    inner = clock.open({"plain": 0.1, "channels_last": math.inf, "bf16": 0.05, "both": 9})

    def opening(model: nn.Module, config: TrainConfig, *rest: Any) -> Any:
        steps = inner(model, config, *rest)
        return Failing(clock, steps.seconds, False) if math.isinf(steps.seconds) else steps

    monkeypatch.setattr("hybridpar.planner.trials.time.perf_counter", lambda: clock.now)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(ways, "cpu_has_bf16", lambda: True)
    way = choose_way(plain(), TrainConfig(fidelity="close"), (), World(), torch.zeros(4, 3, 8, 8), opening)
    assert [(one.name, one.chosen) for one in way.worths] == [("channels_last", False), ("bf16", True)]
    assert "out of memory" in way.worths[0].why_not


def test_exact_never_changes_the_precision(monkeypatch):
    way = chosen(monkeypatch, {"plain": 0.1, "channels_last": 0.2, "bf16": 0.01, "both": 0.01}, fidelity="exact")
    assert [one.name for one in way.worths] == ["channels_last"]


def test_what_the_user_decided_is_not_tried(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(ways, "cpu_has_bf16", lambda: True)
    config, shape = TrainConfig(fidelity="close"), (3, 8, 8)
    names = [one.name for one in open_changes(plain(), config, (), shape, CPU, 0)]
    assert names == ["channels_last", "bf16", "bf16 in channels_last", "4 threads"]
    assert [one.name for one in open_changes(plain(), config, ("amp",), (8,), CPU, 0)] == ["4 threads"]
    monkeypatch.setattr(ways, "cpu_has_bf16", lambda: False)
    assert [one.name for one in open_changes(plain(), config, (), shape, CPU, 0)] == ["channels_last", "4 threads"]
    gpu = torch.device("cuda")
    names = [one.name for one in open_changes(plain(), config, (), shape, gpu, 0)]
    halves = ["bf16", "bf16 in channels_last", "fp16", "fp16 in channels_last"]
    assert names == ["channels_last", *halves, "CUDA graph"]
    monkeypatch.setattr(ways, "can_compile", lambda device: True)
    assert open_changes(plain(), config, (), shape, CPU, 1e6)[-1] == Change("torch.compile", {"compile": True})
    fixed = TrainConfig(plan="none")
    assert open_changes(plain(), fixed, TrainConfig.__dataclass_fields__, shape, CPU, 1e6) == []


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.conv(x)).mean((2, 3))


@pytest.mark.parametrize("make", [plain, Dropping])
def test_real_steps_leave_the_model_and_agree_in_all_ways(make):
    model, config = make(), TrainConfig(fidelity="close")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    way = choose_way(model, config, (), World(), torch.randn(4, 3, 8, 8), open_trial)
    assert [one.why_not for one in way.worths] == [""] * len(way.worths)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def together(world: World) -> Way:
    return choose_way(plain(), TrainConfig(), (), world, torch.randn(4, 3, 8, 8), open_trial)


def test_workers_choose_alike():
    first, second = run_ranks(together, 2)
    assert first == second
    assert len(first.step_ms) == 2


def turns(world: World) -> tuple[list[str], dict[str, int]]:
    order: list[str] = []
    steps = {name: (lambda name=name: order.append(name)) for name in ("a", "b", "c")}
    times = time_in_turns(steps, world, rounds=6, seconds=0.0)
    return order, {name: len(values) for name, values in times.items()}


def test_plans_take_turns_and_stop_in_time_but_not_before_two_rounds():
    first, second = run_ranks(turns, 2)
    assert first == second
    order, counts = first
    assert counts == {"a": 2, "b": 2, "c": 2}
    assert order == ["a", "b", "c", "b", "c", "a"]
    assert len(time_in_turns({"a": int}, World(), rounds=4)["a"]) == 4
