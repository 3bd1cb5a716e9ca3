"""The messages between workers and servers, and the connection that carries them.

There is a TCP socket for each worker and shard. A worker asks and the server answers, so each has at most a single
message on its way; `Wait` says that the answer is still to come.

| from the worker | what it says                                   | answer                                         |
| --------------- | ---------------------------------------------- | ---------------------------------------------- |
| `Hello`         | who it is; its model, stripe and codecs        | `Weights`; `Missing` for worker 0 of a new run |
| `Start`         | worker 0: parameters, optimizer state, counts  | `Weights`                                      |
| `Gradient`      | a push: number, clock, loss, samples, gradient | `Weights`, or `Squares` to worker 0 for a norm |
| `Squares`       | worker 0: the squared norm over all shards     | `Weights`                                      |
| `GatherItem`    | something for all workers, under a tag         | `GatheredItems`: what each has said            |
| `AskState`      | nothing                                        | `ShardState`: all that a checkpoint keeps      |
| `Bye`           | that it has finished                           | none                                           |

A server that lets nobody in, or has ended, answers `Refused` with the reason.

On the wire a message is a header (magic, length of the text, bytes of the tensors), the text, and the tensors in their
order. The text is JSON: the kind of message, its fields, and shape and dtype of each tensor. No message is read by
running code, and its fields are checked before anybody looks at them.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from hybridpar.comm.group import buffer_of
from hybridpar.comm.handshake import end
from hybridpar.errors import HybridparError
from hybridpar.formats.file_reader import Unreadable, parse_json
from hybridpar.formats.messages import DTYPES, put_together, take_apart, tensor_facts
from hybridpar.server.rules import Clipping
from hybridpar.server.shard import Answer, Push, StepRow
from hybridpar.server.stripes import Piece

_HEADER = struct.Struct("!4sIQ")
_MAGIC = b"hyp3"
#: More text than any message has: worker 0 hears of 10,000 steps at most.
_MOST_TEXT = 1 << 24
#: Bytes that are sent at a time; each such part has the whole time-out.
_PART = 1 << 20


class Garbled(Exception):
    """What came is no message, or none that fits here."""


class ServerMessage:
    """Base of all messages."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)


@dataclass(frozen=True, kw_only=True)
class Hello(ServerMessage):
    """A worker comes, for the first time or again. Answer: `Weights`, or `Missing`.

    Attributes:
        worker: Its number.
        pushes: Pushes of this process so far; a worker that lost its connection has some, and its successor has none.
        model: Fingerprint of the model, and of what the shard is to hold.
        policy: Codecs of pushes, as text.
    """

    worker: int
    model: str
    policy: str
    pushes: int = 0


@dataclass(frozen=True, kw_only=True)
class Start(ServerMessage):
    """Worker 0 brings a shard what it begins with. Answer: `Weights`.

    Attributes:
        pieces: The stripe.
        state: Weights, running statistics, optimizer and counts, as `Shard.load_state_dict` takes them.
        clipping: How gradients are clipped.
        limit: Pushes of the whole run.
        rest: At shard 0, by name, what else the model has.
    """

    pieces: list[Piece]
    state: dict[str, Any]
    clipping: Clipping
    limit: int
    rest: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Gradient(ServerMessage, Push):
    """A push, with its gradient. Answer: `Weights`, or for worker 0 `Squares` where norms are to be added up.

    Attributes:
        pieces: For each piece of the stripe its gradient in full precision, or the messages of its codec's rounds.
        states: What codecs must know to read their messages, by number of the piece.
        statistics: Running statistics after the step, for shard 0.
        stop: Whether all workers are to stop.
        save: Whether all workers are to write a checkpoint.
        heard: Step up to which it has heard what the steps did; None where it is not to hear.
    """

    pieces: list[Tensor | list[Tensor]]
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    statistics: Tensor = field(default_factory=lambda: torch.empty(0))
    stop: bool = False
    save: bool = False
    heard: int | None = None


@dataclass(frozen=True, kw_only=True)
class Squares(ServerMessage):
    """From a shard: squared norm of its part of a gradient. From worker 0: their sum. Answer: `Weights`."""

    squares: float


@dataclass(frozen=True, kw_only=True)
class GatherItem(ServerMessage):
    """Something that all workers are to know. Answer: `GatheredItems`, when all have said theirs under this tag."""

    tag: str
    item: Any


@dataclass(frozen=True, kw_only=True)
class AskState(ServerMessage):
    """Asks for all that a checkpoint keeps of a shard. `heard` is as in `Gradient`. Answer: `ShardState`."""

    heard: int | None = None


@dataclass(frozen=True, kw_only=True)
class Bye(ServerMessage):
    """The worker leaves, as it has finished. No answer."""


@dataclass(frozen=True, kw_only=True)
class Missing(ServerMessage):
    """Worker 0 is let in, and has to bring the weights."""


