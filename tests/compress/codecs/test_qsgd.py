"""Tests QSGD and NUQSGD: no bias, the variance of the paper, levels in units of a bucket's norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.compress.team import Team

#: For tests/compress/test_every_codec.py: each option of the codecs with another value than its own.
VARIANTS = (
    "qsgd:bits=2,bucket=64,least=1",
    "qsgd:bits=8,meet=shard",
    "qsgd:rounding=zero,feedback=on,meet=shard",
    "nuqsgd:bits=2,bucket=64,least=1",
    "nuqsgd:bits=8,meet=shard",
    "nuqsgd:rounding=zero",
    "nuqsgd:rounding=zero,feedback=on",
)


def draws(text: str, gradients: list[Tensor], times: int) -> Tensor:
    """What many steps make of the same gradients, one step per row."""
    team = Team(text, {"w": (50, gradients[0].numel() // 50)}, len(gradients))
    return torch.stack([team.step([[gradient] for gradient in gradients])[0] for _ in range(times)]).double()


def norms(gradient: Tensor, bucket: int) -> Tensor:
    """The norm of the bucket of each element."""
    return torch.cat([torch.full((len(part),), float(part.norm())) for part in gradient.split(bucket)])


@pytest.mark.parametrize(("bits", "bucket"), [(2, 1000), (4, 100), (8, 512)])
def test_variance_is_within_the_bound_of_the_paper(bits: int, bucket: int) -> None:
    """E |C(v) - v|**2 <= min(d / s**2, sqrt(d) / s) |v|**2: Alistarh et al. 2017, lemma 3.1."""
    gradient, steps = torch.randn(1000), 2 ** (bits - 1) - 1
    found = draws(f"qsgd:bits={bits},bucket={bucket}", [gradient], 50)
    square = float((found - gradient).square().sum(1).mean())
    assert 0 < square <= min(bucket / steps**2, bucket**0.5 / steps) * float(gradient.square().sum())


def test_workers_draw_apart() -> None:
    gradient = torch.randn(1000)
    alone, four = (float(draws("qsgd:meet=gather", [gradient] * k, 200).var(0).sum()) for k in (1, 4))
    assert four == pytest.approx(alone / 4, rel=0.1)


@pytest.mark.parametrize("bucket", [7, 64, 1000, 5000])
def test_values_are_whole_steps_of_their_buckets_norm(bucket: int) -> None:
    gradient = torch.randn(1000) * torch.logspace(-3, 3, 1000)
    (found,) = draws(f"qsgd:bits=4,bucket={bucket}", [gradient], 1)
    steps = found / norms(gradient, bucket) * 7
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
    assert float((steps - gradient / norms(gradient, bucket) * 7).abs().max()) < 1
    assert bool(((found == 0) | (found.sign() == gradient.sign())).all())


# ------------------------------------------------------------------------------------------------------------ NUQSGD


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_values_are_the_powers_of_two_around_them(bits: int) -> None:
    gradient = torch.randn(1000) * torch.logspace(-3, 0, 1000)
    (found,) = draws(f"nuqsgd:bits={bits},bucket=1000", [gradient], 1)
    ratios, true = (values.double() / float(gradient.norm()) for values in (found, gradient))
    sent = ratios != 0
    exponents = ratios[sent].abs().log2()
    torch.testing.assert_close(exponents, exponents.round(), rtol=0, atol=1e-5)
    least = 2.0 ** (2 - 2 ** (bits - 1))
    assert float(exponents.min()) >= exponents.new_tensor(least).log2() - 1e-5
    below = torch.where(true.abs() < least, 0.0, 2.0 ** true.abs().log2().floor())
    above = torch.where(true.abs() < least, least, 2 * below)
    assert bool(((ratios.abs() - below).abs().minimum((ratios.abs() - above).abs()) < 1e-6 * above).all())
    assert bool((ratios[sent].sign() == true[sent].sign()).all())


def test_variance_is_smaller_than_that_of_even_levels() -> None:
    """Most elements of a large bucket are small beside its norm, and the levels are denser there."""
    gradient = torch.randn(1000)
    even, powers = (
        float(draws(f"{name}:bits=4,bucket=1000", [gradient], 100).var(0).sum()) for name in ("qsgd", "nuqsgd")
    )
    assert 0 < powers < even / 2
    assert float(norms(gradient, 1000)[0]) > 10 * float(gradient.abs().mean())
