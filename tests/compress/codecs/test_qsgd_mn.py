"""Tests the codec QSGD-MN: no bias, bounded error, no overflow of sums.

A single training run shows none of these.
"""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import TensorSpec
from hybridpar.compress.codec import CHUNK
from hybridpar.compress.memory import Scratch
from hybridpar.compress.noise import Noise
from tests.compress.codecs.test_qsgd import draws
from tests.compress.team import Team

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "qsgd_mn:bits=8,least=1",
    "qsgd_mn:meet=shard,bits=3",
    "qsgd_mn:rounding=zero,bits=3",
    "qsgd_mn:rounding=zero,feedback=on",
    "qsgd_mn:rounding=zero,meet=shard,feedback=on",
)

SHAPES = {"w": (50, 20)}


def test_variance_is_within_the_bound_and_workers_draw_apart() -> None:
    gradient = torch.randn(1000)
    scale, steps = float(gradient.abs().max()), 15
    alone = float(draws("qsgd_mn", [gradient], 300).var(0).sum())
    assert alone <= 1000 * scale**2 / (4 * steps**2)
    # Independent rounding of K workers has 1 / K of the variance.
    assert float(draws("qsgd_mn", [gradient] * 4, 300).var(0).sum()) == pytest.approx(alone / 4, rel=0.1)


@pytest.mark.parametrize("bits", range(1, 9))
def test_error_is_less_than_a_step_and_the_largest_is_exact(bits: int) -> None:
    gradient = torch.randn(1000)
    gradient[7], gradient[8] = 10, -10
    (found,) = draws(f"qsgd_mn:bits={bits}", [gradient], 1)
    assert float((found - gradient).abs().max()) < 10 / (2**bits - 1)
    assert found[7] == 10
    assert found[8] == -10


@pytest.mark.parametrize("workers", [2, 33])
def test_no_sum_overflows(workers: int) -> None:
    for value in (1.0, -1.0):
        for bits in (1, 4, 8):
            team = Team(f"qsgd_mn:bits={bits}", SHAPES, workers)
            assert team.step([[torch.full((1000,), value)]] * workers)[0].tolist() == [value] * 1000


def test_noise_is_uniform_and_fits_the_float() -> None:
    scratch = Scratch(torch.device("cpu"))
    noise = Noise(TensorSpec("w", (3,)))
    noise.begin(0)
    noise.draw(CHUNK * 7, scratch)
    assert len({noise.offset(CHUNK) for _ in range(9)}) > 1
    drawn = noise.ring
    assert 0 <= float(drawn.min()) <= float(drawn.max()) < 1
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(drawn.var()) == pytest.approx(1 / 12, abs=0.005)
    assert torch.equal((255 + drawn) - 255, drawn)
