"""Which batch size is selected, by CNTK's procedure, and what a step means when it changes."""

from __future__ import annotations

import math

import pytest

from hybridpar.config import OptimizerConfig
from hybridpar.optim.schedule import Leg, Pace, rate_factor
from hybridpar.run.batch_search import bounds, search_batch_size


def search(losses: dict[int, float], **options) -> tuple[int, list[int]]:
    tried = []

    def trial(size: int) -> float:
        tried.append(size)
        return losses.get(size, losses[max(losses)])

    chosen, seen = search_batch_size(trial, min(losses), **{"largest": 1 << 20, **options})
    assert list(seen) == tried
    return chosen, tried


def test_sizes_grow_by_the_root_of_two_in_multiples():
    size, tried = search({256: 1.0}, largest=2048)
    assert tried == [256, 384, 512, 704, 1024, 1472]
    assert size == tried[-1]


def test_the_last_size_that_is_as_good_is_chosen():
    assert search({256: 1.0, 384: 1.009, 512: 1.02, 704: 0.5}) == (384, [256, 384, 512])
    assert search({256: 1.0, 384: 1.009, 512: 1.02, 704: 3.0}, margin=0.05)[0] == 512


def test_the_first_size_sets_the_loss_to_compare_with():
    assert search({256: 1.0, 384: 0.5, 512: 0.9, 704: 2.0})[0] == 512


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_fails(bad):
    assert search({256: 1.0, 384: bad, 512: 0.1}) == (256, [256, 384])
    assert search({256: bad, 384: 0.1}) == (256, [256])


def test_bounds():
    assert bounds(256) == (256, 1 << 20)
    assert bounds(256, 1024) == (512, 2048)
    assert bounds(256, 300) == (256, 600)
    assert bounds(256, rate_fell=0.25) == (512, 1 << 20)
    assert bounds(256, 256, rate_fell=0.25) == (512, 512)
    assert bounds(100, multiple=64)[0] == 128
    assert bounds(1 << 22) == (1 << 20, 1 << 20)


CONFIG = OptimizerConfig(lr=0.1, lr_schedule="cosine:warmup=1")


def test_one_batch_size_is_the_usual_schedule():
    pace = Pace(4, [Leg(0, 0, 64, 10)])
    for step in range(40):
        assert pace.factor(step, CONFIG) == rate_factor(step, 40, 10, CONFIG)
    assert pace.total_steps() == 40


def test_rates_follow_samples():
    pace = Pace(4, [Leg(0, 0, 64, 10)])
    pace.begin(Leg(20, 2, 128, 5))
    assert pace.total_steps() == 30
    assert pace.samples == 2
    for step in range(10):
        # A step of twice the samples is two of the old, at the rate that the first of these would have had.
        assert pace.factor(20 + step, CONFIG) == pytest.approx(2 * rate_factor(20 + 2 * step, 40, 10, CONFIG))
    assert pace.factor(19, CONFIG) == rate_factor(19, 40, 10, CONFIG)
    again = Pace.of(4, pace.plain())
    assert again == pace
    pace.begin(Leg(20, 2, 96, 7))
    assert pace.legs == [Leg(0, 0, 64, 10), Leg(20, 2, 96, 7)]
