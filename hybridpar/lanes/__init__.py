"""Lanes: in-order queues of work on a device, with events between them.

`Lanes` is all the lanes of one process, and picks the kind by the device. What a lane is and promises is in
`hybridpar.lanes.base`; that a program has all the waits it needs is proved on a CPU by `tests/lanes/checked.py`.

Example:
    >>> with Lanes("cpu") as lanes:
    ...     compute, sync = lanes.open("compute"), lanes.open("sync")
    ...     compute.submit(backward)
    ...     sync.wait(compute.record())
    ...     sync.submit(all_reduce, uses=[bucket])
    ...     lanes.caller.wait(sync.record())
"""

from __future__ import annotations

import time
import weakref
from types import TracebackType

import torch

from hybridpar.errors import LaneError
from hybridpar.lanes.base import Event, Family, Lane
from hybridpar.lanes.cpu import CpuCaller, CpuLane, Worker

__all__ = ["Event", "Lane", "Lanes"]

#: How long a program that ends by an exception waits for running work of all lanes, which may hang, as a collective
#: without peers.
_PATIENCE_SECONDS = 10.0


class Lanes(Family):
    """All lanes of one process on one device. The thread that makes it is the one that issues.

    Use it as a context manager: leaving the block normally finishes all queued work, leaving it through an exception
    skips what has not begun.

    Args:
        device: A CPU or a CUDA device.

    Attributes:
        caller: The host thread's own place. On CUDA it is the stream that is current at each call. On a CPU it is the
            thread itself, so `submit` runs the work inline and `wait` blocks.
        closed: Whether `close` was called.

    Raises:
        LaneError: Another kind of device.
    """

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        if device.type not in ("cpu", "cuda"):
            raise LaneError(f"there are no lanes on device {str(device)!r}", "A lane is a CUDA stream or a CPU thread.")
        if device.type == "cuda" and device.index is None:
            from hybridpar.lanes import cuda  # a run on a CPU needs none of it

            device = torch.device("cuda", cuda.cuda.current_device())
        super().__init__(device)
        self._workers: list[Worker] = []
        # For a family that is forgotten, or still open when the interpreter exits.
        self._finalizer = weakref.finalize(self, _abandon, self._workers)
        self.caller = self._stream("caller") if device.type == "cuda" else CpuCaller(self, "caller")
        self._lanes: dict[str, Lane] = {"caller": self.caller}
        #: All lanes but `caller`, in the order in which they were opened.
        self.others: list[Lane] = []

    def open(self, name: str, *, priority: int = 0, threads: int = 1) -> Lane:
        """A new lane.

        Args:
            name: What messages call it; unique in the family.
            priority: On CUDA the stream's priority, lower runs first; without meaning on a CPU.
            threads: On a CPU how many intra-op threads its work may use; without meaning on CUDA.

        Raises:
            LaneError: The name is taken, or the family is closed.
        """
        if not self.is_issuer():
            self.refuse()
        if name in self._lanes:
            raise LaneError(f"lane {name!r} is open already", "Messages tell lanes apart by their names.")
        lane: Lane
        if self.device.type == "cuda":
            lane = self._stream(name, priority)
        else:
            worker = Worker(name, threads)
            self._workers.append(worker)
            lane = CpuLane(self, name, worker)
        self._lanes[name] = lane
        self.others.append(lane)
        return lane

    def _stream(self, name: str, priority: int | None = None) -> Lane:
        from hybridpar.lanes.cuda import CudaLane

        return CudaLane(self, name, priority)

    def forgive(self) -> None:
        """Let lanes that a failure has stopped go on; threads must have skipped what was queued."""
        if not self.is_issuer():
            self.refuse()
        for lane in self._lanes.values():
            lane.forgive()

    def close(self) -> None:
        """Finish all queued work and end the lanes. A second call does nothing.

        Raises:
            LaneError: Called from inside of work, or another thread than the issuing one.
            BaseException: Work failed and the host has not met its exception yet; that exception.
        """
        if self.closed:
            return
        if not self.is_issuer():
            self.refuse()
        self._end()
        for lane in self._lanes.values():
            if lane.failure is not None and not lane.failure.met:
                lane.failure.throw()

    def __enter__(self) -> Lanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self.closed:
            for worker in self._workers:
                worker.skip_rest()
            self._end(_PATIENCE_SECONDS)

    def _end(self, patience: float | None = None) -> None:
        self.closed, self.issuer = True, 0
        end = time.monotonic() + (patience or 0.0)  # of all lanes together: they may wait for peers that are gone
        for lane in self._lanes.values():
            lane.drain(None if patience is None else max(0.0, end - time.monotonic()))
        self._finalizer.detach()


def _abandon(workers: list[Worker]) -> None:
    """End threads that were not closed."""
    for worker in workers:
        worker.skip_rest()
    end = time.monotonic() + _PATIENCE_SECONDS
    for worker in workers:
        worker.stop(max(0.0, end - time.monotonic()))
