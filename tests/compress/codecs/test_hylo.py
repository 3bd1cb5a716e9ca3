"""Tests the codec Hylo: rate by layer size, choice of the filters to send, and the longest time a filter waits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.compress import TensorSpec
from hybridpar.compress.codecs.hylo import Hylo, choose
from hybridpar.compress.codecs.twobit import TwoBit
from tests.compress.team import Team, same_bits, unsent

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "hylo:least=150,delay=3,power=0.3,factor=1,cap=0.8",
    "hylo:least=150,rate=0.5,cast=bf16",
    "hylo:least=150,feedback=off",
)

CONV = {"w": (20, 4, 3, 3)}


@pytest.mark.parametrize(("times", "share"), [(1, 1.0), (4, 0.5), (16, 0.25), (100, 0.1), (1000, 0.1)])
def test_the_rate_falls_with_the_size(times: int, share: float) -> None:
    codec = Hylo(least=1000)
    assert codec.filters((1000, times, 1, 1)) == math.ceil(1000 * share)


def test_each_kind_of_layer_has_its_codec() -> None:
    codec = Hylo()
    assert not codec.fits((50_000,))
    assert not codec.fits((500, 100))
    assert codec.fits((500, 101))
    assert codec.fits((128, 64, 3, 3))
    assert codec.fits((64, 64, 3, 3, 3))
    assert not codec.fits((512, 1, 3, 3))
    assert not codec.fits((100, 100, 100))
    dense = TensorSpec("w", (500, 101), workers=2)
    assert codec.coder(dense).rounds == TwoBit().coder(dense).rounds
    scores, values = codec.bind(TensorSpec("w", (128, 64, 3, 3))).rounds
    assert scores.bytes == 8 * 128
    assert values.bytes == 4 * codec.filters((128, 64, 3, 3)) * 576


def test_the_most_important_filters_of_all_workers_go_and_the_rest_stays() -> None:
    team = Team("hylo:least=45,delay=99", CONV, 2)  # a quarter of 20 filters
    gradients = [[torch.zeros(720)] for _ in range(2)]
    for rank, filters in enumerate(({3: 5.0, 7: 1.0, 8: 1.0}, {8: 2.0, 11: 4.0, 0: 0.1, 1: 3.0})):
        for index, value in filters.items():
            gradients[rank][0].view(20, 36)[index] = value
    out = team.step(gradients)[0].view(20, 36)
    # Sums of mean squares: 3 has 25, 11 has 16, 1 has 9, 8 has 1 + 4, 7 has 1, 0 has 0.01
    assert out.any(1).nonzero().view(-1).tolist() == [1, 3, 7, 8, 11]
    assert (out[8] == 1.5).all()
    assert (out[3] == 2.5).all()
    first, second = team.coders("w")
    assert not unsent(first).any()
    assert unsent(second).view(20, 36).any(1).nonzero().view(-1).tolist() == [0]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 12), st.data())
def test_no_filter_waits_longer_than_said(filters: int, delay: int, data: st.DataObject) -> None:
    least = math.ceil(filters / (delay + 1))
    count = data.draw(st.integers(least, filters))
    scores = torch.arange(filters, dtype=torch.float64)  # always the same ones are important
    waited = torch.zeros(filters, dtype=torch.int64)
    for _ in range(4 * (delay + 1) + 5):
        chosen = choose(scores, waited, count, delay)
        assert len(chosen.unique()) == count
        waited += 1
        waited[chosen] = 0
        assert int(waited.max()) <= delay


def test_urgent_filters_take_no_more_places_than_they_must() -> None:
    scores = torch.tensor([9.0, 8, 7, 0, 0, 0], dtype=torch.float64)
    # Filters 3, 4 and 5 are due within 0, 1 and 2 steps: with 1 place per step one must go now, with 2 places too.
    assert choose(scores, torch.tensor([0, 0, 0, 5, 4, 3]), 1, 5).tolist() == [3]
    assert choose(scores, torch.tensor([0, 0, 0, 5, 4, 3]), 2, 5).tolist() == [0, 3]
    assert choose(scores, torch.tensor([0, 0, 0, 4, 4, 4]), 2, 5).tolist() == [0, 3]
    assert choose(scores, torch.tensor([0, 0, 0, 3, 3, 3]), 2, 5).tolist() == [0, 1]


def test_with_everything_sent_it_is_the_mean() -> None:
    team, plain = Team("hylo:least=45,rate=1", CONV, 3), Team("none", CONV, 3)
    assert same_bits(team.step(team.gradients(0))[0], plain.step(plain.gradients(0))[0])
