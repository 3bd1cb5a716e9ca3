"""Why: the summary speaks of the run, so its figures are taken in one way, over workers and over steps.

In a pipeline the next step is issued while one still runs, so the host cannot see how long a step had to wait for its
data: that is the time in which this worker's lanes had nothing to do between two steps.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hybridpar.pipeline.recorder import StepSpans


@dataclass(frozen=True)
class StepTimes:
    """One step of a worker: `step_ms` is the sum of the other three.

    Attributes:
        compute_ms: All but the next two.
        exposed_sync_ms: Waiting for gradients that computation did not hide.
        data_ms: Waiting for data.
    """

    compute_ms: float
    exposed_sync_ms: float
    data_ms: float

    @property
    def step_ms(self) -> float:
        """Time from the end of the step before to the end of this one."""
        return self.compute_ms + self.exposed_sync_ms + self.data_ms


class StepClock:
    """Divides the time between the ends of steps, for steps that are issued ahead.

    Args:
        clock: Seconds, the clock of the steps' origins.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._end: float | None = None
        self._away: list[tuple[float, float]] = []

    @contextmanager
    def away(self) -> Iterator[None]:
        """Inside, the host does something else than to train; lanes that run dry meanwhile do not wait for data."""
        start = self._clock()
        try:
            yield
        finally:
            self._away.append((start, self._clock()))

    def divide(self, spans: StepSpans, host_data_ms: float) -> StepTimes:
        """The times of the next step.

        Args:
            spans: What this worker did in it.
            host_data_ms: For the first step, which no other precedes: how long the host waited for its data.
        """
        start, end = spans.origin, spans.origin + spans.step_ms / 1e3
        if self._end is None:
            data = host_data_ms / 1e3
        else:
            data = max(0.0, start - self._end)
            for left, back in self._away:
                data -= max(0.0, min(back, start) - max(left, self._end))
            start = max(start, self._end)  # on other lanes it may have begun before the last one ended
        self._away = [(left, back) for left, back in self._away if back > end]
        self._end = max(end, start)
        busy = 1e3 * (self._end - start)
        exposed = min(spans.exposed_sync_ms, busy)
        return StepTimes(busy - exposed, exposed, max(0.0, 1e3 * data))


@dataclass
class Timings:
    """This worker's own share of the figures that the summary averages over the workers, one value per step."""

    compute_ms: list[float] = field(default_factory=list)
    exposed_sync_ms: list[float] = field(default_factory=list)
    data_ms: list[float] = field(default_factory=list)
    sync_ms: list[float] = field(default_factory=list)
    bubble: list[float] = field(default_factory=list)

    def add(self, times: StepTimes, spans: StepSpans | None = None) -> None:
        """Take a step into account; with what ran in it where that was recorded."""
        self.compute_ms.append(times.compute_ms)
        self.exposed_sync_ms.append(times.exposed_sync_ms)
        self.data_ms.append(times.data_ms)
        if spans is not None and spans.spans:
            self.sync_ms.append(spans.sync_ms)
            self.bubble.append(spans.bubble)

    def figures(self, warmup: int = 3) -> dict[str, float]:
        """What this worker tells the others; without the first steps where there are others."""
        known = {key: values[warmup:] or values for key, values in vars(self).items() if values}
        medians = {key: statistics.median(known[key]) for key in PARTS if key in known}
        if "bubble" not in known:
            return medians
        return medians | {
            "bubble": statistics.mean(known["bubble"]),
            "sync_total_ms": sum(known["sync_ms"]),
            "exposed_total_ms": sum(known["exposed_sync_ms"]),
        }


#: Parts of a step that are told as medians.
PARTS = ("compute_ms", "exposed_sync_ms", "data_ms")


def combine(figures: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The figures of a run from those of its workers: means, and the overlap over all of them.

    Args:
        figures: What `Timings.figures` gave on every worker that did a step.

    Returns:
        Means of `PARTS` in milliseconds; `bubble`, the mean fraction; and `overlap`, the part of all sums of gradients
        that lay beside computation. Only what was measured.
    """
    known = {key for one in figures for key in one}
    result = {
        key: round(statistics.mean(one[key] for one in figures), 3) for key in PARTS if figures and key in known
    }
    if "bubble" in known:
        result["bubble"] = round(statistics.mean(one["bubble"] for one in figures if "bubble" in one), 4)
    total = sum(one.get("sync_total_ms", 0.0) for one in figures)
    if total > 0:
        result["overlap"] = round(max(0.0, 1 - sum(one.get("exposed_total_ms", 0.0) for one in figures) / total), 4)
    return result


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
