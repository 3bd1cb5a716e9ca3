"""1-bit Adam's exchange against its Algorithm 1, written down again in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from hybridpar.compress import check_optimizer, parse_codec
from hybridpar.compress.quantised import cut_stripes
from hybridpar.errors import UsageError
from tests.compress.team import Team

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "onebit_adam:warm=2,beta=0.8,least=1",
    "onebit_adam:levels=norm,warm=1,feedback=off",
)

BETA = 0.9


def scaled_signs(values: list[float]) -> list[float]:
    level = math.sqrt(sum(value * value for value in values) / len(values))
    return [level if value >= 0 else -level for value in values]


class Algorithm:
    """Algorithm 1 after the first steps, for one parameter, whose stripes have a level each."""

    def __init__(self, count: int, workers: int, momentum: list[float]) -> None:
        self.stripes = cut_stripes(count, 8, workers)
        self.m = list(momentum)
        self.worker = [[0.0] * count for _ in range(workers)]
        self.server = [0.0] * count

    def compress(self, values: list[float]) -> list[float]:
        return [value for start, stop in self.stripes if stop > start for value in scaled_signs(values[start:stop])]

    def step(self, gradients: list[list[float]]) -> list[float]:
        total = [0.0] * len(self.m)
        for rank, gradient in enumerate(gradients):
            momentum = [BETA * m + (1 - BETA) * g for m, g in zip(self.m, gradient, strict=True)]
            v = [a + b for a, b in zip(momentum, self.worker[rank], strict=True)]
            sent = self.compress(v)
            self.worker[rank] = [a - b for a, b in zip(v, sent, strict=True)]
            total = [a + b for a, b in zip(total, sent, strict=True)]
        v = [a / len(gradients) + b for a, b in zip(total, self.server, strict=True)]
        self.m = self.compress(v)
        self.server = [a - b for a, b in zip(v, self.m, strict=True)]
        return self.m


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_algorithm(workers):
    count, warm = 2 * 40, 2
    team = Team(f"onebit_adam:levels=norm,warm={warm}", {"matrix": (2, 40)}, workers)
    momentum = torch.zeros(count)
    for step in range(warm):
        gradients = team.gradients(step)
        mean = torch.stack([own[0] for own in gradients]).mean(0)
        torch.testing.assert_close(team.step(gradients)[0], mean)
        momentum = BETA * momentum + (1 - BETA) * mean
    oracle = Algorithm(count, workers, momentum.tolist())
    for step in range(warm, warm + 4):
        gradients = team.gradients(step)
        expected = oracle.step([own[0].tolist() for own in gradients])
        torch.testing.assert_close(team.step(gradients)[0], torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_golden_vector():
    """One worker, so both quantisations are seen; the level is the norm over the root of 4: 2.5, then 2.5 again."""
    team = Team("onebit_adam:levels=norm,beta=0,least=1", {"matrix": (2, 2)}, 1)
    out = team.step([[torch.tensor([4.0, -3.0, 0.0, 0.0])]])[0]
    torch.testing.assert_close(out, torch.tensor([2.5, -2.5, 2.5, 2.5]))
    torch.testing.assert_close(team.unsent("matrix").float(), torch.tensor([1.5, -0.5, -2.5, -2.5]))
    # v = [2.5, -0.5, -2.5, -2.5] of norm sqrt(19)
    again = team.step([[torch.tensor([1.0, 0.0, 0.0, 0.0])]])[0]
    level = math.sqrt(19) / 2
    torch.testing.assert_close(again, level * torch.tensor([1.0, -1.0, -1.0, -1.0]))


def test_vectors_share_exact_momentum():
    team = Team("onebit_adam", {"bias": (6,)}, 3)
    first, second = team.gradients(0), team.gradients(1)
    means = [torch.stack([own[0] for own in each]).mean(0) for each in (first, second)]
    torch.testing.assert_close(team.step(first)[0], 0.1 * means[0])
    torch.testing.assert_close(team.step(second)[0], 0.9 * 0.1 * means[0] + 0.1 * means[1])


def test_first_steps_leave_no_residual_even_after_one_that_was_taken_back():
    team = Team("onebit_adam:warm=1", {"matrix": (4, 40)}, 2)
    team.meet(team.gradients(0))
    team.rollback()
    team.step(team.gradients(1))
    assert not team.unsent("matrix").any()


@pytest.mark.parametrize("option", ["warm=-1", "beta=1", "levels=norms", "least=0"])
def test_bad_options(option):
    with pytest.raises(UsageError, match=option.partition("=")[0]):
        parse_codec(f"onebit_adam:{option}")


def test_another_adam_is_refused():
    with pytest.raises(UsageError, match="betas"):
        check_optimizer(parse_codec("onebit_adam"), torch.optim.Adam([torch.zeros(1, requires_grad=True)]))
