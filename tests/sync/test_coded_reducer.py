"""Codecs whose gradients are encoded in the hook and decoded in the optimizer, against whole buckets of gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybridpar.compress import CODECS, read_policy
from hybridpar.compress.codec import TensorSpec
from hybridpar.compress.exchange import Exchange
from hybridpar.compress.sockets import SocketGroup
from hybridpar.sync.coded_reducer import CodedReducer
from hybridpar.sync.reducer import GradientReducer
from tests.compress.team import run_together
from tests.ranks import run_ranks
from tests.sync.test_shared_reducer import assert_equal, train

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


@pytest.mark.parametrize("workers", [2, 3])
def test_parameters_and_residuals_equal_those_of_buckets(workers: int) -> None:
    settings = SETTINGS if workers == 2 else [*SETTINGS[:3], SETTINGS[8]]
    direct = run_ranks(train, workers, settings, CodedReducer, shared_memory=False)
    assert_equal(settings, direct, run_ranks(train, workers, settings, GradientReducer, shared_memory=False))


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was() -> None:
    settings = [SETTINGS[0], SETTINGS[2], {"compress": "qsgd:bits=4"}, {"compress": "fp16"}, *SETTINGS[8:10]]
    direct = run_ranks(train, 2, settings, CodedReducer, 2, shared_memory=False)
    assert_equal(settings, direct, run_ranks(train, 2, settings, GradientReducer, 2, shared_memory=False))


def test_every_access_is_ordered_across_lanes() -> None:
    run_ranks(train, 2, [*SETTINGS[:3], SETTINGS[8]], CodedReducer, None, True, shared_memory=False)


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
