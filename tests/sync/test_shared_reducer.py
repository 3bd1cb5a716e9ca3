"""Gradients in shared memory against buckets that process groups add: the same parameters, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar.comm.shared_memory import SharedSegment
from hybridpar.comm.world import World
from hybridpar.pipeline import local_stage
from hybridpar.sync.coded_reducer import CodedReducer
from hybridpar.sync.reducer import GradientReducer
from hybridpar.sync.shared_reducer import SharedReducer
from hybridpar.train.trainer import Trainer
from tests.lanes.checked import Checker, Lanes
from tests.ranks import run_ranks
from tests.sync.test_reducer import Net, make_config, make_data, state_of

SETTINGS: list[dict[str, Any]] = [
    {},
    {"micro_batches": 2, "weight_decay": 0.01, "momentum": 0.9},
    {"optimizer": "adamw", "lr": 0.01},
    {"optimizer": "rmsprop", "lr": 0.001},
    {"clip_norm": 0.1},
    {"clip_norm": 0.01, "clip_mode": "agc"},
    {"guard": False},
    {"model_ema": "0.9998"},
]


def reducer_of(trainer: Trainer) -> object:
    engine: Any = trainer.engine
    return engine.pipeline.stages[0].gradients


def train(
    world: World, settings: list[dict[str, Any]], kind: type, bad: int | None = None, checked: bool = False
) -> list[dict[str, Tensor]]:
    """Train a net with each of some settings and a kind of reducer; one step may not be finite on rank 1."""
    states = []
    for options in settings:
        torch.manual_seed(4)
        net = Net(unused=True)
        net.threshold = -math.inf if world.rank else math.inf
        checker = Checker(seed=world.rank, max_delay=0.001) if checked else None
        with pytest.MonkeyPatch.context() as patch, Lanes("cpu", check=checker) as lanes:
            if kind is GradientReducer:
                patch.setattr(CodedReducer, "fits", lambda _: False)
            with Trainer(net, config=make_config(**options), world=world, lanes=lanes) as trainer:
                assert type(reducer_of(trainer)) is kind
                norms = []
                for step in range(5):
                    images, labels = make_data(8, seed=10 * step + world.rank)
                    if step == bad and world.rank == 1:
                        images[0, 0, 0, 0] = math.inf
                    outcome = trainer.step((images, labels)).outcome
                    assert outcome.committed == (step != bad)
                    assert step != bad or outcome.bad_parameter == "conv1.weight"
                    if outcome.committed and options.get("guard", True):
                        norms.append(outcome.grad_norm)
                states.append({**state_of(trainer), "norms": torch.tensor(norms, dtype=torch.float64)})
                for codec in trainer.engine.codecs:
                    for name, state in codec.state_dict()["parameters"].items():
                        states[-1] |= {f"{name}/{key}": one for key, one in state.get("residuals", {}).items()}
    return states


def assert_equal(settings: list[dict[str, Any]], ours: list[Any], theirs: list[Any], rtol: float = 0.0) -> None:
    """All ranks of one kind of reducer have the same parameters, and those of the other."""
    for options, *ranks, expected in zip(settings, *ours, theirs[0], strict=True):
        assert ranks[0].keys() == expected.keys()
        for name, one in ranks[0].items():
            if "/worker" not in name and "/owner" not in name:
                assert all(torch.equal(one, other[name]) for other in ranks[1:]), (options, name)
            # The order in which squares are added counts, and a norm that clips.
            clips = "clip_norm" in options and options.get("clip_mode") != "agc"
            close = max(rtol, 1e-4 if name == "norms" or clips else 0.0)
            torch.testing.assert_close(one, expected[name], rtol=close, atol=close / 10, msg=f"{options} {name}")


def test_parameters_equal_those_of_process_groups() -> None:
    shared = run_ranks(train, 2, SETTINGS, SharedReducer, shared_memory=True)
    assert_equal(SETTINGS, shared, run_ranks(train, 2, SETTINGS, GradientReducer, shared_memory=False))


def test_three_workers_stay_equal() -> None:
    shared = run_ranks(train, 3, SETTINGS[:2], SharedReducer, shared_memory=True)
    assert_equal(SETTINGS[:2], shared, run_ranks(train, 3, SETTINGS[:2], GradientReducer, shared_memory=False), 1e-5)


def test_a_gradient_that_is_not_finite_on_one_worker_rolls_back_all() -> None:
    settings = [{}, {"clip_norm": 0.1}]
    shared = run_ranks(train, 2, settings, SharedReducer, 1, shared_memory=True)
    assert_equal(settings, shared, run_ranks(train, 2, settings, GradientReducer, 1, shared_memory=False))


def test_every_access_is_ordered_across_lanes() -> None:
    run_ranks(train, 2, [{}, {"clip_norm": 0.1}], SharedReducer, None, True, shared_memory=True)


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
