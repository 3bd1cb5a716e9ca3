"""Tests QSGD-MN with one grid, two and several, GRandK-MN and TernGrad: no bias, bounded errors, exact sums.

A single training run shows none of these.
"""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import TensorSpec, parse_codec
from hybridpar.errors import UsageError
from tests.compress.codecs.test_qsgd import draws
from tests.compress.team import Team

#: For tests/compress/test_every_codec.py: each option of the codecs with another value than its own.
VARIANTS = (
    "qsgd_mn:bits=8,least=1",
    "qsgd_mn:meet=shard,bits=3",
    "qsgd_mn:rounding=zero,bits=3",
    "qsgd_mn:rounding=zero,feedback=on",
    "qsgd_mn:rounding=zero,meet=shard,feedback=on",
    "qsgd_mn_ts:bits=2,high=5,least=1",
    "qsgd_mn_ms:levels=2/3/5/9,least=1",
    "grandk_mn:rate=0.3,levels=4/8,least=1",
    "grandk_mn:feedback=off",
    "terngrad:clip=0,least=1",
)

SHAPES = {"w": (50, 20)}
MORE = {"w": (50, 40)}


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


def limit(scale: float, coarse: int, fine: int) -> float:
    return scale * coarse / fine


def test_small_elements_have_the_error_of_the_fine_grid() -> None:
    team = Team("qsgd_mn_ts:bits=4,high=8", MORE, 3)
    for seed in range(3):
        gradients = team.gradients(seed)
        (out,) = team.step(gradients)
        values = torch.stack([own[0] for own in gradients])
        scale = float(values.abs().max())
        error = (out - values.mean(0)).abs()
        small = (values.abs() <= 0.999 * limit(scale, 15, 255)).all(0)
        assert small.any()
        assert float(error.max()) < scale / 15
        assert float(error[small].max()) < scale / 255
        assert float(error[~small].max()) > scale / 255, "large ones are on the coarse grid"


def test_unbiased_also_at_the_limit_between_the_grids() -> None:
    times, coarse, fine = 2000, 3, 63
    edge = limit(1.0, coarse, fine)
    gradient = torch.linspace(edge - 1 / fine, edge + 1 / fine, 100)
    gradient[0] = 1.0
    # Each element stands there 40 times, so that a step is 40 draws of it.
    team = Team("qsgd_mn_ts:bits=2,high=6,least=1", {"w": (40, 100)}, 1)
    found = [team.step([[gradient.repeat(40)]])[0].view(40, 100) for _ in range(times // 40)]
    mean = torch.cat(found).double().mean(0)
    fine_ones = gradient.abs() * fine <= coarse
    assert float((mean - gradient)[fine_ones].abs().max()) < 5 * (1 / (2 * fine)) / times**0.5
    assert float((mean - gradient)[~fine_ones].abs().max()) < 5 * (1 / (2 * coarse)) / times**0.5


def test_each_element_has_the_error_of_the_finest_grid_that_fits_everywhere() -> None:
    team = Team("qsgd_mn_ms:levels=2/4/6", MORE, 3)
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


def test_codes_are_three_and_their_sum_is_exact() -> None:
    team = Team("terngrad:clip=0", MORE, 3)
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
    out = Team("terngrad:clip=2.5", MORE, 1).step([[gradient]])[0]
    assert float(out.abs().max()) == pytest.approx(2.5 * rms, rel=1e-5)
    assert out[7] > 0, "what is clipped is sent for certain"
    even = torch.full((2000,), 3.0)
    assert torch.equal(Team("terngrad:clip=2.5", MORE, 2).step([[even], [even]])[0], even)


@pytest.mark.parametrize("text", ["grandk_mn:rate=0.15", "grandk_mn:rate=0.15,levels=4/8,feedback=off"])
def test_each_element_goes_once_in_each_turn_of_the_queue(text: str) -> None:
    team = Team(text, SHAPES, 2)
    ones = [[torch.ones(1000)] for _ in range(2)]
    orders = []
    for _ in range(2):
        sent = torch.stack([team.step(ones)[0] != 0 for _ in range(7)])  # 150 of 1000 at a time
        assert (sent.sum(0) == 1).all()
        assert set(sent.sum(1).tolist()) == {142, 143}
        orders.append(sent)
    assert not torch.equal(*orders), "the queue is drawn anew"
