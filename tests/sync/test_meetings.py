"""Gradients in shared memory, and as messages of codecs, against flat buckets: the same parameters, bit for bit."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar.comm.sockets import SocketGroup
from hybridpar.comm.world import World
from hybridpar.compress import CODECS, read_policy
from hybridpar.compress.codec import TensorSpec
from hybridpar.compress.exchange import Exchange
from hybridpar.sync import meetings, reducer
from hybridpar.sync.meetings import EncodedMeeting, FlatMeeting, SharedMeeting
from hybridpar.train.trainer import Trainer
from tests.compress.team import run_together
from tests.lanes.checked import Checker, Lanes
from tests.ranks import run_ranks
from tests.sync.test_reducer import Net, make_config, make_data, state_of

SETTINGS: list[dict[str, Any]] = [
    {},
    {"micro_batches": 2, "weight_decay": 0.01, "optimizer": "sgd:momentum=0.9"},
    {"optimizer": "adamw", "lr": 0.01},
    {"optimizer": "rmsprop", "lr": 0.001},
    {"clip_grad": 0.1},
    {"clip_grad": "0.01,mode=agc"},
    {"guard": False},
    {"model_ema": "0.9998"},
]


def kind_of(trainer: Trainer) -> type:
    """How buckets meet."""
    engine: Any = trainer.engine
    (kind,) = {type(meeting) for meeting in engine.pipeline.stages[0].gradients._meetings}
    return kind


def train(
    world: World, settings: list[dict[str, Any]], kind: type, bad: int | None = None, checked: bool = False
) -> list[dict[str, Tensor]]:
    """Train a net with each of some settings and a kind of meeting; one step may not be finite on rank 1."""
    states = []
    for options in settings:
        torch.manual_seed(4)
        net = Net(unused=True)
        net.threshold = -math.inf if world.rank else math.inf
        checker = Checker(seed=world.rank, max_delay=0.001) if checked else None
        with pytest.MonkeyPatch.context() as patch, Lanes("cpu", check=checker) as lanes:
            if kind is FlatMeeting:
                patch.setattr(reducer, "is_dense", lambda _: False)  # no gradient is taken in the hook
            with Trainer(net, config=make_config(**options), world=world, lanes=lanes) as trainer:
                assert kind_of(trainer) is kind
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
    """All ranks of one kind of meeting have the same parameters, and those of the other."""
    for options, *ranks, expected in zip(settings, *ours, theirs[0], strict=True):
        assert ranks[0].keys() == expected.keys()
        for name, one in ranks[0].items():
            if "/worker" not in name and "/owner" not in name:
                assert all(torch.equal(one, other[name]) for other in ranks[1:]), (options, name)
            # The order in which squares are added counts, and a norm that clips.
            clips = "clip_grad" in options and "agc" not in str(options["clip_grad"])
            close = max(rtol, 1e-4 if name == "norms" or clips else 0.0)
            torch.testing.assert_close(one, expected[name], rtol=close, atol=close / 10, msg=f"{options} {name}")


def test_parameters_equal_those_of_process_groups() -> None:
    shared = run_ranks(train, 2, SETTINGS, SharedMeeting, shared_memory=True)
    assert_equal(SETTINGS, shared, run_ranks(train, 2, SETTINGS, FlatMeeting, shared_memory=False))


def test_three_workers_stay_equal() -> None:
    shared = run_ranks(train, 3, SETTINGS[:2], SharedMeeting, shared_memory=True)
    assert_equal(SETTINGS[:2], shared, run_ranks(train, 3, SETTINGS[:2], FlatMeeting, shared_memory=False), 1e-5)


def test_a_gradient_that_is_not_finite_on_one_worker_rolls_back_all() -> None:
    settings = [{}, {"clip_grad": 0.1}]
    shared = run_ranks(train, 2, settings, SharedMeeting, 1, shared_memory=True)
    assert_equal(settings, shared, run_ranks(train, 2, settings, FlatMeeting, 1, shared_memory=False))


def test_every_access_to_shared_memory_is_ordered_across_lanes() -> None:
    run_ranks(train, 2, [{}, {"clip_grad": 0.1}], SharedMeeting, None, True, shared_memory=True)


class TwoTypes(nn.Module):
    """Some parameters are float64, so that there is a bucket of each type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(192, 7), nn.Linear(7, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.flatten(1)).double())


