"""Collectives of CPU workers of one machine through shared memory.

Over TCP on the loopback device a reduced byte is copied some eight times, by the same cores that compute. Here each
worker writes into slots that all of them read. Work is cut into chunks that stay in the cache between writer and
reader.

Workers wait for each other on Unix sockets, one byte per phase, so a worker that dies is noticed at once by its closed
socket, and waiting costs no CPU time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.connections import Connected
from hybridpar.comm.group import SMALL, Group, Reduction, reduce_rows, split

#: Bytes of a chunk: small enough that all workers' parts of it stay in the last-level cache, large enough that meeting
#: twice per chunk costs little.
CHUNK_BYTES = 2 << 20

#: Bytes of a piece of a message between two: the receiver copies a piece while the sender writes the next. Copying it
#: takes about as long as to wake the other end, which costs up to 60 microseconds where the processors are virtual.
_PIECE_BYTES = CHUNK_BYTES // 4


class SharedMemoryGroup(Connected, Group):
    """CPU workers of one machine.

    All workers get the same bits, because each element is reduced in the order of ranks, wherever that happens.

    Two sets of slots take turns. A worker that writes chunk j + 2 has met all peers in chunk j + 1, so these have taken
    everything from chunk j, whose slots it now overwrites. Messages between two go through the sender's slot of the
    next turn, which nobody reads any more: a ring of pieces. So a short message leaves before it is received.
    """

    transport = "shared memory"
    memory_bytes = 2 * (CHUNK_BYTES + 8)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._turn = 0
        self._views: dict[torch.dtype, Tensor] = {}
        self._others = list(self._peers)
        slots = self._slots(torch.uint8).view(2, self.size, -1, _PIECE_BYTES)
        #: By turn and worker.
        self._pieces = [[row.unbind() for row in turn] for turn in slots]
        #: Pieces sent to and received from each worker.
        self._sent, self._received = [0] * self.size, [0] * self.size
        #: Who was sent something last, and pieces of that which it may not have taken.
        self._reader, self._unread = 0, 0

    @classmethod
    def fits(cls, hosts: Sequence[object]) -> bool:
        """All on the same host, where all may share memory."""
        return len(set(hosts)) == 1 and hosts[0] is not None

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> None:
        flat = tensor.detach().view(-1)
        step = CHUNK_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            chunk = flat[start : start + step]
            if chunk.nbytes <= SMALL:
                slots = self._next_slots(chunk.dtype)[:, : chunk.numel()]
                slots[self.rank] = chunk
                self._meet()
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
            self._meet()
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
            self._meet()
            rows[:, start : start + step] = slots

    def send(self, tensor: Tensor, rank: int) -> None:
        if rank != self._reader:
            self._settle()
            self._reader = rank
        slots, peer = self._pieces[1 - self._turn][self.rank], self._peers[rank]
        for piece in _pieces_of(tensor.view(torch.uint8)):
            if self._unread == len(slots):
                self._unread -= peer.wait(self._unread)
            slots[self._sent[rank] % len(slots)][: piece.numel()] = piece
            peer.ring()
            self._sent[rank] += 1
            self._unread += 1

    def recv(self, tensor: Tensor, rank: int) -> None:
        self._settle()
        slots, peer = self._pieces[1 - self._turn][rank], self._peers[rank]
        for piece in _pieces_of(tensor.view(torch.uint8)):
            peer.wait()
            piece.copy_(slots[self._received[rank] % len(slots)][: piece.numel()])
            self._received[rank] += 1
            with contextlib.suppress(RuntimeError):  # a sender that has sent its last message may have left
                peer.ring()

    def _reduce_chunk(self, chunk: Tensor, reduction: Reduction) -> None:
        """A chunk in three phases: each worker hands the others what they reduce, reduces its stripe, takes theirs."""
        slots = self._next_slots(chunk.dtype)
        bounds = [chunk.numel() * part // self.size for part in range(self.size + 1)]
        stripes = [slice(bounds[part], bounds[part + 1]) for part in range(self.size)]
        mine = stripes[self.rank]
        for other in self._others:
            slots[self.rank, stripes[other]] = chunk[stripes[other]]
        self._meet()
        rows = [chunk[mine] if rank == self.rank else slots[rank, mine] for rank in range(self.size)]
        reduce_rows(rows, slots[self.rank, mine], reduction)
        self._meet()
        for rank in range(self.size):
            chunk[stripes[rank]] = slots[rank, stripes[rank]]

    def _meet(self) -> None:
        self.ring()
        self.wait()

    def _settle(self) -> None:
        """Wait until all that was sent has been taken."""
        while self._unread:
            self._unread -= self._peers[self._reader].wait(self._unread)

    def _next_slots(self, dtype: torch.dtype) -> Tensor:
        """The slots of the next turn as (worker, element)."""
        self._settle()
        self._turn = 1 - self._turn
        return self._slots(dtype)[self._turn]

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
