"""Tests the codec DeMo: the cosine transform, what is taken out of the momentum, signs, options."""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import check_optimizer, parse_codec
from hybridpar.compress.codecs.demo import dct_matrix
from hybridpar.errors import UsageError
from tests.compress.team import Team

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "demo:rate=0.1,momentum=0.9,chunk=8,level=off,least=1",
    "demo:rate=1,level=one,chunk=4,cast=bf16",
)

SHAPES = {"w": (40, 50)}
CPU = torch.device("cpu")


def test_the_transform_is_orthonormal() -> None:
    torch.testing.assert_close(
        dct_matrix(4, CPU) @ torch.tensor([1.0, 2, 3, 5]), torch.tensor([5.5, -2.883724, 0.5, -0.429111])
    )
    matrix = dct_matrix(64, CPU)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(64), rtol=0, atol=1e-5)


def test_what_is_sent_and_what_is_kept_is_all_that_was_there() -> None:
    team = Team("demo:momentum=0.9,chunk=8,rate=0.1,level=off", SHAPES, 2)
    kept = torch.zeros(2000)
    for seed in range(4):
        gradients = team.gradients(seed)
        came = 2 * team.step(gradients)[0]
        before = 0.9 * kept + gradients[0][0] + gradients[1][0]
        kept = sum(coder.state_dict()["momentum"][:2000] for coder in team.coders("w"))
        torch.testing.assert_close(came + kept, before, rtol=0, atol=1e-4)


def test_the_largest_components_of_each_tile_are_sent() -> None:
    """One tile of 2 x 2: of a constant and a small wave only the constant is sent."""
    team = Team("demo:chunk=2,rate=0.25,level=off,least=1", {"w": (2, 2)}, 1)
    out = team.step([[torch.tensor([1.1, 0.9, 1.1, 0.9])]])[0]
    torch.testing.assert_close(out, torch.ones(4))
    torch.testing.assert_close(
        team.coders("w")[0].state_dict()["momentum"], torch.tensor([0.1, -0.1, 0.1, -0.1]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(("level", "value"), [("one", 1.0), ("mean", None)])
def test_steps_are_signs(level: str, value: float | None) -> None:
    gradients = Team("none", SHAPES, 2).gradients(0)
    signs = Team(f"demo:level={level}", SHAPES, 2).step(gradients)[0]
    found = Team("demo:level=off", SHAPES, 2).step(gradients)[0]
    torch.testing.assert_close(signs, found.sign() * (found.abs().mean() if value is None else value))


def test_everything_sent_without_momentum_is_the_mean() -> None:
    team = Team("demo:rate=1,momentum=0,level=off", SHAPES, 3)
    gradients = team.gradients(1)
    torch.testing.assert_close(team.step(gradients)[0], sum(own[0] for own in gradients) / 3)


@pytest.mark.parametrize("option", ["rate=0", "momentum=1.5", "chunk=1", "level=two", "least=0"])
def test_values_out_of_range(option: str) -> None:
    with pytest.raises(UsageError, match=option.replace("=", "=")):
        parse_codec(f"demo:{option}")


def test_the_optimizer_must_have_no_momentum() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    check_optimizer(parse_codec("demo"), torch.optim.SGD([weight], lr=0.1))
    with pytest.raises(UsageError, match="momentum=0"):
        check_optimizer(parse_codec("demo"), torch.optim.SGD([weight], lr=0.1, momentum=0.9))
