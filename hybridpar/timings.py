"""Why: the summary speaks of the run, so its figures are averages over workers and over steps, taken in one way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Timings:
    """This worker's own share of the figures that the summary averages over the workers, one value per step."""

    compute_ms: list[float] = field(default_factory=list)
    exposed_sync_ms: list[float] = field(default_factory=list)
    data_ms: list[float] = field(default_factory=list)

    def medians(self, warmup: int = 3) -> dict[str, float]:
        """Median of each, without the first steps where there are others."""
        return {key: _median(values[warmup:] or values) for key, values in vars(self).items()}


class RunningMean:
    """Mean of a value over samples; non-finite values are left out."""

    def __init__(self) -> None:
        self._sum, self._weight = 0.0, 0

    def add(self, value: float, weight: int) -> None:
        """Take a value for `weight` samples into account."""
        if math.isfinite(value):
            self._sum += value * weight
            self._weight += weight

    @property
    def value(self) -> float:
        """The mean so far; NaN before the first finite value."""
        return self._sum / self._weight if self._weight else math.nan


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