@dataclass(frozen=True, kw_only=True)
class Weights(ServerMessage, Answer):
    """The answer to a push, or to a worker that has come, as to a push of number 0.

    Attributes:
        values: The parameters; None where the worker has them.
        statistics: Running statistics.
        step: Steps done.
        done: Whether all pushes that were wanted have come.
        stop: Whether all workers are to stop.
        save: Whether all workers, which are in step, are to write a checkpoint.
        rows: What the steps did of which the worker has not heard.
        news: For worker 0: what happened to other workers.
        rest: To a worker that has come: what else the model has.
    """

    values: Tensor | None
    statistics: Tensor
    step: int
    done: bool
    stop: bool
    save: bool
    rows: list[StepRow] = field(default_factory=list)
    news: list[str] = field(default_factory=list)
    rest: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GatheredItems(ServerMessage):
    """What the workers said under a tag, by worker."""

    items: dict[int, Any]


@dataclass(frozen=True, kw_only=True)
class ShardState(ServerMessage):
    """All that a checkpoint keeps of a shard, with the steps of which the worker has not heard."""

    state: dict[str, Any]
    rows: list[StepRow]


@dataclass(frozen=True, kw_only=True)
class Wait(ServerMessage):
    """The server lives, and its answer is still to come."""


@dataclass(frozen=True, kw_only=True)
class Refused(ServerMessage):
    """The worker is not let in, or all training here has ended, for this reason."""

    error: HybridparError


_KINDS: dict[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in ServerMessage.__subclasses__()}


class Connection:
    """Either end of a connection, which blocks.

    `patience` is how long an end waits for the next bytes: a worker the time-out, a server for ever.
    """

    def __init__(
        self,
        connection: socket.socket,
        timeout: float,
        patience: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        traffic: list[int] | None = None,
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages leave at once
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanished is noticed some day
        self.socket, self._timeout, self._patience, self._now = connection, timeout, patience, clock
        self._sending = threading.Lock()
        #: Bytes sent and received; those of earlier connections are given.
        self.traffic = [0, 0] if traffic is None else traffic
        #: When bytes last came or went.
        self.active = clock()

    def send(self, message: ServerMessage) -> None:
        """Send a message; its tensors must stay as they are until this returns."""
        text, tensors = take_apart({known.name: getattr(message, known.name) for known in fields(message)})  # type: ignore[arg-type]
        tensors = [tensor.detach().cpu().contiguous() for tensor in tensors]
        head = json.dumps([type(message).__name__, text, tensor_facts(tensors)]).encode()
        size = sum(tensor.nbytes for tensor in tensors)
        with self._sending:
            self._write(memoryview(_HEADER.pack(_MAGIC, len(head), size) + head))
            for tensor in tensors:
                if tensor.numel():
                    self._write(buffer_of(tensor))

    def receive(self, most: int) -> Any:
        """The next message, whose tensors may have so many bytes."""
        magic, length, size = _HEADER.unpack(self._read(_HEADER.size))
        if magic != _MAGIC:
            raise Garbled("no message of hybridpar")
        if length > _MOST_TEXT or size > most:
            raise Garbled(f"a message of {length} + {size} bytes, at most {_MOST_TEXT} + {most} are expected")
        try:
            kind, text, facts = parse_json(bytes(self._read(length)))
            forms = [(tuple(map(int, shape)), DTYPES[dtype]) for shape, dtype in facts]
            if any(min(shape, default=0) < 0 for shape, _ in forms):
                raise ValueError("a negative size")
            if sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms) != size:
                raise ValueError("tensors of another size")
            adapter = _KINDS[kind]
            tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in forms]
        except (Unreadable, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
            raise Garbled(f"no message ({type(error).__name__}: {str(error)[:100]})") from error
        for tensor in tensors:
            if tensor.numel():
                self._fill(buffer_of(tensor))
        try:
            return adapter.validate_python(put_together(text, tensors))
        except (ValueError, TypeError, OverflowError) as error:
            raise Garbled(f"{kind} with fields that do not fit ({str(error)[:200]})") from error

    def is_over(self) -> bool:
        """Whether the other end, which should be waiting, is gone or says something."""
        self.socket.settimeout(0.0)
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def end(self) -> None:
        """Wake whoever reads from the connection, and close it. Safe to call twice, from any thread."""
        end(self.socket)

    def _write(self, memory: memoryview) -> None:
        self.socket.settimeout(self._timeout)
        for start in range(0, len(memory), _PART):
            part = memory[start : start + _PART]
            self.active = self._now()  # before the other end can go on
            self.socket.sendall(part)
            self.traffic[0] += len(part)

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def _fill(self, into: memoryview) -> None:
        self.socket.settimeout(self._patience)
        while len(into):
            count = self.socket.recv_into(into)
            if not count:
                raise ConnectionResetError("the connection was closed")
            self.traffic[1] += count
            self.active = self._now()
            into = into[count:]
