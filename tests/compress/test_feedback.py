"""Tests error feedback: residuals, decay, warm-up, and state.

Biased codecs need it to converge, and a residual that is slightly wrong is not noticed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridpar.compress import Coder
from hybridpar.errors import CheckpointError
from tests.compress.team import Team, equal, same_bits

SHAPES = {"w": (8, 40)}


def coder_of(team: Team, rank: int = 0) -> Coder:
    return team.coders("w")[rank]


def residual(team: Team) -> Tensor:
    return coder_of(team).unsent["worker"].left.clone()


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_what_is_left_out_is_left_out_of_the_sum_of_gradient_and_residual(decay: float) -> None:
    team = Team(f"onebit:decay={decay}", SHAPES, 1)
    (gradient,) = team.gradients(0)[0]
    team.step([[gradient]])
    first = residual(team)
    team.step([[gradient]])
    alone = Team("onebit", SHAPES, 1)
    alone.step([[gradient + decay * first]])
    torch.testing.assert_close(residual(team), residual(alone))


def test_warm_up_is_full_precision_and_then_it_ends() -> None:
    team, plain = Team("onebit:warmup=2", SHAPES, 3), Team("none", SHAPES, 3)
    full = plain.exchanges[0].traffic
    for seed in range(2):
        assert team.exchanges[0].traffic == full
        gradients = team.gradients(seed)
        assert same_bits(team.step(gradients)[0], plain.step(gradients)[0])
        assert not residual(team).any()
    assert team.exchanges[0].traffic.payload < full.payload / 2
    gradients = team.gradients(2)
    assert same_bits(team.step(gradients)[0], Team("onebit", SHAPES, 3).step(gradients)[0])


def test_state_of_another_size_is_refused_and_nothing_is_taken_over() -> None:
    team, other = Team("onebit", SHAPES, 2), Team("onebit", SHAPES, 3)
    team.step(team.gradients(0))
    other.step(other.gradients(1))
    before = other.snapshot()
    with pytest.raises(CheckpointError, match="the number of workers"):
        other.coders("w")[0].load_state_dict(team.coders("w")[0].state_dict())
    assert equal(other.snapshot(), before)


def test_error_feedback_pays() -> None:
    """Workers that always say the same are heard right on average with feedback, and wrong for ever without."""

    def error(text: str, steps: int) -> float:
        team = Team(text, SHAPES, 3)
        gradients = team.gradients(0)
        mean = (gradients[0][0] + gradients[1][0] + gradients[2][0]) / 3
        came = torch.zeros(320)
        for _ in range(steps):
            came += team.step(gradients)[0]
        return float((came / steps - mean).norm() / mean.norm())

    assert error("onebit:feedback=off", 12) == pytest.approx(error("onebit:feedback=off", 6))
    short, long = error("onebit", 10), error("onebit", 100)
    assert long < short / 5
    assert long < error("onebit:feedback=off", 6) / 5
