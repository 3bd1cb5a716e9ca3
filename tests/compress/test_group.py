"""Tests the exchange of compressed gradients between processes against the one that a single process simulates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridpar.compress import CODECS, Exchange, TensorSpec, TorchGroup, bind, parse_codec
from tests.compress.team import Team, same_bits
from tests.ranks import run_ranks

SHAPES = {"bias": (7,), "matrix": (40, 33), "conv": (13, 16, 3, 3), "empty": (0, 5)}
STEPS = 3


def exchange_over_gloo(world: Any, texts: list[str]) -> list[list[torch.Tensor]]:
    """Results of the last step, by text and parameter."""
    group, results = TorchGroup(), []
    assert (group.rank, group.size) == (world.rank, world.size)
    for text in texts:
        codec = parse_codec(text)
        specs = [TensorSpec(name, shape, world.rank, world.size) for name, shape in SHAPES.items()]
        exchange = Exchange([bind(codec, spec) for spec in specs])
        for seed in range(STEPS):
            gradients = Team("none", SHAPES, world.size).gradients(seed)[world.rank]
            expected = exchange.traffic
            exchange.run(group, gradients, gradients)
            assert exchange.traffic == expected
            exchange.commit()
        results.append(gradients)
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_processes_get_what_one_process_gets(size: int) -> None:
    texts = [*CODECS, "hylo:least=150,delay=3", "qsgd_mn:meet=shard"]
    ranks = run_ranks(exchange_over_gloo, size, texts)
    for index, text in enumerate(texts):
        team = Team(text, SHAPES, size)
        for seed in range(STEPS):
            expected = team.step(team.gradients(seed))
        for place, name in enumerate(SHAPES):
            for rank in range(1, size):
                assert same_bits(ranks[0][index][place], ranks[rank][index][place]), (text, name)
            if size == 2:  # with more, gloo adds in another order
                assert same_bits(ranks[0][index][place], expected[place]), (text, name)
