"""All-reduce (sum) over CPU workers of one machine through shared memory.

Over TCP on the loopback device a reduced byte is copied some eight times, by the same cores that compute. Here workers
add through shared memory: each hands the others the parts that they add up, adds its own part, and hands the sum back.
Work is cut into chunks that stay in the cache between writer and reader.

Workers wait for each other on Unix sockets, one byte per phase, so a worker that dies is noticed at once by its closed
socket, and waiting costs no CPU time. The segment is unlinked as soon as everybody has mapped it, so a killed job
leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

#: Bytes of a chunk: small enough that all workers' parts of it stay in the last-level cache, large enough that meeting
#: twice per chunk costs little.
CHUNK_BYTES = 2 << 20

_SHARED = Path("/dev/shm")

_T = TypeVar("_T")

Gather = Callable[[object], list[object]]
#: Asked after a time-out: whether to wait as long again, because a worker is alive and busy.
WaitOn = Callable[[], bool]


def never() -> bool:
    """Do not wait on after a time-out."""
    return False


def shared_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory in memory where workers find each other. It is removed afterwards, so that nothing is left of the
    job.
    """
    return tempfile.TemporaryDirectory(prefix="hybridpar-", dir=_SHARED if _SHARED.is_dir() else None)


def map_segment(path: Path, size: int) -> mmap.mmap:
    """Map a file of shared memory."""
    with open(path, "r+b") as segment:
        # Reserve the pages now: a full tmpfs would kill the process at the first write.
        os.posix_fallocate(segment.fileno(), 0, size)
        return mmap.mmap(segment.fileno(), size)


def open_door(path: Path, timeout: float, callers: int = 1) -> socket.socket:
    """A Unix socket that listens for so many callers."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.settimeout(timeout)
        door.bind(str(path))
        door.listen(callers)
    except OSError:
        door.close()
        raise
    return door


def call(path: Path, timeout: float) -> socket.socket:
    """A Unix socket connected to one that listens."""
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        caller.settimeout(timeout)
        caller.connect(str(path))
    except OSError:
        caller.close()
        raise
    return caller


class Bell:
    """A Unix socket to one peer, on which a byte says that something is there or gone."""

    def __init__(self, connection: socket.socket, timeout: float, wait_on: WaitOn = never) -> None:
        self._socket = connection
        self._timeout = timeout
        self._wait_on = wait_on
        # The kernel's time-out: Python's own costs a second system call for every wait.
        connection.settimeout(None)
        limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def ring(self, doing: str, times: int = 1) -> None:
        """Tell the peer, so many times."""
        self._patiently(lambda flags: self._socket.send(b"+" * times, flags), doing)

    def wait(self, doing: str, most: int = 1) -> int:
        """Wait until the peer has rung, and return how often, at most `most` times."""
        heard = len(self._patiently(lambda flags: self._socket.recv(most, flags), doing))
        if heard == 0:
            raise RuntimeError(f"Connection closed by peer while {doing}")
        return heard

    def close(self) -> None:
        """Leave, and end a wait that runs on another thread. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _patiently(self, use: Callable[[int], _T], doing: str) -> _T:
        """Use the socket; after a time-out again, while some worker is alive and busy."""
        flags = 0
        while True:
            try:
                return use(flags)
            except BlockingIOError as error:
                if flags:
                    raise RuntimeError(f"Timed out waiting {self._timeout:g} s for a peer while {doing}") from error
                # Without patience once more, at once: the peer may have rung meanwhile.
                flags = 0 if self._wait_on() else socket.MSG_DONTWAIT
            except OSError as error:
                raise RuntimeError(f"Connection closed by peer while {doing}") from error


