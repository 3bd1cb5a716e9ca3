"""Tests the codec PowerSGD against identities of the power method.

A plausible bug breaks at least one of them.
"""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import TensorSpec, parse_codec
from hybridpar.compress.codecs.powersgd import LowRank, PowerSgd, orthonormal
from hybridpar.compress.feedback import FeedbackCoder
from hybridpar.errors import CheckpointError
from tests.compress.team import Team, same_bits

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "powersgd:rank=3,gain=0",
    "powersgd:feedback=off",
    "powersgd:rank=1,cast=bf16",
)

SHAPES = {"w": (30, 40)}


def test_full_rank_is_exact() -> None:
    team = Team("powersgd:rank=99,gain=0", {"w": (8, 40), "v": (40, 8)}, 3)
    gradients = team.gradients(0)
    for index, out in enumerate(team.step(gradients)):
        mean = (gradients[0][index] + gradients[1][index] + gradients[2][index]) / 3
        torch.testing.assert_close(out, mean, rtol=0, atol=1e-5)
    for name in ("w", "v"):
        # What is kept is how the workers differ, and adds up to nothing.
        assert float(team.unsent(name).abs().max()) < 1e-5


def test_compressing_is_linear_in_the_gradient_for_one_factor() -> None:
    """Factors that are added are the factors of the mean: K workers are one that has their mean."""
    many, one = Team("powersgd:feedback=off", SHAPES, 4), Team("powersgd:feedback=off", SHAPES, 1)
    for seed in range(3):
        gradients = many.gradients(seed)
        mean = sum(own[0] for own in gradients) / 4
        torch.testing.assert_close(many.step(gradients)[0], one.step([[mean]])[0], rtol=1e-4, atol=1e-5)


def test_a_low_rank_is_found_by_a_few_steps() -> None:
    left, right = torch.randn(30, 2), torch.randn(2, 40)
    matrix = left @ right + 0.01 * torch.randn(30, 40)
    team = Team("powersgd:rank=2,gain=0,feedback=off", SHAPES, 1)
    for _ in range(6):
        (out,) = team.step([[matrix.view(-1)]])
    u, s, v = torch.linalg.svd(matrix)
    best = (u[:, :2] * s[:2]) @ v[:2]
    torch.testing.assert_close(out.view(30, 40), best, rtol=0, atol=1e-3)


def test_columns_are_orthonormal_also_of_matrices_of_lower_rank() -> None:
    for matrix in (torch.randn(50, 4), torch.zeros(50, 4), torch.ones(50, 4), 1e-30 * torch.randn(50, 4)):
        columns = orthonormal([matrix.t()])[0].t()
        torch.testing.assert_close(columns.t() @ columns, torch.eye(4), rtol=0, atol=1e-5)
    assert orthonormal([torch.full((2, 5), torch.nan)])[0].isnan().all()


def test_a_gradient_that_was_zero_is_not_stuck_at_zero() -> None:
    team = Team("powersgd:feedback=off,gain=0", SHAPES, 2)
    team.step([[torch.zeros(1200)]] * 2)
    gradient = torch.outer(torch.randn(30), torch.randn(40)).view(-1)
    for _ in range(2):
        (out,) = team.step([[gradient]] * 2)
    torch.testing.assert_close(out, gradient, rtol=1e-3, atol=1e-4)


def test_the_residual_is_what_is_not_in_the_result() -> None:
    team = Team("powersgd:gain=0", SHAPES, 2)
    gradients = team.gradients(0)
    (out,) = team.step(gradients)
    for rank, coder in enumerate(team.coders("w")):
        assert isinstance(coder, FeedbackCoder)
        torch.testing.assert_close(coder.residual("worker"), gradients[rank][0] - out)


@pytest.mark.parametrize(("rank", "ratio"), [(1, 256), (2, 128), (4, 64)])
def test_bytes_are_those_of_the_factors(rank: int, ratio: int) -> None:
    rounds = PowerSgd(rank).bind(TensorSpec("w", (512, 512, 1, 1))).rounds
    assert ratio * sum(entry.bytes for entry in rounds) == 4 * 512 * 512


def test_what_is_compressed() -> None:
    codec = parse_codec("powersgd:rank=2")
    assert codec.fits((64, 64, 3, 3))
    assert not codec.fits((64,))
    assert not codec.fits((8, 8))
    assert not codec.fits((0, 64))
    assert codec.fits((8, 16))
    assert not codec.fits((6, 12))  # exactly twice as small is not enough


def test_factors_of_16_bits_neither_overflow_nor_vanish() -> None:
    for scale in (1e-4, 1.0, 1e3):
        team = Team("powersgd:rank=30,gain=0,cast=fp16", SHAPES, 4)
        (gradient,) = team.gradients(0, scale)[0]
        (out,) = team.step([[gradient]] * 4)
        assert float((out - gradient).norm() / gradient.norm()) < 5e-3


def test_the_first_factor_is_drawn_alike_by_all_and_apart_for_parameters() -> None:
    specs = [TensorSpec("w", (30, 40), rank, 2) for rank in range(2)] + [TensorSpec("v", (30, 40))]
    first, second, other = (LowRank(spec, 2).state_dict()["q"] for spec in specs)
    assert same_bits(first, second)
    assert not same_bits(first, other)


def test_a_factor_of_another_rank_is_refused() -> None:
    spec = TensorSpec("w", (30, 40))
    with pytest.raises(CheckpointError, match="rank of the run"):
        LowRank(spec, 2).load_state_dict(LowRank(spec, 3).state_dict())


def test_feedback_recovers_what_one_rank_cannot_say() -> None:
    """The mean over steps of a constant gradient becomes that gradient, however low the rank."""
    team = Team("powersgd:rank=1,gain=0", SHAPES, 2)
    gradients = team.gradients(0)
    mean = (gradients[0][0] + gradients[1][0]) / 2
    total = torch.zeros(1200)
    errors = []
    for step in range(1, 201):
        total += team.step(gradients)[0]
        errors.append(float((total / step - mean).norm() / mean.norm()))
    assert errors[-1] < 0.2 < 0.8 < errors[0]
