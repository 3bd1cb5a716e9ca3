"""Repeats a measurement on a busy machine until its results agree, a bounded number of times.

What comes out is kept for later only where they did agree: a time that a second measurement does not confirm says what
else ran at that moment. Kernels, profiles of models, probes of devices and links all decide so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")

#: Measurements that lie further apart than this are used for once at most, with a warning, and not kept.
MOST_NOISE = 0.25


def relative_distance(first: float, other: float) -> float:
    """How far two positive numbers lie apart: the larger over the smaller, minus one; infinite for what
    is no number.
    """
    if first == other:
        return 0.0
    if not (0 < first < math.inf and 0 < other < math.inf):
        return math.inf
    return max(first, other) / min(first, other) - 1


def halves_apart(times: Sequence[float]) -> float:
    """`relative_distance` of the medians of every other time and of the rest; infinite for fewer than two."""
    if len(times) < 2:
        return math.inf
    return relative_distance(statistics.median(times[0::2]), statistics.median(times[1::2]))


def repeat_until_steady(
    measure: Callable[[], _T],
    noise: Callable[[Sequence[_T]], float],
    limit: float,
    most: int = 3,
) -> tuple[list[_T], float]:
    """Repeat a measurement until its results agree."""
    results = [measure()]
    while not (spread := noise(results)) <= limit and len(results) < most:
        results.append(measure())
    return results, spread
