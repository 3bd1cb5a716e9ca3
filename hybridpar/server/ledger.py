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

#: Rows that wait until worker 0 asks for them, at most; far more than ever do.
_MOST = 10_000


@dataclass(frozen=True)
class Push:
    """What a learner says of a gradient.

    Attributes:
        learner: Who.
        sequence: Number of this push of the learner, from 1; a repeated push has the number of the first one.
        clock: Clock of the weights that the gradient was computed on.
        weight: What it counts in the sum of an update, before staleness; None for 1 / c, a mean over c gradients.
        rate: Learning rate, as a fraction of the peak rate.
        samples: Samples that it is of.
        loss: Their mean loss.
        sound: Whether it is finite, on all shards. One that is not counts as a push and changes nothing; where an
            update takes one of each learner, it does not happen.
        unused: Numbers of the stripe's pieces for which there was no gradient.
        factor: What it is multiplied with to be clipped.
    """

    learner: int
    sequence: int
    clock: int
    weight: float | None = None
    rate: float = 1.0
    samples: int = 1
    loss: float = 0.0
    sound: bool = True
    unused: frozenset[int] = frozenset()
    factor: float = 1.0


@dataclass(frozen=True)
class StepRow:
    """One step as a shard saw it.

    Attributes:
        step: Its number, from 1.
        loss: Mean loss over its samples, not counting those that were not finite; NaN where there are none.
        samples: Samples of its gradients.
        step_ms: Time since the step before.
        staleness: Mean staleness of its gradients.
        most_stale: Largest staleness.
        queued: Mean number of gradients that lay there and waited, over the arrivals.
        skipped: How many of its gradients were not finite and did not count.
        lr: Mean of the learning rates, as parts of the peak rate.
    """

    step: int
    loss: float
    samples: int
    step_ms: float
    staleness: float
    most_stale: int
    queued: float
    skipped: int
    lr: float


class Ledger:
    """Adds up gradients to steps."""

    def __init__(self, per_step: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.step = 0
        self._per_step, self._clock = per_step, clock
        self._rows: deque[StepRow] = deque(maxlen=_MOST)
        self._arrivals: list[tuple[Push, int, int]] = []
        self._since = clock()

    def restart(self) -> None:
        """The time of the next step begins now."""
        self._since = self._clock()

    def arrived(self, push: Push, staleness: int, queued: int) -> None:
        """Take in a gradient; `queued` is how many lie there with it."""
        self._arrivals.append((push, staleness, queued))
        if len(self._arrivals) < self._per_step:
            return
        pushes, ages, queues = zip(*self._arrivals, strict=True)
        before, self._since = self._since, self._clock()
        counted = [each for each in pushes if each.sound]
        samples = sum(each.samples for each in counted)
        self._arrivals, self.step = [], self.step + 1
        row = StepRow(
            self.step,
            sum(each.loss * each.samples for each in counted) / samples if samples else math.nan,
            sum(each.samples for each in pushes),
            1e3 * (self._since - before),
            statistics.fmean(ages),
            max(ages),
            statistics.fmean(queues),
            len(pushes) - len(counted),
            statistics.fmean(each.rate for each in pushes),
        )
        self._rows.append(row)

    def rows_after(self, step: int) -> list[StepRow]:
        """All rows past a step; those up to it are forgotten."""
        while self._rows and self._rows[0].step <= step:
            self._rows.popleft()
        return list(self._rows)
