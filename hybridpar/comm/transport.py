"""Sends lists of tensors, whose shapes both ends know, from one worker to another.

A *message* is a list of tensors whose shapes, dtypes and memory formats are fixed before training, so nothing but data
is ever sent: no header, no handshake, no pickle. Every ordered pair of workers has a channel of its own, with a send
end and a receive end. Both block (on a GPU: the current stream does), so a lane per end is all the concurrency there
is, and messages arrive in the order in which they were sent.

This file holds the contract and the channel over a group; workers of one host have a faster one
(`hybridpar.comm.shared_channel`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybridpar.comm.group import Group
from hybridpar.errors import SyncError

#: Tensors below this many bytes are sent together. Over TCP a transfer costs about as much as copying this much twice.
FUSED_BYTES = 1 << 19

#: The part of a fused buffer that a tensor gets is a multiple of this many bytes.
_ALIGNMENT = 64

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def flat_view(dense: Tensor) -> Tensor:
    """A dense tensor in any memory format as a 1-D view in memory order."""
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills its memory without gaps or overlaps, whatever the order of its dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class MessagePart:
    """What both ends know about one tensor of a message.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        channels_last: Whether it is sent and received in `channels_last` memory format (4-D; 5-D in
            `channels_last_3d`), else contiguous.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> MessagePart:
        """The part that a tensor makes: in channels_last only if it is that and not contiguous."""
        order = _CHANNELS_LAST.get(tensor.dim())
        last = order is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=order)
        return cls(tuple(tensor.shape), tensor.dtype, last)

    @property
    def memory_format(self) -> torch.memory_format:
        """The memory format of torch that the part has."""
        return _CHANNELS_LAST[len(self.shape)] if self.channels_last else torch.contiguous_format

    def empty(self, device: torch.device) -> Tensor:
        """A new tensor that holds the part."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=self.memory_format)


class SendEnd(Protocol):
    """Where messages to one worker leave."""

    transport: str
    bytes_sent: int

    def send(self, tensors: Sequence[Tensor], parts: Sequence[MessagePart] | None = None) -> None:
        """Send a message. When it returns (on a GPU: in stream order) the tensors may be changed."""

    def close(self) -> None:
        """Leave, and end a transfer that runs on another thread. Safe to call twice."""


class ReceiveEnd(Protocol):
    """Where messages from one worker arrive."""

    transport: str

    def receive(self, parts: Sequence[MessagePart]) -> list[Tensor]:
        """Receive the next message into new tensors, each contiguous in its memory format."""

    def close(self) -> None:
        """Leave, and end a transfer that runs on another thread. Safe to call twice."""


def payload(tensors: Sequence[Tensor], parts: Sequence[MessagePart] | None = None) -> list[Tensor]:
    """The memory of tensors as 1-D uint8 views, in the order in which the message lays it out."""
    parts = [MessagePart.of(tensor) for tensor in tensors] if parts is None else parts
    if [(tensor.shape, tensor.dtype) for tensor in tensors] != [(part.shape, part.dtype) for part in parts]:
        raise SyncError(
            f"a message of {_text(MessagePart.of(tensor) for tensor in tensors)} was to be sent as {_text(parts)}",
            "Both ends of a channel know shapes and dtypes beforehand, and nothing else is sent.",
            "Make the stage return the same tensors as in the example batch it was cut with.",
        )
    return [
        memory_of(tensor.detach().contiguous(memory_format=part.memory_format))
        for tensor, part in zip(tensors, parts, strict=True)
    ]


def memory_of(dense: Tensor) -> Tensor:
    """The memory of a dense tensor as a 1-D uint8 view."""
    return flat_view(dense).view(torch.uint8)


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a message's tensor number `tensor`, and where in a chunk they are put.

    Attributes:
        tensor: Number of the tensor in the message.
        start: First of its bytes.
        stop: The byte after the last one.
        place: Byte of the chunk at which they begin.
    """

    tensor: int
    start: int
    stop: int
    place: int


@functools.lru_cache(maxsize=4096)
def cut(sizes: tuple[int, ...], room: int | None = None) -> tuple[tuple[Piece, ...], ...]:
    """Lay the tensors of a message one after the other into chunks."""
    chunks: list[list[Piece]] = []
    place = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            if not chunks or (room is not None and place >= room):
                chunks.append([])
                place = 0
            stop = size if room is None else min(size, start + room - place)
            chunks[-1].append(Piece(tensor, start, stop, place))
            place += -(-(stop - start) // _ALIGNMENT) * _ALIGNMENT
            start = stop
    return tuple(tuple(chunk) for chunk in chunks)


def _text(parts: Iterable[MessagePart]) -> str:
    named = [f"{'x'.join(map(str, part.shape)) or 'scalar'} {str(part.dtype)[6:]}" for part in parts]
    return ", ".join(named) or "nothing"


class _GroupEnd:
    """What both ends of a channel over a group share."""

    def __init__(self, group: Group, peer: int, device: torch.device) -> None:
        self.transport = "nccl" if device.type == "cuda" else "gloo"
        self._group = group
        self._peer = peer
        self._device = device

    def close(self) -> None:
        """Do nothing: the group belongs to its maker."""

    def _divide(self, memory: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, tuple[Piece, ...]]:
        """What is transferred as it lies, the buffer in which the rest is sent together, and its pieces."""
        small = tuple(one.numel() if one.numel() < FUSED_BYTES else 0 for one in memory)
        pieces = next(iter(cut(small)), ())
        if len(pieces) < 2:
            return list(memory), torch.empty(0), ()
        last = pieces[-1]
        buffer = torch.empty(last.place + last.stop, dtype=torch.uint8, device=self._device)
        return [one for one in memory if one.numel() >= FUSED_BYTES], buffer, pieces


class GroupSend(_GroupEnd):
    """Send end over a group."""

    bytes_sent = 0

    def send(self, tensors: Sequence[Tensor], parts: Sequence[MessagePart] | None = None) -> None:
        """Send a message; small tensors in one buffer."""
        memory = payload(tensors, parts)
        alone, buffer, pieces = self._divide(memory)
        for index, _, size, place in pieces:
            buffer[place : place + size].copy_(memory[index])
        for tensor in (*alone, buffer):
            self._group.send(tensor, self._peer)
        self.bytes_sent += sum(one.numel() for one in memory)


class GroupReceive(_GroupEnd):
    """Receive end over a group."""

    def receive(self, parts: Sequence[MessagePart]) -> list[Tensor]:
        """Receive the next message."""
        tensors = [part.empty(self._device) for part in parts]
        memory = [memory_of(tensor) for tensor in tensors]
        alone, buffer, pieces = self._divide(memory)
        for tensor in (*alone, buffer):
            self._group.recv(tensor, self._peer)
        for index, _, size, place in pieces:
            memory[index].copy_(buffer[place : place + size])
        return tensors
