"""Computes ratios of times with bootstrap confidence intervals, and the verdicts that tables may use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Of two methods at parity, the one may be slower than the other by no more than this.
PARITY_AT_MOST = 1.03
#: Confidence in percent, and number of resamples, of the bootstrap.
CONFIDENCE = 95.0
RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """Time of one method over time of another: below 1, the first is faster.

    Args:
        median: Median of the ratios of single rounds.
        low: Lower end of its 95 % interval.
        high: Upper end.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap_ratio(times: Sequence[float], over: Sequence[float], seed: int = 0) -> Ratio:
    """Median of the per-round ratios, with a percentile-bootstrap interval (Efron 1979).

    Ratios are taken round by round first, so whatever slowed a whole round down cancels.

    Args:
        times: Time of the one method in each round, any unit.
        over: Time of the other in the same rounds.
        seed: Seed of the resampling.

    Raises:
        ValueError: The lengths differ, there is no round, or a time is not positive.
    """
    if len(times) != len(over) or not times:
        raise ValueError(f"{len(times)} rounds over {len(over)} rounds: both need the same, at least one")
    if not all(math.isfinite(time) and time > 0 for time in (*times, *over)):
        raise ValueError("every time must be positive and finite")
    ratios = np.asarray(times, dtype=np.float64) / np.asarray(over, dtype=np.float64)
    generator = np.random.default_rng(seed)
    # In portions: where rounds are short and many, all resamples at once would need gigabytes.
    portion = max(1, 2**20 // len(ratios))
    medians = np.empty(RESAMPLES)
    for first in range(0, RESAMPLES, portion):
        count = min(portion, RESAMPLES - first)
        drawn = generator.integers(len(ratios), size=(count, len(ratios)))
        medians[first : first + count] = np.median(ratios[drawn], axis=1)
    tail = (100 - CONFIDENCE) / 2
    low, high = np.percentile(medians, [tail, 100 - tail])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def verdict(ratio: Ratio, target: float | None = None, *, loaded: bool = False) -> str:
    """The word for a ratio.

    Args:
        ratio: A method's time over its baseline's.
        target: What the ratio was promised to be at most; None where nothing was promised.
        loaded: Whether rounds had to be kept although the machine was busy.

    Returns:
        With a target: "met" or "missed", by the median. Without:
        "faster" or "slower" where the whole interval lies on one side of 1, "parity" where it holds 1 and ends at 1.03
        at most, else "unclear". On a busy machine always "loaded".
    """
    if loaded:
        return "loaded"
    if target is not None:
        return "met" if ratio.median <= target else "missed"
    if ratio.high < 1:
        return "faster"
    if ratio.low > 1:
        return "slower"
    return "parity" if ratio.high <= PARITY_AT_MOST else "unclear"
