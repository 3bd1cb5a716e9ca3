"""Tests the codec signSGD with majority vote: votes, ties, scale, and bytes in both directions."""

from __future__ import annotations

import pytest
import torch

from tests.compress.team import Team

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = ("signsgd:level=one,least=1",)

SHAPES = {"w": (40, 50)}


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_most_votes_win_and_a_tie_is_plus(workers: int) -> None:
    team = Team("signsgd:level=one", SHAPES, workers)
    gradients = team.gradients(workers)
    votes = torch.stack([torch.where(own[0] >= 0, 1.0, -1.0) for own in gradients]).sum(0)
    assert torch.equal(team.step(gradients)[0], torch.where(votes >= 0, 1.0, -1.0))


def test_a_loud_worker_has_one_vote() -> None:
    team = Team("signsgd:level=one", SHAPES, 3)
    quiet, loud = torch.full((2000,), -1e-6), torch.full((2000,), 1e6)
    assert torch.equal(team.step([[quiet], [loud], [quiet]])[0], torch.full((2000,), -1.0))


def test_the_level_is_the_mean_magnitude_of_the_stripe() -> None:
    team = Team("signsgd", SHAPES, 2)
    gradients = team.gradients(0)
    out = team.step(gradients)[0].abs()
    magnitudes = torch.stack([own[0] for own in gradients]).abs()
    for part, own in zip(out.view(2, -1), magnitudes.view(2, 2, -1).unbind(1), strict=True):
        torch.testing.assert_close(part, torch.full((1000,), float(own.mean())))
