"""Counts and records the steps of a run with parameter servers.

A *step* is as many gradients as there are workers, from whichever of them: the work of one synchronous step, so that
epochs, learning rates and speeds mean the same in every mode.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

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


class Ledger:
    """Adds up arrivals to steps."""

    def __init__(self, per_step: int, step: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.per_step = per_step
        self.step = step
        self._clock = clock
        self._rows: deque[StepRow] = deque(maxlen=_MOST)
        self._since = clock()
        self._clear()

    def _clear(self) -> None:
        self._arrived = self._samples = self._counted = self._most = self._skipped = self._staleness = self._queued = 0
        self._loss = self._rate = 0.0

    def restart(self) -> None:
        """The time of the next step begins now."""
        self._since = self._clock()

    def arrived(
        self, *, staleness: int, samples: int, loss: float, rate: float, queued: int, counts: bool
    ) -> StepRow | None:
        """Take in a gradient."""
        self._arrived += 1
        self._samples += samples
        self._staleness += staleness
        self._most = max(self._most, staleness)
        self._queued += queued
        self._rate += rate
        if counts:
            self._counted += samples
            self._loss += loss * samples
        else:
            self._skipped += 1
        if self._arrived < self.per_step:
            return None
        now = self._clock()
        self.step += 1
        row = StepRow(
            self.step,
            self._loss / self._counted if self._counted else float("nan"),
            self._samples,
            now - self._since,
            self._staleness / self._arrived,
            self._most,
            self._queued / self._arrived,
            self._skipped,
            self._rate / self._arrived,
        )
        self._rows.append(row)
        self._since = now
        self._clear()
        return row

    def rows_after(self, step: int) -> list[StepRow]:
        """All rows past a step; those up to it are forgotten."""
        while self._rows and self._rows[0].step <= step:
            self._rows.popleft()
        return list(self._rows)
