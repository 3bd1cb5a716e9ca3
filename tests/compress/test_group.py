"""Tests the exchange of compressed gradients between processes against the one that a single process simulates."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridpar.compress import CODECS, Collective, Exchange, TensorSpec, TorchGroup, bind, parse_codec
from hybridpar.compress.group import open_group
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
            assert exchange.run(group, gradients, gradients) == expected
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


def meet_over_gloo(world: Any) -> list[Any]:
    group = TorchGroup()
    words = torch.tensor([7, 12, 255]) - world.rank
    by_gathering = words.clone()
    group.all_reduce(words, Collective.AND)
    group._and_by_gathering(by_gathering)  # the way of NCCL, which has no bitwise operations
    largest = torch.tensor([1.0, float("inf") if world.rank else -2.0])
    group.all_reduce(largest, Collective.MAX)
    return [words.tolist(), by_gathering.tolist(), largest.tolist()]


def test_words_and_maxima_meet() -> None:
    for words, by_gathering, largest in run_ranks(meet_over_gloo, 2):
        assert words == by_gathering == [7 & 6, 12 & 11, 255 & 254]
        assert largest == [1.0, float("inf")]


def opened_while_another_still_connects(world: Any, flag: str) -> bool:
    make = dist.new_group

    def slow(*args: Any, **options: Any) -> Any:
        group = make(*args, **options)
        time.sleep(0.5)  # in which the other one would come back, if it did not wait
        Path(flag).touch()
        return group

    with pytest.MonkeyPatch.context() as patched:
        if world.rank == 0:
            patched.setattr(dist, "new_group", slow)
        open_group([0, 1], timeout=30)
    return Path(flag).exists()


def test_no_worker_goes_on_while_another_still_connects(tmp_path: Path) -> None:
    assert run_ranks(opened_while_another_still_connects, 2, str(tmp_path / "flag")) == [True, True]
