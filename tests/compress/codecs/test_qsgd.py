"""Tests the codec QSGD: no bias, the variance of its paper, levels that are shares of a bucket's norm, bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.compress.team import Team

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "qsgd:bits=2,bucket=64,least=1",
    "qsgd:bits=8,meet=shard",
    "qsgd:rounding=zero,feedback=on,meet=shard",
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


def test_an_element_alone_in_its_bucket_is_exact() -> None:
    gradient = torch.zeros(1000)
    gradient[::100] = torch.randn(10)
    assert torch.equal(draws("qsgd:bucket=100", [gradient], 1)[0].float(), gradient)


def test_norms_do_not_overflow() -> None:
    (found,) = draws("qsgd:bits=8", [torch.full((1000,), 3e38)], 1)
    assert found.isfinite().all()
    assert float(found.mean()) == pytest.approx(3e38, rel=0.05)
