"""Owners of stripes: their rule against a plain loop over whole gradients, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hybridpar.compress import check_optimizer, parse_codec
from hybridpar.compress.codecs.onebit_sgd import OwnerCoder, adagrad_
from hybridpar.compress.memory import State
from hybridpar.errors import CheckpointError, UsageError
from tests.compress.team import Team, equal

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "onebit_sgd:momentum=0,adagrad=off",
    "onebit_sgd:momentum=0,adagrad=off,bits=off",
    "onebit_sgd:adagrad=worker,warmup=2,level=off",
    "onebit_sgd:adagrad=after,memory=0.9,least=1",
)

SHAPES = {"matrix": (12, 40), "bias": (7,), "filters": (5, 3, 3, 3), "wide": (2, 50)}


def coder_of(team: Team, name: str, rank: int) -> OwnerCoder:
    coder = team.coders(name)[rank]
    assert isinstance(coder, OwnerCoder)
    return coder


@pytest.mark.parametrize("adagrad", ["off", "owner", "after"])
@pytest.mark.parametrize("memory", [1.0, 0.9])
def test_without_bits_owners_do_what_an_optimizer_does_to_the_whole(adagrad, memory):
    options = f"adagrad={adagrad},momentum=0.8,memory={memory},level=off,bits=off"
    team = Team(f"onebit_sgd:{options}", SHAPES, 3)
    squares, momenta = ([torch.zeros(math.prod(shape)) for shape in SHAPES.values()] for _ in range(2))

    def divided(index, values):
        squares[index] = memory * squares[index] + (1.0 if memory == 1 else 1 - memory) * values**2
        return values / (squares[index].sqrt() + 1e-12)

    for step in range(4):
        gradients = team.gradients(step)
        for index, out in enumerate(team.step(gradients)):
            update = torch.stack([own[index] for own in gradients]).mean(0).flatten()
            if adagrad == "owner":
                update = divided(index, update)
            update = momenta[index] = 0.8 * momenta[index] + update
            if adagrad == "after":
                update = divided(index, update)
            torch.testing.assert_close(out.flatten(), update, rtol=1e-4, atol=1e-5)


def test_one_worker_quantises_its_own_gradient_twice():
    bits = Team("onebit_sgd:adagrad=off,momentum=0", SHAPES, 1)
    plain = Team("onebit:meet=shard", SHAPES, 1)
    for step in range(3):
        gradients = bits.gradients(step)
        outs, expected = bits.step(gradients), plain.step(gradients)
        for name, out, other in zip(SHAPES, outs, expected, strict=True):
            torch.testing.assert_close(out, other, msg=name)


def test_each_worker_keeps_its_stripe_of_the_state():
    team = Team("onebit_sgd", SHAPES, 3)
    team.step(team.gradients(0))
    for name, shape in SHAPES.items():
        assert sum(_kept_values(team, name)) == 2 * math.prod(shape)
    assert _kept_values(team, "matrix") == [2 * 160] * 3


def _kept_values(team, name):
    states = [coder_of(team, name, rank).state_dict() for rank in range(3)]
    return [state["squares"].numel() + state["momentum"].numel() for state in states]


def test_adagrad_by_hand():
    squares = State(torch.zeros(3))
    first = adagrad_(torch.tensor([3.0, -4.0, 0.0]), squares, level=False)
    torch.testing.assert_close(first, torch.tensor([1.0, -1.0, 0.0]))
    squares.commit()
    again = adagrad_(torch.tensor([4.0, 3.0, 0.0]), squares, level=False)  # h = 25 and 25
    torch.testing.assert_close(again, torch.tensor([0.8, 0.6, 0.0]))
    # Both were divided by 5; made as long as before, they are what they were.
    levelled = adagrad_(torch.tensor([4.0, 3.0, 0.0]), squares)
    torch.testing.assert_close(levelled, torch.tensor([4.0, 3.0, 0.0]))
    assert not adagrad_(torch.zeros(3), State(torch.zeros(3))).any()


def test_worker_scales_before_it_quantises():
    team = Team("onebit_sgd:adagrad=worker,level=off,momentum=0,bits=off", {"matrix": (2, 40)}, 2)
    gradients = team.gradients(0)
    (out,) = team.step(gradients)
    expected = sum((own[0] / own[0].abs() for own in gradients), start=torch.zeros(80)) / 2
    torch.testing.assert_close(out, expected)


def test_first_steps_are_in_full_precision_and_momentum_goes_on():
    warm, plain = Team("onebit_sgd:warmup=2", SHAPES, 3), Team("onebit_sgd:bits=off", SHAPES, 3)
    for step in range(2):
        for left, right in zip(warm.step(warm.gradients(step)), plain.step(plain.gradients(step)), strict=True):
            assert torch.equal(left, right)
    assert all(not warm.unsent(name).any() for name in SHAPES)
    assert equal(coder_of(warm, "matrix", 0).message_state(), coder_of(plain, "matrix", 0).message_state())
    sent = warm.exchanges[0].traffic.wire
    assert sent < plain.exchanges[0].traffic.wire / 2
    out = warm.step(warm.gradients(2))[0]
    assert not torch.equal(out, plain.step(plain.gradients(2))[0])
    assert len(out.view(12, 40).unique(dim=1).T) <= 12 * 2 + 40  # rows hold two values each
    assert all(len(row.unique()) <= 2 for row in out.view(12, 40))


def test_momentum_per_sample():
    team = Team("onebit_sgd:adagrad=off,bits=off,momentum=0.81", {"bias": (4,)}, 2)
    for exchange in team.exchanges:
        exchange.coders[0].set_samples(0.5)
    ones = [[torch.ones(4)], [torch.ones(4)]]
    team.step(ones)
    torch.testing.assert_close(team.step(ones)[0], torch.full((4,), 1.9))


def test_momentum_is_kept_once():
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match=r"momentum=0\.9 in SGD"):
        check_optimizer(parse_codec("onebit_sgd"), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    check_optimizer(parse_codec("onebit_sgd"), torch.optim.SGD(model.parameters(), lr=0.1))
    check_optimizer(parse_codec("onebit_sgd:momentum=0"), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    check_optimizer(parse_codec("onebit"), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def test_state_of_another_shape_is_refused():
    coder = coder_of(Team("onebit_sgd:bits=off", {"matrix": (4, 40)}, 2), "matrix", 0)
    other = coder_of(Team("onebit_sgd:bits=off", {"matrix": (8, 40)}, 2), "matrix", 0)
    with pytest.raises(CheckpointError, match="has shape"):
        coder.load_state_dict(other.state_dict())
