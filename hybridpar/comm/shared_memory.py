"""Collectives of CPU workers of one machine through shared memory.

Over TCP on the loopback device a reduced byte is copied some eight times, by the same cores that compute. Here each
worker writes into slots that all of them read. Work is cut into chunks that stay in the cache between writer and
reader.

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from hybridpar.comm.group import SMALL, Gather, Group, Reduction, WaitOn, never, reduce_rows, split

#: Bytes of a chunk: small enough that all workers' parts of it stay in the last-level cache, large enough that meeting
#: twice per chunk costs little.
CHUNK_BYTES = 2 << 20

#: Bytes of a piece of a message between two: the receiver copies a piece while the sender writes the next.
_PIECE_BYTES = CHUNK_BYTES // 2

_SHARED = Path("/dev/shm")
_RANK = struct.Struct("I")

_T = TypeVar("_T")


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
        self._peers: dict[int, Bell] = {}
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
        for peer in self._peers.values():
            peer.close()
        self._peers = {}
        self._map = None  # unmapped when the last tensor over it is gone

    def view(self, dtype: torch.dtype) -> Tensor:
        """The memory as a 1-D tensor."""
        if self._map is None:
            raise RuntimeError("Connection closed: this worker has left the job")
        return torch.frombuffer(self._map, dtype=dtype)

    def ring(self, doing: str) -> None:
        """Tell every peer that something is there or gone."""
        for peer in self._peers.values():
            peer.ring(doing)

    def wait(self, doing: str) -> None:
        """Wait until every peer has rung once more."""
        for peer in self._peers.values():
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
            connection = call(place / str(lower), self._timeout)
            connection.sendall(_RANK.pack(self.rank))
            self._peers[lower] = Bell(connection, self._timeout, self._wait_on)
        for _ in range(self.size - 1 - self.rank):
            connection = self._door.accept()[0]
            (caller,) = _RANK.unpack(connection.recv(_RANK.size, socket.MSG_WAITALL))
            self._peers[caller] = Bell(connection, self._timeout, self._wait_on)


class SharedMemoryGroup(SharedSegment, Group):
    """CPU workers of one machine.

    All workers get the same bits, because each element is reduced in the order of ranks, wherever that happens.

    Two sets of slots take turns. A worker that writes chunk j + 2 has met all peers in chunk j + 1, so these have taken
    everything from chunk j, whose slots it now overwrites.
    """

    def __init__(self, rank: int, size: int, gather: Gather, timeout: float, wait_on: WaitOn = never) -> None:
        self._turn = 0
        self._views: dict[torch.dtype, Tensor] = {}
        self._others = [other for other in range(size) if other != rank]
        super().__init__(rank, size, gather, timeout, 2 * size * (CHUNK_BYTES + 8), wait_on)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> None:
        flat = tensor.detach().view(-1)
        step = CHUNK_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            chunk = flat[start : start + step]
            if chunk.nbytes <= SMALL:
                slots = self._next_slots(chunk.dtype)[:, : chunk.numel()]
                slots[self.rank] = chunk
                self._meet("handing out tensors")
                reduce_rows(slots, chunk, reduction)
            else:
                self._reduce_chunk(chunk, reduction)

    def all_to_all(self, out: Tensor, inp: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        sent, received = split(inp, in_sizes), split(out, out_sizes)
        received[self.rank].copy_(sent[self.rank])
        step = CHUNK_BYTES // inp.element_size() // self.size
        start, most = 0, max(in_sizes)
        while start == 0 or start < most:
            slots = self._next_slots(inp.dtype)
            lengths = self._lengths[self._turn]
            lengths[self.rank] = most
            for other in self._others:
                part = sent[other][start : start + step]
                slots[self.rank, other * step : other * step + part.numel()] = part
            self._meet("handing out tensors")
            most = int(lengths.max())  # all workers meet as often
            for other in self._others:
                part = received[other][start : start + step]
                part.copy_(slots[other, self.rank * step : self.rank * step + part.numel()])
            start += step

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        rows, step = out.view(self.size, -1), CHUNK_BYTES // inp.element_size()
        for start in range(0, inp.numel(), step):
            part = inp[start : start + step]
            slots = self._next_slots(inp.dtype)[:, : part.numel()]
            slots[self.rank] = part
            self._meet("handing out tensors")
            rows[:, start : start + step] = slots

    def send(self, tensor: Tensor, rank: int) -> None:
        slots, bell, doing = self._pieces(self.rank), self._peers[rank], f"sending to worker {rank} of the group"
        pieces = _pieces_of(tensor.view(torch.uint8))
        for number, piece in enumerate(pieces):
            if number >= len(slots):
                bell.wait(doing)
            slots[number % len(slots)][: piece.numel()] = piece
            bell.ring(doing)
        for _ in range(min(len(slots), len(pieces))):
            bell.wait(doing)

    def recv(self, tensor: Tensor, rank: int) -> None:
        slots, bell, doing = self._pieces(rank), self._peers[rank], f"receiving from worker {rank} of the group"
        for number, piece in enumerate(_pieces_of(tensor.view(torch.uint8))):
            bell.wait(doing)
            piece.copy_(slots[number % len(slots)][: piece.numel()])
            bell.ring(doing)

    def close(self) -> None:
        self._views.clear()
        super().close()

    def _reduce_chunk(self, chunk: Tensor, reduction: Reduction) -> None:
        """A chunk in three phases: each worker hands the others what they reduce, reduces its stripe, takes theirs."""
        slots = self._next_slots(chunk.dtype)
        bounds = [chunk.numel() * part // self.size for part in range(self.size + 1)]
        stripes = [slice(bounds[part], bounds[part + 1]) for part in range(self.size)]
        mine = stripes[self.rank]
        for other in self._others:
            slots[self.rank, stripes[other]] = chunk[stripes[other]]
        self._meet("handing out gradients")
        rows = [chunk[mine] if rank == self.rank else slots[rank, mine] for rank in range(self.size)]
        reduce_rows(rows, slots[self.rank, mine], reduction)
        self._meet("adding gradients")
        for rank in range(self.size):
            chunk[stripes[rank]] = slots[rank, stripes[rank]]

    def _meet(self, doing: str) -> None:
        self.ring(doing)
        self.wait(doing)

    def _next_slots(self, dtype: torch.dtype) -> Tensor:
        """The slots of the next turn as (worker, element)."""
        self._turn = 1 - self._turn
        return self._slots(dtype)[self._turn]

    def _pieces(self, rank: int) -> tuple[Tensor, ...]:
        """A worker's slot of the next turn, which nobody reads any more, in pieces; the turn stays."""
        return _pieces_of(self._slots(torch.uint8)[1 - self._turn, rank])

    def _slots(self, dtype: torch.dtype) -> Tensor:
        """The slots as (turn, worker, element)."""
        if dtype not in self._views:
            slots = self.view(torch.uint8)[: 2 * self.size * CHUNK_BYTES]
            self._views[dtype] = slots.view(dtype).view(2, self.size, -1)
        return self._views[dtype]

    @property
    def _lengths(self) -> Tensor:
        """What the longest piece of each worker's all-to-all has, as (turn, worker)."""
        return self.view(torch.int64)[-2 * self.size :].view(2, self.size)


def _pieces_of(memory: Tensor) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = memory.split(_PIECE_BYTES)  # type: ignore[no-untyped-call]
    return pieces


def _problem_of(
    step: Callable[[Path, contextlib.ExitStack], None], place: Path, stack: contextlib.ExitStack
) -> str | None:
    try:
        step(place, stack)
    except OSError as error:
        return error.strerror or str(error)
    return None
