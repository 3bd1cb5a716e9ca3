"""Gradient sync against its oracle: one process, the unsplit model, the same micro-batches."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.compress import read_policy
from hybridpar.config import TrainConfig
from hybridpar.errors import SyncError, TrainingError, UsageError
from hybridpar.optim.build import build_optimizer
from hybridpar.sync.reducer import Reducer
from hybridpar.sync.stage_gradients import SyncOptions, open_sync_lanes
from hybridpar.train.trainer import Trainer
from tests.lanes.checked import Checker, Lanes
from tests.pipeline.oracle import Setting, batches_of, train_whole
from tests.pipeline.oracle import images as make_data
from tests.pipeline.oracle import state_of as state_of_model
from tests.ranks import run_ranks


class Net(nn.Module):
    """Convolutions, BatchNorm, a shared layer, a frozen one, one that is never used and one used by some samples."""

    def __init__(self, *, unused: bool = False, frozen: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.extra = nn.Linear(8, 8) if unused else None
        self.sometimes = nn.Linear(8, 8) if unused else None
        self.head = nn.Linear(8, 5)
        self.times = 2 if shared else 1
        if frozen:
            self.conv1.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        for _ in range(self.times):
            x = torch.relu(self.bn2(self.conv2(x)))
        x = x.mean((2, 3))
        if self.sometimes is not None and bool(x.sum() > self.threshold):
            x = x + self.sometimes(x)
        return self.head(x)

    threshold = math.inf


def make_config(**options: Any) -> TrainConfig:
    # A small bucket, so that the tiny model has several.
    return TrainConfig(**{"lr": 0.1, "optimizer": "sgd:momentum=0.9", "sync": "allreduce:bucket=0.001", **options})


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    return state_of_model(trainer.model, [trainer.optimizer])


def train_replica(
    world: World, net: dict[str, bool], options: dict[str, Any], shares: list[int], steps: int, checked: bool = False
) -> dict[str, Tensor]:
    """Each rank trains on its share of the same global batches; replicas are built from different seeds."""
    torch.manual_seed(100 + world.rank)
    config = make_config(**options)
    checker = Checker(seed=world.rank, max_delay=0.001) if checked else None
    mine = slice(sum(shares[: world.rank]), sum(shares[: world.rank + 1]))
    with Lanes("cpu", check=checker) as lanes, Trainer(Net(**net), config=config, world=world, lanes=lanes) as trainer:
        reference = copy.deepcopy(trainer.model.state_dict())
        for step in range(steps):
            x, y = make_data(sum(shares), seed=step)
            with checker or nullcontext():
                trainer.step((x[mine], y[mine]))
        return {"initial/" + name: tensor for name, tensor in reference.items()} | state_of(trainer)


def train_oracle(
    initial: dict[str, Tensor], net: dict[str, bool], options: dict[str, Any], shares: list[int], steps: int
) -> dict[str, Tensor]:
    """One process: each rank's micro-batches are accumulated apart, the sums are added in rank order."""
    config = make_config(**options)
    model = Net(**net)
    model.load_state_dict(initial)
    setting = Setting(
        config.micro_batches,
        lambda whole: build_optimizer(whole, config),
        sync=SyncOptions(clip_norm=None if config.clipping is None else config.clipping.limit),
        shares=tuple(shares),
    )
    return train_whole(model, batches_of(sum(shares), steps), setting).state


def assert_matches(states: list[dict[str, Tensor]], oracle: dict[str, Tensor], *, exact: bool) -> None:
    for name, expected in oracle.items():
        first = states[0][name]
        for other in states[1:]:
            assert torch.equal(first, other[name]), f"{name}: replicas differ"
        if "running" in name:
            torch.testing.assert_close(first, expected, rtol=1e-6, atol=1e-7, msg=name)
        elif exact:
            assert torch.equal(first, expected), f"{name}: {(first - expected).abs().max()}"
        else:
            torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6, msg=name)


def initial_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("initial/"): tensor for name, tensor in state.items() if name.startswith("initial/")}


CASES = {
    "plain": ({}, {}),
    "micro_batches": ({}, {"micro_batches": 4}),
    "frozen": ({"frozen": True}, {}),
    "unused": ({"unused": True}, {"micro_batches": 2}),
    "shared": ({"shared": True}, {}),
    "one bucket": ({}, {"sync": "allreduce:bucket=100"}),
    "a bucket per tensor": ({}, {"sync": "allreduce:bucket=1e-06"}),
    "one lane, no guard": ({}, {"guard": False}),
    "weight decay, nesterov": ({}, {"optimizer": "sgd:nesterov", "weight_decay": 0.01}),
    "adamw": ({}, {"optimizer": "adamw", "lr": 0.01}),
}


