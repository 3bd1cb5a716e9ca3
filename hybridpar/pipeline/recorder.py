"""Records when every action of a step started and ended.

On a CPU that costs two readings of a clock per action. On a GPU it costs two events, so it is done only on request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from hybridpar.schedule.actions import Action
from hybridpar.schedule.spans import Span
from hybridpar.schedule.spans import StepSpans as StepSpans

#: One name for it, so that tests can put a stand-in here.
cuda: Any = torch.cuda

#: Kind of queue, worker, and which one of that kind.
Queue = tuple[str, int, int]


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
        self._ready: dict[Action, Any] = {}
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

    def ready(self, action: Action) -> None:
        """Note that an action has what it needs of this worker; called by the work that made it."""
        if self.enabled:
            self._ready[action] = self._now()

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
        ready, self._ready = self._ready, {}
        if not notes:
            return StepSpans(time.perf_counter(), ())
        if self._cuda:
            notes[-1][3].synchronize()
            first = notes[0][2]
            for _, _, _, end in notes:
                end.synchronize()
            times = [(first.elapsed_time(start), first.elapsed_time(end)) for _, _, start, end in notes]
            ready_ms = {action: first.elapsed_time(event) for action, event in ready.items()}
            origin = time.perf_counter() - max(end for _, end in times) / 1e3
            zero = min(start for start, _ in times)
        else:
            origin = min(start for _, _, start, _ in notes)
            times = [((start - origin) * 1e3, (end - origin) * 1e3) for _, _, start, end in notes]
            ready_ms = {action: (moment - origin) * 1e3 for action, moment in ready.items()}
            zero = 0.0
        spans = [
            Span(queue[1], queue[0], queue[2], action, start, end, ready_ms.get(action)).shifted(-zero)
            for (queue, action, _, _), (start, end) in zip(notes, times, strict=True)
        ]
        return StepSpans(origin, tuple(sorted(spans, key=lambda span: (span.start_ms, span.end_ms))))
