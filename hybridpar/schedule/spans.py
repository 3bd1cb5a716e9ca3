"""Spans of time, predicted or measured, in one format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hybridpar.schedule.actions import COMPUTE, RECEIVES, Action


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one queue, from its start to its end, in milliseconds since the start of the step.

    Attributes:
        worker: The worker that did it.
        queue: Kind of queue: `compute`, `send`, `receive`, `sync`, `control` or `copy`.
        lane: Which of that kind: the lane for `compute`, the other worker for `send` and `receive`, the sync lane for
            `sync`, else that of the stage.
        action: What was done.
        start_ms: When it started.
        end_ms: When it ended.
        ready_ms: For a sum of gradients: when this worker had the last of them. None where it was not noted.
    """

    worker: int
    queue: str
    lane: int
    action: Action
    start_ms: float
    end_ms: float
    ready_ms: float | None = None

    @property
    def duration_ms(self) -> float:
        """Time from start to end."""
        return self.end_ms - self.start_ms

    def shifted(self, by_ms: float) -> Span:
        """The same so much later."""
        ready = None if self.ready_ms is None else self.ready_ms + by_ms
        return replace(self, start_ms=self.start_ms + by_ms, end_ms=self.end_ms + by_ms, ready_ms=ready)


class Computed(NamedTuple):
    """How long a worker computed in a step; what remains of its spans where only the bubble is wanted.

    Attributes:
        begin: When it began with anything but to wait for others, in seconds on the clock of the step.
        end: When its last forward or backward pass ended, likewise.
        busy_ms: Time of all passes, over its lanes.
        lanes: Number of its compute lanes.
    """

    begin: float
    end: float
    busy_ms: float
    lanes: int


@dataclass(frozen=True)
class StepSpans:
    """What one worker did in a step.

    Attributes:
        origin: The clock at the start of the step, in seconds; comparable between the processes of a host.
        spans: Every action by start, in milliseconds since `origin`.
    """

    origin: float
    spans: tuple[Span, ...]

    @cached_property
    def step_ms(self) -> float:
        """From the first action's start to the last one's end."""
        return max((span.end_ms for span in self.spans), default=0.0)

    @cached_property
    def compute_end_ms(self) -> float:
        """When the last forward or backward pass ended."""
        return max((span.end_ms for span in self.spans if span.action.kind in COMPUTE), default=0.0)

    @property
    def computed(self) -> Computed:
        """What `joint_bubble` needs of this worker."""
        compute = [span for span in self.spans if span.action.kind in COMPUTE]
        first = min((span.start_ms for span in self.spans if span.action.kind not in RECEIVES), default=0.0)
        return Computed(
            self.origin + first / 1e3,
            self.origin + self.compute_end_ms / 1e3,
            sum(span.duration_ms for span in compute),
            len({span.lane for span in compute}),
        )

    @property
    def sync_ms(self) -> float:
        """Time of all sums of gradients."""
        return sum(span.duration_ms for span in self.spans if span.queue == "sync")

    @property
    def exposed_sync_ms(self) -> float:
        """How long the last sum of gradients outlasted the last computation."""
        last = max((span.end_ms for span in self.spans if span.queue == "sync"), default=0.0)
        return max(0.0, last - self.compute_end_ms)

    def waiting_since(self, moment: float) -> StepSpans:
        """The same step without the time that receives waited before a moment, such as the end of the step before.

        A step is issued while the one before still runs, and its receives begin to wait at once; that is no part of it.
        """
        earliest = 1e3 * (moment - self.origin)
        cut = [
            replace(span, start_ms=min(max(span.start_ms, earliest), span.end_ms))
            if span.action.kind in RECEIVES
            else span
            for span in self.spans
        ]
        zero = min((span.start_ms for span in cut), default=0.0)
        moved = [span.shifted(-zero) for span in cut]
        return StepSpans(self.origin + zero / 1e3, tuple(sorted(moved, key=lambda span: (span.start_ms, span.end_ms))))


def joint_bubble(workers: Iterable[Computed]) -> float:
    """Part of the lanes' time, from the first action of any worker to the last pass of any, in which none computed.

    The bubble of a step as the literature has it: (p - 1) / (m + p - 1) for p equal stages and m micro-batches (GPipe,
    Huang et al. 2019, section 2.3).
    """
    parts = [worker for worker in workers if worker.lanes]
    if not parts:
        return 0.0
    length = 1e3 * (max(worker.end for worker in parts) - min(worker.begin for worker in parts))
    lanes = sum(worker.lanes for worker in parts)
    return min(1.0, max(0.0, 1 - sum(worker.busy_ms for worker in parts) / (lanes * length))) if length > 0 else 0.0
