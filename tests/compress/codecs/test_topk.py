"""Tests the codec top-k against the definition in textbooks: elements, residuals, bytes, options.

Other codecs are measured against it.
"""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import Collective
from hybridpar.compress.codecs.topk import largest
from hybridpar.compress.memory import Scratch
from tests.compress.team import Team, same_bits

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "topk:rate=0.3,least=1",
    "topk:rate=0.02,cast=bf16",
    "topk:feedback=off",
    "topk:scope=bucket,least=1",
    "topk:scope=bucket,rate=0.6,cast=bf16",
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


def test_of_a_bucket_the_largest_of_all_layers_are_sent() -> None:
    """As top-k of all of them in one vector, whose layers differ in size and in how large their gradients are."""
    shapes = {"small": (50, 40), "large": (100, 400), "last": (30, 50)}
    team, flat = Team("topk:scope=bucket,rate=0.05", shapes, 3), Team("topk:rate=0.05", {"all": (1, 43_500)}, 3)
    sizes = [2000, 40_000, 1500]
    for seed in range(3):
        gradients = team.gradients(seed)
        for own in gradients:
            own[1] *= 0.3
        together = [[torch.cat(own)] for own in gradients]
        for left, right in zip(team.step(gradients), flat.step(together)[0].split(sizes), strict=True):
            assert same_bits(left, right)


KINDS = {
    "normal": lambda values: values,
    "one value": lambda values: torch.full_like(values, -2),
    "steps": lambda values: values.round(),
    "nan": lambda values: values.where(torch.rand_like(values) < 0.975, torch.nan),
    "few": lambda values: values.where(torch.rand_like(values) > 0.9999, 0),
    # What the sample sees is all larger than the rest.
    "striped": lambda values: values.where(torch.arange(values.numel()) % 127 > 0, 100 * values),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_finds_the_same_elements_as_a_sort(kind: str) -> None:
    values = KINDS[kind](torch.randn(200_000))
    for picked in (1, 200, 2000, 100_000, 200_000):
        places = largest(values, picked, Scratch(torch.device("cpu")))
        assert places.numel() == picked
        assert bool((places.diff() > 0).all())
        expected = values.abs().topk(picked).values
        assert same_bits(values[places].abs().sort(descending=True).values, expected)
