"""Tests the codec QSGD-MN-TS, which has two grids: smaller errors of small elements, and rounding without bias."""

from __future__ import annotations

import torch

from tests.compress.team import Team

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = ("qsgd_mn_ts:bits=2,high=5,least=1",)

SHAPES = {"w": (50, 40)}


def limit(scale: float, coarse: int, fine: int) -> float:
    return scale * coarse / fine


def test_small_elements_have_the_error_of_the_fine_grid() -> None:
    team = Team("qsgd_mn_ts:bits=4,high=8", SHAPES, 3)
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
