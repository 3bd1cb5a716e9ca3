"""Counts and records the steps of a run with parameter servers.

A *step* is as many gradients as there are workers, from whichever of them: the work of one synchronous step, so that
epochs, learning rates and speeds mean the same in every mode.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

#: Rows kept until worker 0 asks for them; far more than are ever waiting.
_MOST = 10_000


@dataclass(frozen=True)
class StepRow:
    """One step as a shard saw it.

    Attributes:
        step: Its number, from 1.
        loss: Mean loss over its samples, not counting those that were not finite; NaN where there are none.
        samples: Samples of its gradients.
        seconds: Time since the step before.
        staleness: Mean staleness of its gradients.
        most_stale: Largest staleness.
        queued: Mean number of gradients that lay there and waited, over the arrivals.
        skipped: How many of its gradients were not finite and did not count.
        rate: Mean of the learning rates.
    """

    step: int
    loss: float
    samples: int
    seconds: float
    staleness: float
    most_stale: int
    queued: float
    skipped: int
    rate: float


class Arrival(NamedTuple):
    """A gradient that came; `queued` is how many lay there with it, and `counts` says that it is finite."""

    staleness: int
    samples: int
    loss: float
    rate: float
    queued: int
    counts: bool


class Ledger:
    """Adds up arrivals to steps."""

    def __init__(self, per_step: int, step: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.per_step = per_step
        self.step = step
        self._clock = clock
        self._rows: deque[StepRow] = deque(maxlen=_MOST)
        self._arrivals: list[Arrival] = []
        self._since = clock()

    def restart(self) -> None:
        """The time of the next step begins now."""
        self._since = self._clock()

    def arrived(self, arrival: Arrival) -> StepRow | None:
        """Take in a gradient; the step that ends with it."""
        self._arrivals.append(arrival)
        if len(self._arrivals) < self.per_step:
            return None
        arrivals, self._arrivals = self._arrivals, []
        before, self._since = self._since, self._clock()
        self.step += 1
        counted = [arrival for arrival in arrivals if arrival.counts]
        samples = sum(each.samples for each in counted)
        row = StepRow(
            self.step,
            sum(each.loss * each.samples for each in counted) / samples if samples else math.nan,
            sum(each.samples for each in arrivals),
            self._since - before,
            statistics.fmean(each.staleness for each in arrivals),
            max(each.staleness for each in arrivals),
            statistics.fmean(each.queued for each in arrivals),
            len(arrivals) - len(counted),
            statistics.fmean(each.rate for each in arrivals),
        )
        self._rows.append(row)
        return row

    def rows_after(self, step: int) -> list[StepRow]:
        """All rows past a step; those up to it are forgotten."""
        while self._rows and self._rows[0].step <= step:
            self._rows.popleft()
        return list(self._rows)
