"""K-hat against its worked values, and its domain."""

from __future__ import annotations

import math

import pytest

from hybridpar.errors import UsageError
from hybridpar.optim.k_hat import KHat


def k_hat(samples=1440, per_sample_ms=0.122, exchange_ms=20.0, **more):
    figures = {"samples": samples, "per_sample_ms": per_sample_ms, "exchange_ms": exchange_ms}
    return KHat(**{**figures, "post_ms": 9.2, "update_ms": 9.0, **more})


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
    known = k_hat(samples / 2, per_sample_us / 1e3, exchange_ms)
    assert known.workers == pytest.approx(expected, abs=0.05)
    packed = k_hat(samples / 2, per_sample_us / 1e3, 16 * exchange_ms, ratio=16)
    assert packed.workers == pytest.approx(known.workers), "a codec divides the exchange"


@pytest.mark.parametrize("exchange_ms", [9.0, 8.9, 0.0])
def test_outside_of_its_domain_no_number_of_workers_saturates_the_link(exchange_ms):
    known = k_hat(exchange_ms=exchange_ms)
    assert known.workers == math.inf
    assert known.speedup(10**9) == pytest.approx((known.divided_ms + 9) / 9), "the fixed part bounds it (Amdahl)"


def test_at_that_number_computing_takes_as_long_as_communicating():
    known = k_hat()
    assert known.divided_ms / known.workers + known.update_ms == pytest.approx(20)
    assert known.speedup(2 * math.ceil(known.workers)) == pytest.approx(known.speedup(4 * math.ceil(known.workers)))


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"per_sample_ms": -1}, {"ratio": 0}, {"update_ms": -0.1}])
def test_impossible_figures_are_refused(wrong):
    with pytest.raises(UsageError):
        k_hat(**wrong)