@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
@pytest.mark.parametrize("case", CASES)
def test_two_workers_equal_one_process_bit_for_bit(case: str, transport: str) -> None:
    net, options = CASES[case]
    shares = [8, 8]
    states = run_ranks(train_replica, 2, net, options, shares, 3, shared_memory=transport == "shared memory")
    oracle = train_oracle(initial_of(states[0]), net, options, shares, 3)
    assert_matches(states, oracle, exact=True)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_clipping_is_by_the_global_norm(accumulate: int) -> None:
    options = {"clip_grad": 0.05, "micro_batches": accumulate}
    states = run_ranks(train_replica, 2, {}, options, [8, 8], 3)
    assert_matches(states, train_oracle(initial_of(states[0]), {}, options, [8, 8], 3), exact=False)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_uneven_shares_weigh_by_their_samples(shared_memory: bool) -> None:
    options = {"micro_batches": 2}
    states = run_ranks(train_replica, 3, {"shared": True}, options, [9, 4, 6], 3, shared_memory=shared_memory)
    oracle = train_oracle(initial_of(states[0]), {"shared": True}, options, [9, 4, 6], 3)
    assert_matches(states, oracle, exact=False)


@pytest.mark.parametrize("case", ["micro_batches", "unused", "shared"])
def test_every_access_is_ordered_across_lanes(case: str) -> None:
    net, options = CASES[case]
    states = run_ranks(train_replica, 2, net, options, [8, 8], 3, True)
    assert_matches(states, train_oracle(initial_of(states[0]), net, options, [8, 8], 3), exact=True)


def stop_on_nan(world: World) -> tuple[str, int]:
    torch.manual_seed(3)
    with Trainer(Net(), config=make_config(), world=world) as trainer:
        trainer.step(make_data(8))
        x, y = make_data(8)
        if world.rank == 1:
            x.fill_(math.nan)
        try:
            for _ in range(5):
                trainer.step((x, y))
        except TrainingError as error:
            return str(error), trainer.steps_done
    return "did not stop", -1


def test_three_bad_steps_stop_all_ranks_at_the_same_step() -> None:
    answers = run_ranks(stop_on_nan, 2)
    assert answers[0] == answers[1]
    message, step = answers[0]
    assert step == 4
    assert "steps 2 to 4" in message
    assert "first bad parameter: conv1.weight" in message


def unused_everywhere(world: World) -> list[Any]:
    torch.manual_seed(3)
    net = Net(unused=True)
    net.threshold = -math.inf if world.rank == 1 else math.inf  # `sometimes` runs on rank 1 only
    with Trainer(net, config=make_config(weight_decay=0.1), world=world) as trainer:
        before = net.extra.weight.clone(), net.sometimes.weight.clone()
        trainer.step(make_data(8))
        return [torch.equal(before[0], net.extra.weight), (net.sometimes.weight - before[1]).detach()]


def test_parameters_used_nowhere_are_skipped_and_used_somewhere_are_shared() -> None:
    first, second = run_ranks(unused_everywhere, 2)
    assert first[0]
    assert second[0]
    assert torch.equal(first[1], second[1])
    assert first[1].abs().sum() > 0


def another_model(world: World) -> str:
    with pytest.raises(SyncError) as caught:
        Trainer(nn.Linear(3, 4 + world.rank), config=make_config(), world=world)
    return str(caught.value)


def test_ranks_with_different_models_are_told_before_the_first_step() -> None:
    for answer in run_ranks(another_model, 2):
        assert "worker 1 built another model" in answer


def too_small_for_one(world: World, options: dict[str, Any]) -> str:
    with Trainer(Net(), config=make_config(micro_batches=2, **options), world=world) as trainer:
        trainer.step(make_data(4))
        try:
            trainer.step(make_data(4 if world.rank == 0 else 1))
        except UsageError as error:
            trainer.step(make_data(4))  # as good as before
            return str(error)
    return "passed"


@pytest.mark.parametrize("options", [{}, {"batch_norm": "sync"}])
def test_a_batch_that_is_too_small_on_one_worker_is_refused_by_all(options: dict[str, Any]) -> None:
    first, second = run_ranks(too_small_for_one, 2, options)
    assert first.startswith("1 of the other workers got a batch that cannot be divided")
    assert second.startswith("a batch of 1 samples cannot be divided into 2 micro-batches")


def settle_order(world: World) -> tuple[list[str], list[str]]:
    torch.manual_seed(world.rank)
    net = Net()
    with Trainer(net, config=make_config(), world=world) as trainer:
        before = list(_order(trainer))
        trainer.step(make_data(8))
        return before, _order(trainer)


def _order(trainer: Trainer) -> list[str]:
    order: list[str] = trainer.engine.state_dict()["pipeline"]["orders"]["0"]["order"]
    return order


def test_buckets_follow_the_order_observed_in_the_first_step() -> None:
    answers = run_ranks(settle_order, 2)
    assert answers[0] == answers[1]
    before, after = answers[0]
    assert before[0] == "head.bias"
    assert after[-1] == "conv1.weight"
    assert sorted(before) == sorted(after)


def arrive_twice(world: World) -> str:
    with Lanes("cpu") as lanes:
        model = nn.Linear(2, 2)
        parameters, caller = dict(model.named_parameters()), lanes.caller
        options = SyncOptions(codec=read_policy("none"))
        reducer = Reducer(parameters, world, lanes, caller, open_sync_lanes(world, lanes), options, measure=False)
        flight = reducer.new_step()
        reducer.start(flight)
        reducer.begin_last(flight)
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(SyncError) as caught:
            loss.backward()
        reducer.flush()
        caller.wait(reducer.issue(0, flight))
        reducer.close()
    return str(caught.value)


def test_a_gradient_that_arrives_twice_is_refused() -> None:
    for answer in run_ranks(arrive_twice, 2):
        assert "arrived twice" in answer
