"""State of several workers comes together on the first, bit for bit, whatever it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridpar.pipeline.gathered import gather_on_main
from hybridpar.pipeline.world import World
from tests.ranks import run_ranks


def state_of(rank: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(rank)
    tensor = torch.randn(3 + rank, 5, generator=draw)
    return {
        "rank": rank,
        "steps": torch.tensor(7.0 + rank),
        "nothing": torch.empty(0, 4),
        "groups": [{"lr": 0.1, "names": ["a", f"b{rank}"]}, (tensor.T, None)],
        "types": [tensor.bfloat16(), tensor > 0, (100 * tensor).long(), tensor[:, ::2]],
        "image": torch.randn(2, 3, 4, 4, generator=draw).contiguous(memory_format=torch.channels_last),
    }


def gathered(world: World, ranks: list[int]) -> Any:
    found = gather_on_main(state_of(world.rank), ranks, world)
    return None if found is None else [same(one, state_of(rank)) for one, rank in zip(found, ranks, strict=True)]


def same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    if isinstance(other, (list, tuple)):
        return type(one) is type(other) and all(same(*both) for both in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_everything_arrives_as_it_was_in_the_order_that_was_asked_for(shared_memory):
    first, *others = run_ranks(gathered, 3, [0, 2], shared_memory=shared_memory)
    assert first == [True, True]
    assert others == [None, None]
    assert run_ranks(gathered, 3, [2, 1], shared_memory=shared_memory)[0] == [True, True]


def test_one_worker_has_what_it_has():
    assert run_ranks(gathered, 1, [0]) == [[True]]
