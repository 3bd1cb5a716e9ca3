"""Lanes that are threads, with the ordering rules of CUDA streams.

A lane is one thread that takes its work from a queue. PyTorch's operators give the interpreter lock back while they
compute, and autograd runs the backward pass of CPU tensors on the thread that asks for it, so lanes run in parallel.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

import torch

from hybridpar.errors import LaneError
from hybridpar.lanes.base import Event, Failure, Family, Lane, Stop, Work


class CpuEvent(Event):
    """A latch: a lock that is taken until the lane gets here (`threading.Event` costs several times as much)."""

    def __init__(self, family: Family) -> None:
        self.family = family
        #: Whether the lane got here.
        self.passed = False
        self._latch = threading.Lock()
        self._latch.acquire()

    def run(self, stop: Stop) -> None:
        """The lane passes the event: wake everyone who waits, with the failure of the work before."""
        self.failure = stop.failure
        self.passed, self.is_over = True, stop.failure is None
        self._latch.release()

    def pass_through(self) -> None:
        """Block this thread until the latch is open."""
        if not self.passed:
            self._latch.acquire()
            self._latch.release()  # for the next one who waits

    def _block(self) -> None:
        self.pass_through()


class _Wait:
    """A queue entry that blocks the lane until another lane passed an event."""

    def __init__(self, event: CpuEvent) -> None:
        self.event = event

    def run(self, worker: Worker) -> None:
        self.event.pass_through()
        if worker.failure is None:
            worker.failure = self.event.failure


class _Task:
    """A queue entry that runs work in the modes of the thread that submitted it."""

    def __init__(self, work: Work, uses: Sequence[torch.Tensor], marks: Sequence[CpuEvent]) -> None:
        self.work: Work | None = work
        self.uses = tuple(uses)
        self.marks = deque(marks)
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.autocast_cache = torch.is_autocast_cache_enabled()

    def run(self, worker: Worker) -> None:
        worker.task = self
        if worker.failure is None:
            assert self.work is not None
            try:
                if self.inference or self.autocast is not None:
                    self._run_in_modes(self.work)
                else:
                    torch.set_grad_enabled(self.grad)
                    self.work()
            except BaseException as error:
                worker.failure = Failure(error, worker.name)
        worker.task = None
        # Let go before the lane passes the next event: whoever waited for that may count on it.
        self.work, self.uses = None, ()
        while self.marks:
            self.marks.popleft().run(worker)

    def mark(self, event: CpuEvent) -> bool:
        """Pass the next event; False if it is another one's turn."""
        if not self.marks or self.marks[0] is not event:
            return False
        self.marks.popleft().run(Stop())  # the lane runs
        return True

    def _run_in_modes(self, work: Work) -> None:
        autocast = torch.autocast(
            "cpu", dtype=self.autocast, enabled=self.autocast is not None, cache_enabled=self.autocast_cache
        )
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), autocast:
            work()


class Worker(Stop):
    """The thread of a lane. It has no reference to lane and family, so that a forgotten family can be collected."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.task: _Task | None = None  # what is running
        self.queue: SimpleQueue[_Task | CpuEvent | _Wait | None] = SimpleQueue()
        # torch keeps the number of intra-op threads per thread, but at its first operator a thread takes over the last
        # number that was set anywhere. So let this thread and the lane's do that first (reading is enough), and set
        # this one's again after the lane's, for threads to come.
        before = torch.get_num_threads()
        ready = threading.Lock()
        ready.acquire()
        # A daemon, so that after an exception in the main thread the interpreter gets as far as its exit handlers,
        # which end and join the thread (`Lanes`); others would be waited for before that, forever.
        self.thread = threading.Thread(target=self._loop, args=(threads, ready), name=f"lane {name}", daemon=True)
        self.thread.start()
        ready.acquire()
        torch.set_num_threads(before)

    def skip_rest(self) -> None:
        """Skip the work that has not begun, and fail the events behind it."""
        if self.failure is None:
            error = LaneError("the lanes were closed by an exception before all work was done")
            self.failure = Failure(error, self.name, met=True)

    def stop(self, patience: float | None = None) -> None:
        """End the thread after what is queued, and wait for that; for `patience` seconds at most."""
        self.queue.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join(patience)

    def _loop(self, threads: int, ready: threading.Lock) -> None:
        torch.get_num_threads()
        torch.set_num_threads(threads)
        ready.release()
        while (entry := self.queue.get()) is not None:
            entry.run(self)
            del entry  # an event in it would keep the family alive while the thread waits for more


class CpuLane(Lane):
    """A thread with a queue."""

    new_event = CpuEvent

    def __init__(self, family: Family, name: str, worker: Worker) -> None:
        super().__init__(family, name, worker)
        self._worker = worker

    def keep(self, *tensors: torch.Tensor) -> None:
        """The work is done when it returns, so there is nothing to hold."""
        if threading.current_thread() is not self._worker.thread:
            raise self._misplaced_keep()

    def mark(self, event: Event) -> None:
        task = self._worker.task
        inside = threading.current_thread() is self._worker.thread and task is not None
        if not inside or not isinstance(event, CpuEvent) or task is None or not task.mark(event):
            raise self._misplaced_mark()

    def drain(self, patience: float | None = None) -> None:
        self._worker.stop(patience)

    def _submit(self, work: Work, uses: Sequence[torch.Tensor], marks: Sequence[CpuEvent]) -> None:
        self._worker.queue.put(_Task(work, uses, marks))

    def _record(self, event: CpuEvent) -> None:
        self._worker.queue.put(event)

    def _wait(self, event: CpuEvent) -> None:
        if not event.is_over:
            self._worker.queue.put(_Wait(event))


class CpuCaller(Lane):
    """The issuing thread itself: work runs inline, and to wait is to block."""

    new_event = CpuEvent

    def keep(self, *tensors: torch.Tensor) -> None:
        """The work is done when it returns."""

    def drain(self, patience: float | None = None) -> None:
        """Nothing is ever queued here."""

    def _submit(self, work: Work, uses: Sequence[torch.Tensor], marks: Sequence[CpuEvent]) -> None:
        outer, self._marks = self._marks, deque(marks)
        try:
            work()
        finally:
            for event in self._marks:
                self._record(event)
            self._marks = outer

    def _record(self, event: CpuEvent) -> None:
        event.run(self._stop)

    def _wait(self, event: CpuEvent) -> None:
        if not event.passed:
            event.pass_through()
        if event.failure is not None:
            event.failure.throw()
