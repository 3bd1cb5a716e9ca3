"""Gradients in shared memory against buckets that process groups add: the same parameters, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar.comm.shared_memory import SharedSegment
from hybridpar.comm.world import World
from hybridpar.lanes import Checker, Lanes
from hybridpar.pipeline import local_stage
from hybridpar.sync.shared_reducer import SharedReducer
from hybridpar.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.sync.test_reducer import Net, make_config, make_data, state_of

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum, micro-batches, decay": {"micro_batches": 2, "weight_decay": 0.01, "momentum": 0.9},
    "adamw": {"optimizer": "adamw", "lr": 0.01},
    "not fused": {"optimizer": "rmsprop", "lr": 0.001},
    "clipped norm": {"clip_norm": 0.1},
    "clipped adaptively": {"clip_norm": 0.01, "clip_mode": "agc"},
    "no guard": {"guard": False},
    "average": {"model_ema": "0.9998"},
}


def reducer_of(trainer: Trainer) -> object:
    engine: Any = trainer.engine
    return engine.pipeline.stages[0].gradients


def train(
    world: World, settings: list[dict[str, Any]], expects: bool, bad: int | None = None, checked: bool = False
) -> list[dict[str, Tensor]]:
    """Train a net with each of some settings; one step may have a gradient that is not finite on rank 1."""
    states = []
    for options in settings:
        torch.manual_seed(4)
        net = Net(unused=True)
        net.threshold = -math.inf if world.rank else math.inf
        lanes = Lanes("cpu", check=Checker(seed=world.rank, max_delay=0.001)) if checked else None
        try:
            with Trainer(net, config=make_config(**options), world=world, lanes=lanes) as trainer:
                assert isinstance(reducer_of(trainer), SharedReducer) == expects
                norms = []
                for step in range(4):
                    images, labels = make_data(8, seed=10 * step + world.rank)
                    if step == bad and world.rank == 1:
                        images[0, 0, 0, 0] = math.inf
                    result = trainer.step((images, labels))
                    assert result.outcome.committed == (step != bad)
                    if step == bad:
                        assert result.outcome.bad_parameter == "conv1.weight"
                    if result.outcome.committed and options.get("guard", True):
                        norms.append(result.grad_norm)
                states.append({**state_of(trainer), "norms": torch.tensor(norms, dtype=torch.float64)})
        finally:
            if lanes is not None:
                lanes.close()
    return states


def test_parameters_equal_those_of_process_groups() -> None:
    settings = list(SETTINGS.values())
    shared = run_ranks(train, 2, settings, True, shared_memory=True)
    groups = run_ranks(train, 2, settings, False, shared_memory=False)
    for setting, ours, other, theirs in zip(SETTINGS, *shared, groups[0], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], other[name]), (setting, name)
            # The order in which squares are added counts.
            close = 1e-5 if name == "norms" or setting == "clipped norm" else 0.0
            torch.testing.assert_close(ours[name], theirs[name], rtol=close, atol=close)


def test_three_workers_stay_equal() -> None:
    settings = [SETTINGS["plain"], SETTINGS["momentum, micro-batches, decay"]]
    shared = run_ranks(train, 3, settings, True, shared_memory=True)
    groups = run_ranks(train, 3, settings, False, shared_memory=False)
    for first, second, third, theirs in zip(*shared, groups[0], strict=True):
        for name in first:
            assert torch.equal(first[name], second[name]), name
            assert torch.equal(first[name], third[name]), name
            torch.testing.assert_close(first[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_on_one_worker_rolls_back_all() -> None:
    settings = [{}, {"clip_norm": 0.1}]
    shared = run_ranks(train, 2, settings, True, 1, shared_memory=True)
    groups = run_ranks(train, 2, settings, False, 1, shared_memory=False)
    for ours, other, theirs in zip(shared[0], shared[1], groups[0], strict=True):
        for name in ours:
            assert torch.equal(ours[name], other[name]), name
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_every_access_is_ordered_across_lanes() -> None:
    run_ranks(train, 2, [SETTINGS["plain"], SETTINGS["clipped norm"]], True, None, True, shared_memory=True)


def hand_over_only(world: World) -> tuple[bool, bool]:
    """Whether gradients are gone after the backward pass, and whether one beyond 1e35 counts as not finite."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    with Trainer(net, config=make_config(), world=world) as trainer:
        trainer.step(make_data(4))
        gone = all(one.grad is None for one in net.parameters())
        images, labels = make_data(4)
        return gone, trainer.step((images * 1e36, (labels + 1) % 5)).outcome.committed


def test_gradients_are_dropped_and_sums_cannot_overflow() -> None:
    assert run_ranks(hand_over_only, 2, shared_memory=True) == [(True, False)] * 2


def without_memory(world: World, codec: str) -> tuple[type[object], int]:
    said = []

    def no_room(*_: object) -> None:
        raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedSegment, "_open", no_room)
        patch.setattr(local_stage._log, "warning", lambda text, error: said.append(text % error))
        with Trainer(Net(), config=make_config(), world=world) as trainer:
            trainer.step(make_data(4))
            return type(reducer_of(trainer)), len(said)


def test_without_room_buckets_are_added_as_before() -> None:
    answers = run_ranks(without_memory, 2, "none", shared_memory=True)
    assert [(kind.__name__, said) for kind, said in answers] == [("GradientReducer", 1), ("GradientReducer", 0)]