class SharedSegment:
    """Memory that the workers of one machine share, and a `Bell` between every two of them."""

    def __init__(
        self, rank: int, size: int, gather: Gather, timeout: float, count: int, wait_on: WaitOn = never
    ) -> None:
        self.rank = rank
        self.size = size
        self._timeout = timeout
        self._wait_on = wait_on
        self._count = count
        self._peers: list[Bell] = []
        self._map: mmap.mmap | None = None
        with contextlib.ExitStack() as stack:
            # Rank 0's directory holds the segment and everybody's socket until all are connected. Each step is
            # followed by a gather, so a worker's problem is everybody's, and no step starts before its predecessor.
            place: object = None
            problem: object = None
            if rank == 0:
                try:
                    place = stack.enter_context(shared_directory())
                except OSError as error:
                    problem = error.strerror or str(error)
            place, problem = gather((place, problem))[0]  # type: ignore[misc]
            place = Path(str(place))
            for step in (self._create, self._open, self._connect):
                if problem is None:
                    problem = _problem_of(step, place, stack)
                problem = next((answer for answer in gather(problem) if answer is not None), None)
        if problem is not None:
            self.close()
            raise OSError(problem)

    def close(self) -> None:
        """Close the sockets and let go of the memory. Safe to call twice."""
        for peer in self._peers:
            peer.close()
        self._peers = []
        self._map = None  # unmapped when the last tensor over it is gone

    def view(self, dtype: torch.dtype) -> Tensor:
        """The memory as a 1-D tensor."""
        if self._map is None:
            raise RuntimeError("Connection closed: this worker has left the job")
        return torch.frombuffer(self._map, dtype=dtype)

    def ring(self, doing: str) -> None:
        """Tell every peer that something is there or gone."""
        for peer in self._peers:
            peer.ring(doing)

    def wait(self, doing: str) -> None:
        """Wait until every peer has rung once more."""
        for peer in self._peers:
            peer.wait(doing)

    # ------------------------------------------------------------------- set-up

    def _create(self, place: Path, stack: contextlib.ExitStack) -> None:
        self._door = stack.enter_context(open_door(place / str(self.rank), self._timeout, self.size))
        if self.rank == 0:
            (place / "segment").touch()

    def _open(self, place: Path, stack: contextlib.ExitStack) -> None:
        self._map = map_segment(place / "segment", self._count)

    def _connect(self, place: Path, stack: contextlib.ExitStack) -> None:
        """Every pair connects once: the higher rank calls, the lower answers."""
        for lower in range(self.rank):
            self._add_peer(call(place / str(lower), self._timeout))
        for _ in range(self.size - 1 - self.rank):
            self._add_peer(self._door.accept()[0])

    def _add_peer(self, connection: socket.socket) -> None:
        self._peers.append(Bell(connection, self._timeout, self._wait_on))


class SharedMemorySum(SharedSegment):
    """Sums CPU tensors over the workers of one machine, in place.

    With K workers a chunk is divided into K stripes, and worker r adds up stripe r. All workers get the same bits,
    because each stripe is added once, by one worker, in a fixed order. Calls must come in the same order with the same
    shapes on all workers, as for any collective.
    """

    def __init__(self, rank: int, size: int, gather: Gather, timeout: float, wait_on: WaitOn = never) -> None:
        self._turn = 0
        self._views: dict[torch.dtype, Tensor] = {}
        super().__init__(rank, size, gather, timeout, 2 * size * CHUNK_BYTES, wait_on)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a dense 1-D (or contiguous) CPU tensor over the workers, in place."""
        flat = tensor.detach().view(-1)
        step = CHUNK_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            self._reduce_chunk(flat[start : start + step])

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        """Receive every worker's `inp` into `out`, by rank."""
        rows, step = out.view(self.size, -1), CHUNK_BYTES // inp.element_size()
        for start in range(0, inp.numel(), step):
            part = inp[start : start + step]
            slots = self._slots(inp.dtype)[self._turn]
            self._turn = 1 - self._turn  # as in `_reduce_chunk`
            slots[self.rank, : part.numel()] = part
            self._meet("handing out tensors")
            rows[:, start : start + step] = slots[:, : part.numel()]

    def close(self) -> None:
        """Close the sockets and let go of the memory. Safe to call twice."""
        self._views.clear()
        super().close()

    def _reduce_chunk(self, chunk: Tensor) -> None:
        """One chunk in three phases: hand out, add, take back.

        Two sets of slots take turns. A worker that starts chunk j + 2 has met all peers in chunk j + 1, so these have
        taken everything from chunk j, whose slots it now overwrites.
        """
        slots = self._slots(chunk.dtype)[self._turn]
        self._turn = 1 - self._turn
        bounds = [chunk.numel() * part // self.size for part in range(self.size + 1)]
        stripes = [slice(bounds[part], bounds[part + 1]) for part in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        mine = stripes[self.rank]
        for other in others:
            slots[self.rank, stripes[other]] = chunk[stripes[other]]
        self._meet("handing out gradients")
        for other in others:
            chunk[mine] += slots[other, mine]
        slots[self.rank, mine] = chunk[mine]
        self._meet("adding gradients")
        for other in others:
            chunk[stripes[other]] = slots[other, stripes[other]]

    def _meet(self, doing: str) -> None:
        self.ring(doing)
        self.wait(doing)

    def _slots(self, dtype: torch.dtype) -> Tensor:
        """The segment as (turn, worker, element)."""
        if dtype not in self._views:
            self._views[dtype] = self.view(dtype).view(2, self.size, -1)
        return self._views[dtype]


def _problem_of(
    step: Callable[[Path, contextlib.ExitStack], None], place: Path, stack: contextlib.ExitStack
) -> str | None:
    try:
        step(place, stack)
    except OSError as error:
        return error.strerror or str(error)
    return None