def train_two_types(world: World, kind: type, options: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(4)
    net = TwoTypes()
    with Trainer(net, config=make_config(sync="allreduce:bucket=100", **options), world=world) as trainer:
        assert kind_of(trainer) is kind
        for step in range(5):
            net.first.requires_grad_(step != 2)  # a bucket less in one of the steps
            trainer.step(make_data(8, seed=10 * step + world.rank))
        return state_of(trainer)


@pytest.mark.parametrize("options", [{}, {"clip_grad": 0.1}])
def test_buckets_of_two_types_meet_in_one_memory(options: dict[str, Any]) -> None:
    ours = run_ranks(train_two_types, 2, SharedMeeting, options)
    theirs = run_ranks(train_two_types, 2, FlatMeeting, options, shared_memory=False)
    for name, expected in theirs[0].items():
        assert torch.equal(ours[0][name], ours[1][name])
        torch.testing.assert_close(ours[0][name], expected, rtol=1e-4 if options else 0, atol=1e-5 if options else 0)


def scaled_sum(size: float, outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum() * size


def half_sums(world: World, size: float) -> bool:
    """Whether a step counts whose gradients are float16, finite on each worker, and as large as `size`."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 1).half())
    loss = partial(scaled_sum, size)
    with Trainer(net, config=make_config(lr=1e-4), loss=loss, world=world) as trainer:
        images, labels = torch.zeros(1, 3, 8, 8, dtype=torch.float16), torch.zeros(1, dtype=torch.long)
        return bool(trainer.step((images, labels)).outcome.committed)


def test_sums_of_float16_may_be_large_and_must_not_overflow() -> None:
    assert run_ranks(half_sums, 2, 60000.0) == [True, True]
    assert run_ranks(half_sums, 2, 130000.0) == [False, False]


def without_memory(world: World, codec: str) -> tuple[type[object], int]:
    said = []

    def no_room(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meetings, "connect", no_room)
        patch.setattr(reducer._log, "warning", lambda text, error: said.append(text % error))
        with Trainer(Net(), config=make_config(), world=world) as trainer:
            trainer.step(make_data(4))
            return kind_of(trainer), len(said)


def test_without_room_buckets_are_added_as_before() -> None:
    answers = run_ranks(without_memory, 2, "none", shared_memory=True)
    assert [(kind.__name__, said) for kind, said in answers] == [("FlatMeeting", 1), ("FlatMeeting", 0)]


CODED: list[dict[str, Any]] = [
    {"compress": "onebit:least=1"},
    {
        "compress": "onebit:warmup=2",
        "micro_batches": 2,
        "weight_decay": 0.01,
        "optimizer": "sgd:no_decay=head.weight",
        "freeze": ("conv2.*",),
    },
    {"compress": "onebit:meet=shard", "clip_grad": 0.1},
    {"compress": "onebit:decay=0.9", "optimizer": "adamw", "lr": 0.01},
    {"compress": "twobit", "optimizer": "rmsprop", "lr": 0.001},
    {"compress": "qsgd:bits=4", "clip_grad": "0.01,mode=agc"},
    {"compress": "signsgd", "guard": False},
    {"compress": "fp16", "model_ema": "0.9998"},
    {"compress": "powersgd:rank=2,gain=0.5,decay=0.9", "weight_decay": 0.01},
    {"compress": "powersgd:rank=6,gain=0,warmup=2", "clip_grad": 0.1, "micro_batches": 2},
    {"compress": "powersgd:rank=1,gain=0.5", "optimizer": "adamw", "lr": 0.01},
    {"compress": "powersgd:rank=3,gain=0.5,feedback=off"},
]


@pytest.mark.parametrize("workers", [2, 3])
def test_parameters_and_residuals_equal_those_of_buckets(workers: int) -> None:
    settings = CODED if workers == 2 else [*CODED[:3], CODED[8]]
    direct = run_ranks(train, workers, settings, EncodedMeeting)
    assert_equal(settings, direct, run_ranks(train, workers, settings, FlatMeeting, shared_memory=False))


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was() -> None:
    settings = [CODED[0], CODED[2], {"compress": "qsgd:bits=4"}, {"compress": "fp16"}, *CODED[8:10]]
    direct = run_ranks(train, 2, settings, EncodedMeeting, 2)
    assert_equal(settings, direct, run_ranks(train, 2, settings, FlatMeeting, 2, shared_memory=False))


def test_every_access_to_messages_is_ordered_across_lanes() -> None:
    run_ranks(train, 2, [*CODED[:3], CODED[8]], EncodedMeeting, None, True)


@pytest.mark.parametrize("name", [*CODECS, "powersgd:feedback=off"])
def test_gradients_that_are_taken_at_once_are_not_needed_afterwards(name: str) -> None:
    codec = read_policy(name).codec_of("x")
    if not codec.at_once:
        return
    outs = []
    for early in (False, True):
        coder = codec.coder(TensorSpec("x", (64, 64), 0, 1))
        exchange, gradient = Exchange([coder]), torch.randn(4096, generator=torch.Generator().manual_seed(1))
        out = torch.empty(4096)
        if early:
            exchange.open()
            exchange.take(0, gradient)
            gradient.fill_(math.nan)
            exchange.carry(SocketGroup(0, {}, 1.0))
            exchange.received[0].write(out)
        else:
            run_together([exchange], [[gradient]], [[out]])
        outs.append(out)
    assert torch.equal(*outs)
