"""Tests the codec NUQSGD: no bias, levels that are powers of two, less variance than QSGD has with as many bytes."""

from __future__ import annotations

import pytest
import torch

from tests.compress.codecs.test_qsgd import draws, norms

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "nuqsgd:bits=2,bucket=64,least=1",
    "nuqsgd:bits=8,meet=shard",
    "nuqsgd:rounding=zero",
    "nuqsgd:rounding=zero,feedback=on",
)


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
