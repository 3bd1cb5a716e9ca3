"""What processes tell each other arrives as it was, and is read without running code."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from hybridpar.comm.world import World
from hybridpar.compress import parse_codec
from hybridpar.errors import HybridparError, UsageError
from hybridpar.formats.messages import pack, unpack
from hybridpar.run.directory import RunFolder
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
    found = world.gather_on_main(state_of(world.rank), ranks)
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


@pytest.mark.parametrize(
    "item",
    [
        None,
        [1, -0.5, float("inf"), True, "text", b"x", (), ((1,), [2]), {3, 4}, frozenset({5})],
        {"a": {1: (2, 3)}, (4, "b"): None},
        {"tensor": 1},
        Path("runs/one"),
        torch.bfloat16,
        RunFolder(Path("runs/one"), None, restarted=True),
        parse_codec("topk:rate=0.1"),
    ],
)
def test_values_come_back_as_they_were(item):
    found = unpack(pack(item))
    assert found == item
    assert type(found) is type(item)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_a_message_may_hold_empty_tensors_alone(dtype):
    item = [torch.zeros(0, 3, dtype=dtype), torch.zeros(0, dtype=dtype)]
    assert same(unpack(pack(item)), item)


def test_numbers_of_numpy_become_plain_ones_and_errors_stay_errors():
    assert unpack(pack([numpy.float64(0.5), torch.Size([2, 3])])) == [0.5, (2, 3)]
    error = unpack(pack(UsageError("what", "why", "fix")))
    assert (type(error), error.what, error.why, error.fix) == (UsageError, "what", "why", "fix")


@pytest.mark.parametrize("item", [object(), bytearray(b"x"), random.Random(0), ValueError("no"), print])
def test_what_is_not_plain_is_refused_by_the_sender(item):
    with pytest.raises(TypeError, match="a message cannot hold"):
        pack([item])


def message(text: Any, facts: Any = (), tail: bytes = b"") -> bytes:
    head = json.dumps([json.dumps(text), facts]).encode()
    return struct.pack("!Q", len(head)) + head + tail


@pytest.mark.parametrize(
    "data",
    [
        b"",
        struct.pack("!Q", 1 << 60),
        message([], [[[1 << 40], "float32"]]),
        message([], [[[2], "no_dtype"]], bytes(8)),
        message([], (), b"more"),
        message({"tensor": 3}),
        message({"object": ["os:system", []]}),
        message({"object": ["hybridpar.formats.messages:sys.modules", []]}),
        message({"object": ["hybridpar.errors:shortened", [["value", "a"]]]}),
        message({"object": ["hybridpar.comm.flight:FlightRecorder", []]}),
        message({"object": ["hybridpar.run.directory:RunFolder", [["wrong", 1]]]}),
        message({"tuple": [], "set": []}),
        message({"tuple": 3}),
        message({"map": [[1]]}),
        pickle.dumps([1, 2]),
    ],
    ids=itertools.count(),
)
def test_no_message_is_an_error_and_nothing_else(data):
    with pytest.raises(ValueError, match="no message"):
        unpack(data)


def test_any_bytes_are_a_message_or_an_error():
    draw, whole = random.Random(0), pack({"a": [1, torch.arange(3)], "b": UsageError("x")})
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            unpack(data[: draw.randint(0, len(data))] if draw.random() < 0.3 else data)
        except ValueError:
            pass
        except HybridparError as error:
            raise AssertionError(data) from error
