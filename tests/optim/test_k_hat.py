"""K-hat against its worked values, and its domain."""

from __future__ import annotations

import math

import pytest

from hybridpar.errors import UsageError
from hybridpar.optim.k_hat import KHat


@pytest.mark.parametrize(
    ("samples", "per_sample_us", "exchange_ms", "expected"),
    [
        (2880, 122, 10, 184.9),
        (2880, 122, 12, 61.6),
        (2880, 122, 20, 16.8),
        (1024, 137, 20, 7.2),
        (1024, 137, 320, 0.26),
    ],
)
def test_the_paper_s_measurements_give_its_worker_counts(samples, per_sample_us, exchange_ms, expected):
    # Half of the samples: the paper's double buffering computes one half while it sends the other.
    known = KHat(samples / 2, per_sample_us / 1e3, exchange_ms, post_ms=9.2, update_ms=9.0)
    assert known.unclamped == pytest.approx(expected, abs=0.05)
    assert known.workers == max(1.0, known.unclamped)


def test_a_codec_divides_the_exchange():
    plain, packed = (KHat(512, 0.137, 320, ratio, 9.2, 9.0) for ratio in (1, 16))
    assert plain.workers == 1
    assert packed.workers == pytest.approx(7.2, abs=0.05)


@pytest.mark.parametrize("exchange_ms", [9.0, 8.9, 0.0])
def test_outside_of_its_domain_no_number_of_workers_saturates_the_link(exchange_ms):
    known = KHat(1440, 0.122, exchange_ms, post_ms=9.2, update_ms=9.0)
    assert not known.saturates
    assert known.workers == math.inf
    assert known.speedup(10**9) == pytest.approx((known.divided_ms + 9) / 9), "the fixed part bounds it (Amdahl)"


def test_at_that_number_computing_takes_as_long_as_communicating():
    known = KHat(1440, 0.122, 20, post_ms=9.2, update_ms=9.0)
    assert known.divided_ms / known.workers + known.update_ms == pytest.approx(20)
    assert known.speedup(2 * math.ceil(known.workers)) == pytest.approx(known.speedup(4 * math.ceil(known.workers)))


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"per_sample_ms": -1}, {"ratio": 0}, {"update_ms": -0.1}])
def test_impossible_figures_are_refused(wrong):
    with pytest.raises(UsageError):
        KHat(**{"samples": 1, "per_sample_ms": 1, "exchange_ms": 1, **wrong})
