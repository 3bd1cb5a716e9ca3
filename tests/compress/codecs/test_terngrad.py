"""Tests the codec TernGrad: three values without bias, exact sums of codes, clipping.

A sum that is rounded again would have more noise.
"""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import parse_codec
from tests.compress.team import Team

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = ("terngrad:clip=0,least=1",)

SHAPES = {"w": (40, 50)}


def test_codes_are_three_and_their_sum_is_exact() -> None:
    team = Team("terngrad:clip=0", SHAPES, 3)
    gradients = team.gradients(0)
    scale = max(float(own[0].abs().max()) for own in gradients)
    steps = team.step(gradients)[0] / scale * 3
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-5)
    assert set(steps.round().int().tolist()) == set(range(-3, 4))
    assert parse_codec("terngrad").biased
    assert not parse_codec("terngrad:clip=0").biased


def test_clipping_is_by_the_layer_and_makes_the_scale_smaller() -> None:
    gradient = torch.randn(2000)
    gradient[7] = 1000.0
    rms = float(gradient.square().mean().sqrt())
    out = Team("terngrad:clip=2.5", SHAPES, 1).step([[gradient]])[0]
    assert float(out.abs().max()) == pytest.approx(2.5 * rms, rel=1e-5)
    assert out[7] > 0, "what is clipped is sent for certain"
    even = torch.full((2000,), 3.0)
    assert torch.equal(Team("terngrad:clip=2.5", SHAPES, 2).step([[even], [even]])[0], even)
