"""Lanes that are CUDA streams.

The host runs submitted work at once, with the lane's stream current, and the work queues kernels. A tensor of another
lane that the work uses is kept alive until a CUDA event behind the work is done: the allocator gives freed memory back
to the stream that allocated it, which does not know this lane. That is looked up when the lane is next used, so the
host never waits. (`Tensor.record_stream` does the same later and less predictably, and not inside graph capture.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hybridpar.lanes.base import Event, Failure, Family, Lane, Work

#: Its classes are untyped. One name for it also lets tests put a stand-in here.
cuda: Any = torch.cuda


class CudaEvent(Event):
    """A CUDA event without timing."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.cuda_event: torch.cuda.Event = cuda.Event()

    def _block(self) -> None:
        self.cuda_event.synchronize()
        self.is_over = self.failure is None


class CudaLane(Lane):
    """A CUDA stream: a new one of a priority, of which a lower number runs first, or what is current at each call."""

    new_event = CudaEvent

    def __init__(self, family: Family, name: str, priority: int | None = None) -> None:
        super().__init__(family, name)
        self._opened: torch.cuda.Stream | None = (
            None if priority is None else cuda.Stream(family.device, priority=priority)
        )
        self._held: list[torch.Tensor] | None = None  # by the work that is running
        # What to keep until when. None stands for the end of a graph capture: events recorded in one cannot be asked.
        self._lent: deque[tuple[torch.cuda.Event | None, Sequence[torch.Tensor]]] = deque()

    def keep(self, *tensors: torch.Tensor) -> None:
        if self._held is not None:
            self._held.extend(tensors)
        elif self._opened is None:
            self._keep_until_passed(self._stream(), tensors)
        else:
            raise self._misplaced_keep()

    def drain(self, patience: float | None = None) -> None:
        """CUDA cannot stop waiting for a stream."""
        self._stream().synchronize()
        self._lent.clear()

    def _stream(self) -> torch.cuda.Stream:
        if self._opened is not None:
            return self._opened
        # By index: PyTorch takes microseconds to make a number of a `torch.device`, and this is asked often in a step.
        current: torch.cuda.Stream = cuda.current_stream(self.device.index)
        return current

    def _submit(self, work: Work, uses: Sequence[torch.Tensor], marks: Sequence[CudaEvent]) -> None:
        stream = self._stream()
        outer, self._held = self._held, list(uses)
        outer_marks, self._marks = self._marks, deque(marks)
        issuer = self._family.issuer
        if self._opened is not None:
            self._family.issuer = 0
        with nullcontext() if self._opened is None else cuda.stream(stream):
            try:
                work()
            except BaseException as error:
                if self._opened is not None:
                    self._stop.failure = Failure(error, self.name, met=True)
                raise
            finally:
                for event in self._marks:
                    self._record(event)
                self._marks = outer_marks
                held, self._held = self._held, outer
                self._family.issuer = 0 if self._family.closed else issuer
                self._keep_until_passed(stream, held)

    def _keep_until_passed(self, stream: torch.cuda.Stream, tensors: Sequence[torch.Tensor]) -> None:
        capturing = cuda.is_current_stream_capturing()
        if not capturing:
            while self._lent and ((until := self._lent[0][0]) is None or _passed(until)):
                self._lent.popleft()
        if tensors:
            event = None if capturing else cuda.Event()
            if event is not None:
                event.record(stream)
            self._lent.append((event, tensors))

    def _record(self, event: CudaEvent) -> None:
        event.failure = self.failure
        event.cuda_event.record(self._stream())

    def _wait(self, event: CudaEvent) -> None:
        if event.failure is None:
            self._stream().wait_event(event.cuda_event)
        elif self._opened is None:
            event.failure.throw()
        elif self.failure is None:
            self._stop.failure = event.failure


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
