"""Tests the repetition of a measurement until its results agree.

Its results are kept for months.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count

import pytest

from hybridpar.machine.steady import relative_distance, repeat_until_steady


def spread(values: Sequence[float]) -> float:
    return max(values) - min(values) if len(values) > 1 else math.inf


def test_distance_is_relative_and_knows_what_is_no_number() -> None:
    assert relative_distance(2.0, 3.0) == relative_distance(3.0, 2.0) == pytest.approx(0.5)
    assert relative_distance(0.0, 0.0) == 0.0
    assert relative_distance(1.0, 0.0) == relative_distance(1.0, -1.0) == relative_distance(1.0, math.nan) == math.inf
    assert relative_distance(math.nan, math.nan) == math.inf


def test_it_stops_as_soon_as_results_agree() -> None:
    values = iter([1.0, 1.05, 7.0])
    assert repeat_until_steady(lambda: next(values), spread, 0.1) == ([1.0, 1.05], pytest.approx(0.05))
    assert next(values) == 7.0


def test_it_stops_where_results_never_agree() -> None:
    values = count(1.0)
    results, noise = repeat_until_steady(lambda: next(values), spread, 0.1, most=4)
    assert (results, noise) == ([1.0, 2.0, 3.0, 4.0], 3.0)
