"""The wire format between workers and servers: frames over TCP sockets.

There is one socket per worker and shard; torch.distributed's store is only used to find each other. A socket reports at
once that its peer died and others are not affected, a new worker is one more connection, and one thread can wait for
whichever worker sends first. A process group of gloo has none of that.

A connection begins with a handshake (`hybridpar.comm.handshake`). Then come frames: a header (magic, length of the
meta data, length of the payload), the meta data as JSON, and the payload. What a payload means follows from the kind
that the meta data names. Objects are read by `hybridpar.formats.messages`, which runs no code.
"""

from __future__ import annotations

import functools
import json
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.handshake import REPLY_BYTES, ServerHandshake
from hybridpar.formats import messages
from hybridpar.formats.file_reader import Unreadable, parse_json
from hybridpar.machine.process import usable_memory

_HEADER = struct.Struct("!4sIQ")
_MAGIC = b"hyp1"
#: More meta data than any frame has: worker 0 is told of 10,000 steps at most.
_MOST_META = 1 << 24

#: Bytes of a payload that a host can hold.
_memory = functools.cache(usable_memory)


class Garbled(Exception):
    """What came is not one of our frames."""


@dataclass(frozen=True)
class Frame:
    """What came.

    Attributes:
        meta: Its `kind`, and what belongs to that.
        payload: 1-D uint8.
    """

    meta: dict[str, Any]
    payload: Tensor

    @property
    def kind(self) -> str:
        """What it is."""
        return str(self.meta["kind"])

    def unpack(self) -> Any:
        """The object that the payload is."""
        return unpack(self.payload)


def pack(item: Any) -> memoryview:
    """An object as `hybridpar.formats.messages.pack` takes it, as bytes."""
    return memoryview(messages.pack(item))


def unpack(payload: Tensor) -> Any:
    """What `pack` was given."""
    try:
        return messages.unpack(payload.numpy().data)
    except ValueError as error:
        raise Garbled(str(error)) from error


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous tensor's memory; the tensor must outlive it."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def head_of(meta: dict[str, Any], length: int) -> bytes:
    """What stands before a payload of so many bytes."""
    text = json.dumps(meta).encode()
    return _HEADER.pack(_MAGIC, len(text), length) + text


def frame_of(meta: dict[str, Any], *payload: memoryview) -> list[memoryview]:
    """A whole frame, as pieces of memory to be sent one after the other."""
    return [memoryview(head_of(meta, sum(len(part) for part in payload))), *(part for part in payload if len(part))]


def tune(connection: socket.socket) -> None:
    """Have small frames leave at once, and a host that vanished be noticed some day."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def read_exactly(connection: socket.socket, into: memoryview) -> None:
    """Fill memory from a blocking socket."""
    while len(into):
        count = connection.recv_into(into)
        if not count:
            raise ConnectionResetError("the connection was closed")
        into = into[count:]


def read_head(connection: socket.socket) -> tuple[dict[str, Any], int]:
    """Meta data of the next frame, and the length of its payload, which is still to be read."""
    head = bytearray(_HEADER.size)
    read_exactly(connection, memoryview(head))
    meta_length, length = _check_head(bytes(head))
    text = bytearray(meta_length)
    read_exactly(connection, memoryview(text))
    return _parse(bytes(text)), length


def _check_head(head: bytes) -> tuple[int, int]:
    magic, meta_length, length = _HEADER.unpack(head)
    if magic != _MAGIC:
        raise Garbled("no frame of hybridpar")
    if meta_length > _MOST_META or length > _memory():
        raise Garbled(f"a frame of {meta_length} + {length} bytes")
    return meta_length, length


def _parse(text: bytes) -> dict[str, Any]:
    try:
        meta = parse_json(text)
    except Unreadable as error:
        raise Garbled("meta data that is no JSON") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("kind"), str):
        raise Garbled("meta data without a kind")
    return meta


class Connection:
    """A server's end of a connection; never blocks."""

    def __init__(
        self,
        connection: socket.socket,
        handshake: ServerHandshake,
        most: Callable[[Connection, dict[str, Any]], int],
        now: float,
    ) -> None:
        connection.setblocking(False)
        tune(connection)
        self.socket = connection
        #: Whether the other end knows the job's token.
        self.known = False
        #: Who is at the other end, once it has said so.
        self.worker: int | None = None
        #: When it was last told to wait, before it is let in.
        self.told = 0.0
        #: When bytes last came, or queued ones went.
        self.active = now
        self._handshake, self._most = handshake, most
        self._out: deque[memoryview] = deque()
        self._room = torch.empty(0, dtype=torch.uint8)
        self._begin()
        self._head = bytearray(REPLY_BYTES)
        self._into, self._state = memoryview(self._head), "reply"

    def _begin(self) -> None:
        self._head = bytearray(_HEADER.size)
        self._text: bytearray | None = None
        self._meta: dict[str, Any] = {}
        self._payload = torch.empty(0, dtype=torch.uint8)
        self._into = memoryview(self._head)
        self._state = "head"

    @property
    def sending(self) -> bool:
        """Whether something is left to be sent."""
        return bool(self._out)

    def greet(self) -> None:
        """Begin the handshake."""
        self.send([memoryview(self._handshake.greeting)])

    def read(self) -> Iterator[Frame]:
        """All frames that are whole by now, each read when those before have been handled."""
        while self.socket.fileno() >= 0:
            try:
                count = self.socket.recv_into(self._into)
            except BlockingIOError:
                return
            if not count:
                raise ConnectionResetError("the connection was closed")
            self._into = self._into[count:]
            while not len(self._into):
                if (frame := self._advance()) is not None:
                    yield frame

    def _advance(self) -> Frame | None:
        """A part is whole: go on to the next one, or hand the frame over."""
        if self._state == "reply":
            self.send([memoryview(self._handshake.proof(bytes(self._head)))])
            self.known = True
            self._begin()
            return None
        if self._state == "head":
            meta_length, self._length = _check_head(bytes(self._head))
            self._text = bytearray(meta_length)
            self._into, self._state = memoryview(self._text), "meta"
            return None
        if self._state == "meta":
            assert self._text is not None
            self._meta = _parse(bytes(self._text))
            if self._length > (most := self._most(self, self._meta)):
                raise Garbled(f"{self._meta['kind'][:20]} with {self._length} bytes, at most {most} are expected")
            self._payload = self._take(self._length)
            self._state = "payload"
            if self._length:
                self._into = bytes_of(self._payload)
                return None
        frame = Frame(self._meta, self._payload)
        self._begin()
        return frame

    def _take(self, length: int) -> Tensor:
        """Memory for a payload. A push goes where the one before lay: it has been answered, or it would not come."""
        if self._meta["kind"] != "push":
            return torch.empty(length, dtype=torch.uint8)
        if self._room.numel() != length:
            self._room = torch.empty(length, dtype=torch.uint8)
        return self._room

    def send(self, parts: Sequence[memoryview]) -> None:
        """Queue memory, which must stay as it is until it is sent, and send what can be sent now."""
        self._out.extend(part for part in parts if len(part))
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        while self._out:
            try:
                count = self.socket.send(self._out[0])
            except BlockingIOError:
                return
            if count == len(self._out[0]):
                self._out.popleft()
            else:
                self._out[0] = self._out[0][count:]

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
