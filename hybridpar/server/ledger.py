"""Counts and records the steps of a run with parameter servers.

A *step* is as many gradients as there are workers, from whichever of them: the work of one synchronous step, so that
epochs, learning rates and speeds mean the same in every mode. In an outer loop a push is of several gradients, and one
arrival may end several steps: they share what has come since the last one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

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
    """Adds up arrivals to steps.

    Args:
        per_step: Gradients of a step.
        pushes: Arrivals that end a step at least.
        step: Steps done before.
        clock: Seconds.
    """

    def __init__(
        self, per_step: int, step: int = 0, clock: Callable[[], float] = time.perf_counter, *, pushes: int = 1
    ) -> None:
        self.per_step, self._pushes = per_step, pushes
        self.step = step
        self._clock = clock
        self._rows: deque[StepRow] = deque(maxlen=_MOST)
        self._since = clock()
        self._clear()

    def _clear(self) -> None:
        self._arrived = self._samples = self._counted = self._most = self._skipped = self._staleness = self._queued = 0
        self._gradients = 0
        self._loss = self._rate = 0.0

    def restart(self) -> None:
        """The time of the next step begins now."""
        self._since = self._clock()

    def arrived(
        self, *, staleness: int, samples: int, loss: float, rate: float, queued: int, counts: bool, steps: int = 1
    ) -> StepRow | None:
        """Take in a gradient.

        Args:
            staleness: Its staleness.
            samples: Its samples.
            loss: Its mean loss.
            rate: Its learning rate.
            queued: Gradients that lie there and wait, this one included.
            counts: Whether it is finite.
            steps: Gradients that it is of.

        Returns:
            The last step that it ends, if it ends one.
        """
        self._arrived += 1
        self._gradients += steps
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
        ended, left = divmod(self._gradients, self.per_step)
        if not ended or self._arrived < self._pushes:
            return None
        now = self._clock()
        for number in range(ended):
            self.step += 1
            row = StepRow(
                self.step,
                self._loss / self._counted if self._counted else float("nan"),
                (number + 1) * self._samples // ended - number * self._samples // ended,
                (now - self._since) / ended,
                self._staleness / self._arrived,
                self._most,
                self._queued / self._arrived,
                self._skipped if number == 0 else 0,
                self._rate / self._arrived,
            )
            self._rows.append(row)
        self._since = now
        self._clear()
        self._gradients = left
        return row

    def rows_after(self, step: int) -> list[dict[str, Any]]:
        """All rows past a step, as plain values; those up to it are forgotten.

        Args:
            step: Number of the last step that is known already.
        """
        while self._rows and self._rows[0].step <= step:
            self._rows.popleft()
        return [asdict(row) for row in self._rows]
