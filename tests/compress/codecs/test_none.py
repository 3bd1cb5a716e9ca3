"""Tests training without compression, and the casts to half precision: results, rounding, overflow."""

from __future__ import annotations

import pytest
import torch

from tests.compress.team import Team, same_bits

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "none:cast=bf16",
    "none:cast=fp16",
)

SHAPES = {"a": (5, 7), "b": (3,)}


@pytest.mark.parametrize("average", [True, False])
def test_no_compression_is_an_all_reduce(average: bool) -> None:
    team = Team("none", SHAPES, 3, average=average)
    gradients = team.gradients(0)
    for index, out in enumerate(team.step(gradients)):
        total = gradients[0][index] + gradients[1][index] + gradients[2][index]
        assert same_bits(out, total / 3 if average else total)


@pytest.mark.parametrize(("text", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_halves_are_rounded_once_per_worker_and_once_per_addition(text: str, dtype: torch.dtype) -> None:
    team = Team(text, SHAPES, 2)
    gradients = team.gradients(0)
    assert team.exchanges[0].traffic.payload == 2 * 38
    for index, out in enumerate(team.step(gradients)):
        halves = [(own[index] / 2).to(dtype) for own in gradients]
        assert same_bits(out, (halves[0] + halves[1]).float())


def test_the_sum_of_large_gradients_stays_in_the_range_of_float16() -> None:
    team = Team("fp16", SHAPES, 4, average=False)
    outs = team.step([[torch.full((35,), 60000.0), torch.full((3,), 1.0)] for _ in range(4)])
    assert outs[0].tolist() == pytest.approx([240000.0] * 35, rel=1e-3)


def test_what_leaves_the_range_is_infinite_for_all() -> None:
    outs = Team("fp16", SHAPES, 1).step([[torch.full((35,), 1e6), torch.zeros(3)]])
    assert outs[0].isinf().all()
    assert Team("bf16", SHAPES, 1).step([[torch.full((35,), 1e6), torch.zeros(3)]])[0].isfinite().all()
