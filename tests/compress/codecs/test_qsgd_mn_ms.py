"""Tests the codec QSGD-MN-MS: workers agree on the finest grid that fits each element, and rounding has no bias."""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import TensorSpec, parse_codec
from hybridpar.errors import UsageError
from tests.compress.team import Team, same_bits

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = ("qsgd_mn_ms:levels=2/3/5/9,least=1",)

SHAPES = {"w": (50, 40)}


def test_each_element_has_the_error_of_the_finest_grid_that_fits_everywhere() -> None:
    team = Team("qsgd_mn_ms:levels=2/4/6", SHAPES, 3)
    gradients = team.gradients(0)
    values = torch.stack([own[0] for own in gradients])
    scale, top = float(values.abs().max()), values.abs().amax(0)
    error = (team.step(gradients)[0] - values.mean(0)).abs()
    for steps, finer in ((3, 15), (15, 63), (63, None)):
        fits = top * steps <= 3 * scale * 0.999
        only = fits & (top * finer > 3 * scale * 1.001) if finer else fits
        assert only.any()
        assert float(error[fits].max()) < scale / steps
        if finer:
            assert float(error[only].max()) > scale / finer


def test_two_scales_are_two_scales() -> None:
    many, two = Team("qsgd_mn_ms:levels=4/8", SHAPES, 3), Team("qsgd_mn_ts:bits=4,high=8", SHAPES, 3)
    for seed in range(2):
        gradients = many.gradients(seed)
        assert same_bits(many.step(gradients)[0], two.step(gradients)[0])
    assert many.exchanges[0].traffic == two.exchanges[0].traffic


def test_one_scale_is_one_scale() -> None:
    one, plain = Team("qsgd_mn_ms:levels=4", SHAPES, 2), Team("qsgd_mn:bits=4", SHAPES, 2)
    gradients = one.gradients(0)
    torch.testing.assert_close(one.step(gradients)[0], plain.step(gradients)[0])
    assert one.exchanges[0].traffic == plain.exchanges[0].traffic


def test_each_finer_grid_costs_one_bit() -> None:
    def total(text: str) -> int:
        return sum(entry.bytes for entry in parse_codec(text).bind(TensorSpec("w", (100, 80), workers=2)).rounds)

    assert total("qsgd_mn_ms:levels=4/6/8") == total("qsgd_mn_ms:levels=4/8") + 1000 == total("qsgd_mn:bits=4") + 2000


@pytest.mark.parametrize(
    ("levels", "rule"),
    [
        ("4/4", "from coarse to fine"),
        ("9/12", "the first of 8 at most"),
        ("0/3", "It must be at least 1"),
        ("4/17", "It must be at most 16"),
        ("4/", "a valid integer"),
        ("a/b", "a valid integer"),
    ],
)
def test_levels_that_are_none_are_refused(levels: str, rule: str) -> None:
    with pytest.raises(UsageError, match=rule):
        parse_codec(f"qsgd_mn_ms:levels={levels}")


@pytest.mark.parametrize(
    ("text", "workers", "most"),
    [("qsgd_mn:bits=8", 40_000, 7), ("qsgd_mn_ms:levels=8/9", 300_000, 4), ("grandk_mn:levels=3", 2_000_000, 2)],
)
def test_codes_that_cannot_be_added_exactly_are_refused_with_the_largest_that_can(
    text: str, workers: int, most: int
) -> None:
    with pytest.raises(UsageError, match=f"added up over {workers} workers") as caught:
        parse_codec(text).bind(TensorSpec("w", (100, 80), workers=workers))
    assert f"at most {most};" in caught.value.fix
