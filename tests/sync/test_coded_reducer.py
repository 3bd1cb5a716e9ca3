"""Codecs whose gradients are encoded in the hook and decoded in the optimizer, against whole buckets of gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.compress import CODECS, read_policy
from hybridpar.compress.codec import TensorSpec
from hybridpar.compress.exchange import Exchange
from hybridpar.compress.sockets import SocketGroup
from hybridpar.compress.together import run_together
from hybridpar.lanes import Checker, Lanes
from hybridpar.sync.coded_reducer import CodedReducer
from hybridpar.sync.reducer import GradientReducer
from hybridpar.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.sync.test_reducer import Net, make_config, make_data, state_of
from tests.sync.test_shared_reducer import reducer_of

SETTINGS: list[dict[str, Any]] = [
    {"compress": "onebit:least=1"},
    {
        "compress": "onebit:warmup=2",
        "micro_batches": 2,
        "weight_decay": 0.01,
        "no_decay": ("head.weight",),
        "freeze": ("conv2.*",),
    },
    {"compress": "onebit:meet=shard", "clip_norm": 0.1},
    {"compress": "onebit:decay=0.9", "optimizer": "adamw", "lr": 0.01},
    {"compress": "twobit", "optimizer": "rmsprop", "lr": 0.001},
    {"compress": "qsgd:bits=4", "clip_norm": 0.01, "clip_mode": "agc"},
    {"compress": "signsgd", "guard": False},
    {"compress": "fp16", "model_ema": "0.9998"},
    {"compress": "powersgd:rank=2,gain=0.5,decay=0.9", "weight_decay": 0.01},
    {"compress": "powersgd:rank=6,gain=0,warmup=2", "clip_norm": 0.1, "micro_batches": 2},
    {"compress": "powersgd:rank=1,gain=0.5,residual=bf16", "optimizer": "adamw", "lr": 0.01},
    {"compress": "powersgd:rank=3,gain=0.5,feedback=off"},
]


def train(
    world: World, settings: list[dict[str, Any]], direct: bool, bad: int | None = None, checked: bool = False
) -> list[dict[str, Tensor]]:
    """Train a net with each of some settings; one step may have a gradient that is not finite on rank 1."""
    states = []
    for options in settings:
        torch.manual_seed(4)
        net = Net(unused=True)
        net.threshold = -math.inf if world.rank else math.inf
        lanes = Lanes("cpu", check=Checker(seed=world.rank, max_delay=0.001)) if checked else None
        with pytest.MonkeyPatch.context() as patch:
            if not direct:
                patch.setattr(CodedReducer, "fits", lambda _: False)
            with Trainer(net, config=make_config(**options), world=world, lanes=lanes) as trainer:
                assert type(reducer_of(trainer)) is (CodedReducer if direct else GradientReducer)
                norms = []
                for step in range(5):
                    images, labels = make_data(8, seed=10 * step + world.rank)
                    if step == bad and world.rank == 1:
                        images[0, 0, 0, 0] = math.inf
                    outcome = trainer.step((images, labels)).outcome
                    assert outcome.committed == (step != bad)
                    if outcome.committed and options.get("guard", True):
                        norms.append(outcome.grad_norm)
                kept = {}
                for name, state in trainer.engine.codecs[0].state_dict()["parameters"].items():
                    for key, residual in state.get("residuals", {}).items():
                        kept[f"{name}/{key}"] = residual
                states.append({**state_of(trainer), **kept, "norms": torch.tensor(norms, dtype=torch.float64)})
        if lanes is not None:
            lanes.close()
    return states


def assert_equal(direct: list[Any], buckets: list[Any], settings: list[dict[str, Any]]) -> None:
    for options, ours, theirs in zip(settings, direct[0], buckets[0], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            # The order in which squares are added counts, and a norm that clips.
            close = (
                1e-4
                if name == "norms" or (options.get("clip_mode", "norm") == "norm" and "clip_norm" in options)
                else 0
            )
            torch.testing.assert_close(ours[name], theirs[name], rtol=close, atol=close / 10, msg=f"{options} {name}")
    for ranks in zip(*direct, strict=True):
        for name in ranks[0]:
            if "/worker" not in name and "/owner" not in name:
                assert all(torch.equal(ranks[0][name], other[name]) for other in ranks[1:]), name


@pytest.mark.parametrize("workers", [2, 3])
def test_parameters_and_residuals_equal_those_of_buckets(workers: int) -> None:
    settings = SETTINGS if workers == 2 else [*SETTINGS[:3], SETTINGS[8]]
    direct = run_ranks(train, workers, settings, True, shared_memory=False)
    assert_equal(direct, run_ranks(train, workers, settings, False, shared_memory=False), settings)


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was() -> None:
    settings = [SETTINGS[0], SETTINGS[2], {"compress": "qsgd:bits=4"}, {"compress": "fp16"}, *SETTINGS[8:10]]
    direct = run_ranks(train, 2, settings, True, 2, shared_memory=False)
    assert_equal(direct, run_ranks(train, 2, settings, False, 2, shared_memory=False), settings)


def test_every_access_is_ordered_across_lanes() -> None:
    run_ranks(train, 2, [*SETTINGS[:3], SETTINGS[8]], True, None, True, shared_memory=False)


@pytest.mark.parametrize("name", [*CODECS, "powersgd:feedback=off"])
def test_gradients_that_are_taken_at_once_are_not_needed_afterwards(name: str) -> None:
    codec = read_policy(name).codec_of("x")
    if not codec.at_once:
        return
    outs = []
    for early in (False, True):
        coder = codec.bind(TensorSpec("x", (64, 64), 0, 1))
        exchange, gradient = Exchange([coder]), torch.randn(4096, generator=torch.Generator().manual_seed(1))
        out = torch.empty(4096)
        if early:
            exchange.open()
            exchange.take(0, gradient)
            gradient.fill_(math.nan)
            exchange.carry(SocketGroup(0, {}, 1.0))
            coder.finish(out)
        else:
            run_together([exchange], [[gradient]], [[out]])
        outs.append(out)
    assert torch.equal(*outs)
