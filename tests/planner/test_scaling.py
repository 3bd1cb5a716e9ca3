"""K-hat against its worked values, its domain, and the curve beside it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hybridpar.errors import UsageError
from hybridpar.planner.explain import curve_lines
from hybridpar.planner.scaling import KHat, k_hat, scaling_curve, worker_counts
from tests.planner.small import chain, cluster, inputs


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
    assert "do" not in plain.told()
    assert "0.26" in plain.told()
    assert packed.workers == pytest.approx(7.2, abs=0.05)


@pytest.mark.parametrize("exchange_ms", [9.0, 8.9, 0.0])
def test_outside_of_its_domain_no_number_of_workers_saturates_the_link(exchange_ms):
    known = KHat(1440, 0.122, exchange_ms, post_ms=9.2, update_ms=9.0)
    assert not known.saturates
    assert known.workers == math.inf
    assert "unbounded by communication" in known.told()
    assert known.speedup(10**9) == pytest.approx((known.divided_ms + 9) / 9), "the fixed part bounds it (Amdahl)"


def test_at_that_number_computing_takes_as_long_as_communicating():
    known = KHat(1440, 0.122, 20, post_ms=9.2, update_ms=9.0)
    assert known.divided_ms / known.workers + known.update_ms == pytest.approx(20)
    assert known.speedup(2 * math.ceil(known.workers)) == pytest.approx(known.speedup(4 * math.ceil(known.workers)))


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"per_sample_ms": -1}, {"ratio": 0}, {"update_ms": -0.1}])
def test_impossible_figures_are_refused(wrong):
    with pytest.raises(UsageError):
        KHat(**{"samples": 1, "per_sample_ms": 1, "exchange_ms": 1, **wrong})


def test_the_equation_of_a_search_reads_its_inputs():
    asked = inputs(chain([(1, 3)], [(1000, 250)]), cluster(4, 1e8, throughput=2.0, memory_bandwidth=1e10), batch=16)
    known = k_hat(asked)
    assert known.samples == 16
    assert known.per_sample_ms == pytest.approx((1 + 3) / 4 / 2)
    assert known.exchange_ms == pytest.approx(2 * 1e6 / 1e8 * 1e3)
    assert known.update_ms == pytest.approx(5 * 1e6 / 1e10 * 1e3)
    measured = k_hat(replace(asked, profile=replace(asked.profile, update_ms=3.0)))
    assert measured.update_ms == pytest.approx(3.0 / 2)


def test_the_curve_holds_every_number_and_more_workers_never_hurt_the_best_plan():
    asked = inputs(chain([(5, 10), (5, 10)], [(512, 512), (512, 512)]), cluster(6), batch=24)
    points = scaling_curve(asked)
    assert [point.workers for point in points] == [1, 2, 3, 4, 5, 6]
    best = [point.step_ms for point in points if point.step_ms is not None]
    assert best == sorted(best, reverse=True)
    assert all(point.plain_ms is not None and point.step_ms <= point.plain_ms for point in points)
    lines = curve_lines(points, k_hat(asked))
    assert len(lines) == 1 + 6 + 1
    assert "1-bit SGD" in lines[-1]


def test_points_of_a_large_curve_are_powers_of_two():
    assert worker_counts(48) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 48]
    assert worker_counts(1) == [1]
    assert worker_counts(100) == [1, 2, 4, 8, 16, 32, 64, 100]
