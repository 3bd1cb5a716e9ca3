"""Tests the codec 1-bit SGD against numbers that follow from its paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridpar.compress import parse_codec
from hybridpar.compress.codecs.onebit import RowSigns
from hybridpar.compress.memory import Memory, Scratch
from hybridpar.compress.quantised import Quantiser
from tests.compress.team import Team, same_bits, unsent

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "onebit:feedback=off",
    "onebit:warmup=2",
    "onebit:decay=0.9",
    "onebit:least=1,meet=shard",
    "onebit:least=1,meet=gather",
)

SCRATCH = Scratch(torch.device("cpu"))

GOLDEN = torch.tensor([[0.5, -0.25, 0.75, -0.75], [-1, 2, -3, 0.5], [0, 0, 0, 0]])


def encoded(quantiser: Quantiser, values: Tensor, residual: Memory | None = None) -> Tensor:
    shaped = quantiser.view(values)
    message = torch.empty(quantiser.size(shaped.shape), dtype=torch.uint8)
    quantiser.encode(shaped, residual or Memory(), message, SCRATCH)
    return message


def decoded(quantiser: Quantiser, message: Tensor, count: int) -> Tensor:
    out = torch.full((count,), torch.nan)
    quantiser.read(message, quantiser.view(out), SCRATCH, 1, add=False)
    return out


def test_golden_vector() -> None:
    team = Team("onebit:least=1", {"w": (3, 4)}, 1)
    coder = team.coders("w")[0]
    (first,) = team.step([[GOLDEN.view(-1)]])
    assert first.view(3, 4).tolist() == [[0.625, -0.5, 0.625, -0.5], [-2, 1.25, -2, 1.25], [0, 0, 0, 0]]
    assert unsent(coder).view(3, 4).tolist() == [[-0.125, 0.25, 0.125, -0.25], [1, 0.75, -1, -0.75], [0, 0, 0, 0]]
    # The second step tells the residual g + r - C(g + r) from the misprinted g - C(g + r).
    (second,) = team.step([[GOLDEN.view(-1)]])
    third = 5 / 12
    expected = [[third, third, third, -1], [1.375, 1.375, -2.125, -2.125], [0, 0, 0, 0]]
    torch.testing.assert_close(second.view(3, 4), torch.tensor(expected))
    left = [[-third / 10, -third, third * 1.1, 0], [-1.375, 1.375, -1.875, 1.875], [0, 0, 0, 0]]
    torch.testing.assert_close(unsent(coder).view(3, 4), torch.tensor(left))


def test_with_an_owner_the_gradient_is_quantised_twice() -> None:
    team = Team("onebit:feedback=off,meet=shard", {"w": (6, 50)}, 1)
    (gradient,) = team.gradients(0)[0]
    quantiser = RowSigns((6, 50))
    once = decoded(quantiser, encoded(quantiser, gradient), 300)
    twice = decoded(quantiser, encoded(quantiser, once), 300)
    assert same_bits(team.step([[gradient]])[0], twice)


@pytest.mark.parametrize(("draw", "error"), [("normal", 1 - 2 / math.pi), ("laplace", 0.5)])
def test_squared_error_of_one_shot(draw: str, error: float) -> None:
    shape = (20, 5000)
    values = torch.randn(shape) if draw == "normal" else torch.distributions.Laplace(0.0, 1.0).sample(shape)
    quantiser = RowSigns(shape)
    found = decoded(quantiser, encoded(quantiser, values.view(-1)), values.numel())
    assert float((found.view(shape) - values).square().sum() / values.square().sum()) == pytest.approx(error, rel=0.02)


def test_what_is_compressed() -> None:
    codec = parse_codec("onebit")
    assert codec.fits((64, 3, 7, 7))
    assert not codec.fits((64,))
    assert not codec.fits((64, 1, 3, 3))
    assert not codec.fits((64, 31))
    assert not codec.fits((0, 64))
