"""`--shares auto`: divides batches by what each replica was measured to compute.

A run begins with equal parts. Every so many steps all workers tell each other how long they computed, without the time
that they waited for each other; so all know the same numbers, and decide alike: each replica is to have samples in
proportion to its speed, the samples that it computed in a millisecond. Where a part of its time does not depend on its
samples, the next decisions come closer. A division is changed only where the step is expected to become shorter by more
than times vary, within these steps and from one decision to the next; and there are more and more steps between two
decisions. So noise does not move shares for ever, and a machine that becomes slower does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hybridpar.comm.world import World
from hybridpar.data.sampling import FEWEST_PER_PART, allot
from hybridpar.run.part import Part, Run
from hybridpar.run.timings import Step

#: Steps that are left out at first and after a change, and steps of the first and of the longest time of watching.
LEFT_OUT, WATCHED, MOST_WATCHED = 3, 8, 128

#: The part by which a step must become shorter for a change: the least, and what is enough however times vary.
LEAST_GAIN, LARGE_GAIN = 0.03, 0.2


class ShareTuner(Part):
    """Decides on the samples of each replica."""

    key: ClassVar[str] = "shares"

    def __init__(
        self,
        world: World,
        replicas: Sequence[Sequence[int]],
        batch_size: int,
        micro_batches: int,
        *,
        idle: bool,
        in_pairs: bool,
        wait: Callable[[], None],
    ) -> None:
        self._world, self._replicas, self._batch_size, self._wait = world, replicas, batch_size, wait
        self._least, self._options = FEWEST_PER_PART * micro_batches, {"idle": idle, "in_pairs": in_pairs}
        self.counts = self._equal = self._rounded([1.0] * len(replicas))
        self._speeds = [0.0] * len(replicas)  # samples per millisecond, once they are known
        self._drift = 0.0
        self._times: list[float] = []
        self._left, self._watched = LEFT_OUT, WATCHED

    @property
    def shares(self) -> tuple[int, ...] | None:
        """`counts`, for loaders; None for equal parts."""
        return None if self.counts == self._equal else tuple(self.counts)

    def step(self, run: Run, step: Step) -> None:
        """Take a step into account, and divide the ones to come by other shares where those are faster."""
        record, spans = step.record, step.result.outcome.spans
        busy_ms = record.compute_ms + record.data_ms
        if run.world.device.type == "cuda" and spans.spans:
            busy_ms = spans.step_ms - spans.exposed_sync_ms
        with run.clock.away(), run.progress.pause():
            if (news := self.note(busy_ms, record.samples)) is not None:
                run.samples.divide(self.shares)
                run.progress.message(news)

    def note(self, busy_ms: float, samples: int) -> str | None:
        """Take a step into account, on all workers the same one; after some of them a collective."""
        if self._left > 0 or samples != self._batch_size:
            self._left -= samples == self._batch_size
            return None
        self._times.append(busy_ms)
        if len(self._times) < self._watched:
            return None
        quarters = statistics.quantiles(self._times, n=4)
        self._wait()
        mine = max(quarters[1], 1e-6), quarters[2] - quarters[0]
        answers: list[tuple[float, float]] = self._world.gather(mine)  # type: ignore[assignment]
        times = [max(answers[rank][0] for rank in ranks) for ranks in self._replicas]
        noise = max(spread / time for time, spread in answers) / len(self._times) ** 0.5
        self._times, self._watched = [], min(2 * self._watched, MOST_WATCHED)
        return self.decide(times, noise)

    def decide(self, times: Sequence[float], noise: float = 0.0) -> str | None:
        """Decide on the division that comes next."""
        measured = list(zip(self.counts, times, self._speeds, strict=True))
        changes = [abs(time * speed / count - 1) for count, time, speed in measured if count and speed]
        self._drift = max(self._drift / 2, *changes, 0.0)
        self._speeds = [count / time if count else speed or 1 / time for count, time, speed in measured]
        counts, now = self._rounded(self._speeds), max(times)
        expected = max(count / speed for count, speed in zip(counts, self._speeds, strict=True))
        if expected > now * (1 - min(max(LEAST_GAIN, 2 * noise, self._drift), LARGE_GAIN)):
            return None
        self.counts, self._left = counts, LEFT_OUT
        parts = " + ".join(map(str, counts))
        return f"shares: {parts} samples from now on; computing is expected to take {expected:.1f} ms and not {now:.1f}"

    def _rounded(self, shares: Sequence[float]) -> list[int]:
        return allot(self._batch_size, shares, self._least, **self._options)

    def state(self) -> dict[str, Any]:
        """What a resumed run with as many replicas goes on with."""
        return {"counts": self.counts, "speeds": self._speeds}

    def restore(self, run: Run, state: dict[str, Any] | None) -> None:
        """Go on with what was saved, where it is for as many replicas and samples; else begin with equal parts."""
        if state is None or len(state["counts"]) != len(self.counts) or sum(state["counts"]) != self._batch_size:
            return
        self.counts, self._speeds = list(map(int, state["counts"])), list(map(float, state["speeds"]))
        run.samples.divide(self.shares)

    def summary(self, run: Run) -> dict[str, Any]:
        """The shares that it came to."""
        return {"shares": f"auto:{','.join(map(str, self.counts))}"}
