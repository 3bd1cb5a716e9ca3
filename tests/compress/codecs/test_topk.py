"""Tests the codec top-k against the definition in textbooks: elements, residuals, bytes, options.

Other codecs are measured against it.
"""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import Collective, TensorSpec, parse_codec
from hybridpar.compress.codecs.topk import TopK
from hybridpar.compress.sparse import Picks, share
from hybridpar.errors import UsageError
from tests.compress.team import Team, same_bits

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "topk:rate=0.3,least=1",
    "topk:rate=0.02,cast=bf16",
    "topk:feedback=off",
    "topk:residual=bf16",
)

SHAPES = {"w": (40, 50)}


def test_it_is_the_textbook() -> None:
    """v = g + r; the k largest |v| of each worker go, and the mean over the workers is what all get."""
    team = Team("topk:rate=0.05", SHAPES, 3)
    residuals = [torch.zeros(2000) for _ in range(3)]
    for seed in range(4):
        gradients = team.gradients(seed)
        total = torch.zeros(2000)
        for residual, (gradient,) in zip(residuals, gradients, strict=True):
            residual += gradient
            places = residual.abs().argsort(descending=True)[:100]
            total[places] += residual[places] / 3
            residual[places] = 0
        torch.testing.assert_close(team.step(gradients)[0], total, rtol=0, atol=1e-6)
    torch.testing.assert_close(team.unsent("w").float(), torch.stack(residuals).sum(0), rtol=0, atol=1e-5)


def test_what_is_left_out_shrinks_as_the_bound_says() -> None:
    team = Team("topk:rate=0.1", SHAPES, 1)
    (gradient,) = team.gradients(0)[0]
    team.step([[gradient]])
    assert float(team.unsent("w").square().sum()) <= 0.9 * float(gradient.square().sum())


def test_what_the_cast_rounds_off_is_kept() -> None:
    team = Team("topk:rate=0.5,cast=bf16", SHAPES, 1)
    (gradient,) = team.gradients(0)[0]
    out = team.step([[gradient]])[0]
    assert same_bits(out, out.bfloat16().float())
    assert not same_bits(out[out != 0], gradient[out != 0])
    assert same_bits(out + team.unsent("w").float(), gradient)


def test_places_and_values_have_their_sizes() -> None:
    def size(shape: tuple[int, ...], workers: int = 2, text: str = "topk") -> int:
        (entry,) = parse_codec(text).bind(TensorSpec("w", shape, workers=workers)).rounds
        assert entry.collective is Collective.GATHER
        return entry.bytes

    assert size((100, 80)) == 80 * (4 + 2)
    assert size((1000, 80)) == 800 * (4 + 4)
    assert size((100, 80), text="topk:cast=fp16") == 80 * (2 + 2)


@pytest.mark.parametrize("workers", [1, 2, 8, 40])
def test_where_pairs_take_more_than_the_whole_the_whole_travels(workers: int) -> None:
    """1/20 of the values at 8 bytes, from all others, against twice 4 bytes: as much from 20 workers on."""
    picks = Picks.of(TensorSpec("w", (400, 400), workers=workers), 0.05)
    assert picks.dense == (workers > 20)
    assert Picks.of(TensorSpec("w", (400, 400), workers=workers), 1.0).dense


def test_both_ways_say_the_same() -> None:
    sparse, dense = Team("topk:rate=0.4", SHAPES, 3), Team("topk:rate=0.5", SHAPES, 3)
    assert sparse.coders("w")[0].rounds[0].collective is Collective.GATHER
    assert dense.coders("w")[0].rounds[0].collective is Collective.SUM
    for team, count in ((sparse, 800), (dense, 1000)):
        gradients = team.gradients(1)
        total = torch.zeros(2000)
        for (gradient,) in gradients:
            places = gradient.abs().argsort(descending=True)[:count]
            total[places] += gradient[places] / 3
        torch.testing.assert_close(team.step(gradients)[0], total, rtol=0, atol=1e-6)


def test_shares_are_rounded_up_and_never_nothing() -> None:
    assert [share(0.01, count) for count in (1, 99, 100, 101, 250)] == [1, 1, 1, 2, 3]
    assert share(1, 7) == 7


@pytest.mark.parametrize("rate", [0.0, 1.5, -0.1, float("nan")])
def test_shares_that_are_none_are_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="above 0 and at most 1"):
        TopK(rate=rate)
