"""Tests the codec `sparseloco` against its definition: tiles, bins and their means, bytes, options."""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import TensorSpec, bind, parse_codec
from hybridpar.errors import UsageError
from tests.compress.team import Team

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = ("sparseloco:rate=0.1,chunk=64,least=1", "sparseloco:rate=1,chunk=50,least=1")


def _definition(v: torch.Tensor, picked: int, tile: int) -> torch.Tensor:
    """C(v), value by value."""
    places = [
        start + int(place)
        for start in range(0, len(v), tile)
        for place in v[start : start + tile].abs().argsort(descending=True)[:picked]
    ]
    sent = v[places].double()
    m, s = sent.mean(), sent.std(correction=0)
    borders = torch.stack([m - 1.5 * s, m, m + 1.5 * s])
    bins = torch.bucketize(sent, borders, right=True)
    out = torch.zeros_like(v)
    for place, number in zip(places, bins, strict=True):
        out[place] = sent[bins == number].mean()
    return out


def test_it_is_the_papers_with_the_sum_over_all_workers() -> None:
    """v = 0.95 r + g; the residual is what of v was not decoded."""
    team = Team("sparseloco:rate=0.0625,chunk=128,least=1,decay=0.95", {"w": (30, 40)}, 3)
    residuals = [torch.zeros(1200) for _ in range(3)]
    for seed in range(4):
        gradients = team.gradients(seed)
        total = torch.zeros(1200)
        for residual, (gradient,) in zip(residuals, gradients, strict=True):
            v = 0.95 * residual + gradient
            sent = _definition(v, 8, 128)
            total += sent / 3
            residual.copy_(v - sent)
        torch.testing.assert_close(team.step(gradients)[0], total, rtol=0, atol=1e-5)
    torch.testing.assert_close(team.unsent("w").float(), torch.stack(residuals).sum(0), rtol=0, atol=1e-4)


def test_a_value_takes_two_bits_and_its_place_twelve() -> None:
    (entry,) = bind(parse_codec("sparseloco"), TensorSpec("w", (512, 4096), workers=2)).rounds
    values = 512 * 64
    assert entry.bytes == 16 + values * 2 // 8 + values * 12 // 8
    assert 4 * 512 * 4096 / entry.bytes > 140


def test_values_that_are_all_equal_are_exact() -> None:
    team = Team("sparseloco:rate=0.5,chunk=16,least=1,feedback=off", {"w": (4, 8)}, 1)
    out = team.step([[torch.full((32,), -0.3)]])[0]
    assert sorted(set(out.tolist())) == pytest.approx([-0.3, 0.0])


@pytest.mark.parametrize("options", ["rate=0", "rate=1.5", "chunk=1", "least=0"])
def test_options_out_of_range_are_refused(options: str) -> None:
    with pytest.raises(UsageError):
        parse_codec(f"sparseloco:{options}")
