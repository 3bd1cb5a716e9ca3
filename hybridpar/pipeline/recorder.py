"""Why: overlap that nobody measured is a belief. Every action of a step notes when it started and ended.

On a CPU that costs two readings of a clock per action. On a GPU it costs two events, so it is done only on request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hybridpar.pipeline.actions import COMPUTE, Action
from hybridpar.pipeline.spans import Span

#: One name for it, so that tests can put a stand-in here.
cuda: Any = torch.cuda

#: Kind of queue, worker, and which one of that kind.
Queue = tuple[str, int, int]


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
    def bubble(self) -> float:
        """Part of the time until `compute_end_ms` in which this worker's lanes did not compute."""
        compute = [span for span in self.spans if span.action.kind in COMPUTE]
        lanes = len({span.lane for span in compute})
        if not compute or self.compute_end_ms == 0:
            return 0.0
        return max(0.0, 1 - sum(span.duration_ms for span in compute) / (lanes * self.compute_end_ms))

    @property
    def sync_ms(self) -> float:
        """Time of all sums of gradients."""
        return sum(span.duration_ms for span in self.spans if span.queue == "sync")

    @property
    def exposed_sync_ms(self) -> float:
        """How long the last sum of gradients outlasted the last computation."""
        last = max((span.end_ms for span in self.spans if span.queue == "sync"), default=0.0)
        return max(0.0, last - self.compute_end_ms)


class SpanRecorder:
    """Notes when the actions of one step run.

    Args:
        device: Where they run.
        enabled: Record at all; None means on a CPU.
    """

    def __init__(self, device: torch.device, enabled: bool | None = None) -> None:
        self._cuda = device.type == "cuda"
        self.enabled = not self._cuda if enabled is None else enabled
        self._notes: list[tuple[Queue, Action, Any, Any]] = []
        self._collected: StepSpans | None = None

    def timed(self, queue: Queue, action: Action, work: Callable[[], None]) -> Callable[[], None]:
        """Work that notes its start and its end."""
        if not self.enabled:
            return work

        def whole() -> None:
            start = self._now()
            work()
            self._notes.append((queue, action, start, self._now()))

        return whole

    def collect(self) -> StepSpans:
        """All that was noted; to be called when the step is over."""
        if self._collected is None:
            self._collected = self._gather()
        return self._collected

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def _gather(self) -> StepSpans:
        notes, self._notes = self._notes, []
        if not notes:
            return StepSpans(time.perf_counter(), ())
        if self._cuda:
            notes[-1][3].synchronize()
            first = notes[0][2]
            for _, _, _, end in notes:
                end.synchronize()
            times = [(first.elapsed_time(start), first.elapsed_time(end)) for _, _, start, end in notes]
            origin = time.perf_counter() - max(end for _, end in times) / 1e3
            zero = min(start for start, _ in times)
        else:
            origin = min(start for _, _, start, _ in notes)
            times = [((start - origin) * 1e3, (end - origin) * 1e3) for _, _, start, end in notes]
            zero = 0.0
        spans = [
            Span(queue[1], queue[0], queue[2], action, start - zero, end - zero)
            for (queue, action, _, _), (start, end) in zip(notes, times, strict=True)
        ]
        return StepSpans(origin, tuple(sorted(spans, key=lambda span: (span.start_ms, span.end_ms))))
