"""The curve of plans over the number of workers."""

from __future__ import annotations

from hybridpar.planner.scaling import curve_lines, scaling_curve, worker_counts
from tests.planner.small import chain, cluster, inputs


def test_the_curve_holds_every_number_and_more_workers_never_hurt_the_best_plan():
    asked = inputs(chain([(5, 10), (5, 10)], [(512, 512), (512, 512)]), cluster(6), batch=24)
    points = scaling_curve(asked)
    assert [point.workers for point in points] == [1, 2, 3, 4, 5, 6]
    best = [point.step_ms for point in points if point.step_ms is not None]
    assert best == sorted(best, reverse=True)
    assert all(point.plain_ms is not None and point.step_ms <= point.plain_ms for point in points)
    assert len(curve_lines(points)) == 1 + 6


def test_points_of_a_large_curve_are_powers_of_two():
    assert worker_counts(48) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 48]
    assert worker_counts(1) == [1]
    assert worker_counts(100) == [1, 2, 4, 8, 16, 32, 64, 100]
