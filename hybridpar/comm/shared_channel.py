"""Sends tensors between two processes of one machine through shared memory.

A channel is a ring of slots in shared memory. The sender copies a message into it slot by slot, the receiver copies it
out, and as soon as the first slot is full both copy at the same time. A slot stays in the last-level cache on its way,
so main memory sees what it would see of a single copy. A message that fits into the free slots leaves the sender
without waiting for the receiver.

Each end waits on a Unix socket for a byte per slot filled or freed: waiting costs no CPU time, and a peer that dies is
noticed at once by its closed socket. Memory and socket are found in a directory that is removed before training begins.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.comm.group import WaitOn, never
from hybridpar.comm.shared_memory import Bell, call, map_segment, open_door, shared_directory
from hybridpar.comm.transport import MessagePart, cut, memory_of, payload

#: Bytes of a slot: small enough to stay in the last-level cache, large enough that copying it takes longer than to wake
#: the other end, which costs up to 60 microseconds where the processors are virtual.
SLOT_BYTES = 1 << 20

#: Slots of a ring. Freed ones are reported by twos, so that a sender that waits is not woken for each.
SLOTS = 4
_REPORTED = SLOTS // 2

_CPU = torch.device("cpu")


class Offer:
    """The sender's half of a meeting: a segment and a door for one receiver."""

    def __init__(self, peer: int, timeout: float, wait_on: WaitOn = never) -> None:
        self._peer = peer
        self._timeout = timeout
        self._wait_on = wait_on
        with contextlib.ExitStack() as stack:
            self.place = stack.enter_context(shared_directory())
            segment = Path(self.place) / "segment"
            segment.touch()
            self._memory = map_segment(segment, SLOTS * SLOT_BYTES)
            self._door = stack.enter_context(open_door(Path(self.place) / "door", timeout))
            self._stack = stack.pop_all()

    def accept(self) -> SharedSend:
        """Meet the receiver, which has come already."""
        return SharedSend(self._memory, Bell(self._door.accept()[0], self._timeout, self._wait_on), self._peer)

    def close(self) -> None:
        """Remove the directory and everything in it. Safe to call twice."""
        self._stack.close()


def take_offer(place: str, peer: int, timeout: float, wait_on: WaitOn = never) -> SharedReceive:
    """The receiver's half of a meeting."""
    memory = map_segment(Path(place) / "segment", SLOTS * SLOT_BYTES)
    return SharedReceive(memory, Bell(call(Path(place) / "door", timeout), timeout, wait_on), peer)


class _Ring:
    """What both ends share: the slots, the socket, and whose turn it is."""

    transport = "shared memory"

    def __init__(self, memory: mmap.mmap, bell: Bell, peer: int) -> None:
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(SLOTS, SLOT_BYTES).unbind()
        self._bell = bell
        self._peer = peer
        self._turn = 0
        self._ours = 0  # slots that this end may use without waiting

    def close(self) -> None:
        """The memory goes with the last transfer."""
        self._bell.close()
        self._slots = ()

    def _next_slot(self, doing: str) -> Tensor:
        slots = self._slots  # `close` may run meanwhile
        if not slots:
            raise RuntimeError(f"Connection closed by this worker before {doing}")
        if self._ours == 0:
            self._ours = self._bell.wait(doing, SLOTS)
        self._ours -= 1
        slot = slots[self._turn]
        self._turn = (self._turn + 1) % SLOTS
        return slot


class SharedSend(_Ring):
    """Send end in shared memory."""

    def __init__(self, memory: mmap.mmap, bell: Bell, peer: int) -> None:
        super().__init__(memory, bell, peer)
        self._ours = SLOTS
        self.bytes_sent = 0

    def send(self, tensors: Sequence[Tensor], parts: Sequence[MessagePart] | None = None) -> None:
        """Copy a message into slots of the ring."""
        doing = f"sending to worker {self._peer}"
        memory = payload(tensors, parts)
        for pieces in cut(tuple(one.numel() for one in memory), SLOT_BYTES):
            slot = self._next_slot(doing)
            for index, start, stop, place in pieces:
                slot[place : place + stop - start].copy_(memory[index][start:stop])
            self._bell.ring(doing)
        self.bytes_sent += sum(one.numel() for one in memory)


class SharedReceive(_Ring):
    """Receive end in shared memory."""

    def __init__(self, memory: mmap.mmap, bell: Bell, peer: int) -> None:
        super().__init__(memory, bell, peer)
        self._freed = 0  # slots that the sender has not been told of

    def receive(self, parts: Sequence[MessagePart]) -> list[Tensor]:
        """Copy the next message out of slots of the ring."""
        doing = f"receiving from worker {self._peer}"
        tensors = [part.empty(_CPU) for part in parts]
        memory = [memory_of(tensor) for tensor in tensors]
        for pieces in cut(tuple(one.numel() for one in memory), SLOT_BYTES):
            slot = self._next_slot(doing)
            for index, start, stop, place in pieces:
                memory[index][start:stop].copy_(slot[place : place + stop - start])
            self._freed += 1
            if self._freed == _REPORTED:
                # A sender that has sent its last message may have left.
                with contextlib.suppress(RuntimeError):
                    self._bell.ring(doing, self._freed)
                self._freed = 0
        return tensors
