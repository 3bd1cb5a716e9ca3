"""A worker's connection to one shard: sends gradients piece by piece, and receives weights.

One thread per shard sends and receives, so that shards do not wait for each other. A push is one frame whose length is
known beforehand, so its pieces leave one by one, in the order in which backward passes usually make them (from the last
layer to the first), as soon as they are there. Whether the gradient is finite, and its loss, follow in a frame
of their own, and only then does the push count.

Without a barrier, a worker whose connection breaks connects again and repeats the push under the same number, and the
shard knows whether it has seen it. So a push is applied exactly once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.handshake import (
    GREETING_BYTES,
    PROOF_BYTES,
    HandshakeError,
    WorkerHandshake,
)
from hybridpar.errors import SyncError, UsageError
from hybridpar.machine.supervise import TOKEN_VARIABLE
from hybridpar.server.encoding import PushEncoder
from hybridpar.server.stripes import Stripe
from hybridpar.server.wire import Garbled, bytes_of, frame_of, head_of, pack, read_exactly, read_head, tune, unpack


@dataclass(frozen=True)
class LinkOptions:
    """What a worker must know to come to a shard.

    Attributes:
        worker: Its number.
        shards: How many shards there are.
        fingerprint: Of the model.
        policy: Codecs of pushes, as text.
        token: What lets it in.
        timeout: Seconds after which a silent shard is an error.
        half: Whether weights come as float16.
        returns: Whether to come again where a connection breaks.
    """

    worker: int
    shards: int
    fingerprint: str
    policy: str
    token: str = field(repr=False)
    timeout: float
    half: bool = False
    returns: bool = False


@dataclass
class PushFlight:
    """A push under way.

    Attributes:
        meta: What is known before.
        sizes: Bytes of each piece.
        ready: Numbers of the pieces, as they get ready; None says that the end is known.
        end: What is known afterwards.
        statistics: Running statistics that go with it.
        messages: The pieces as they were sent, by number.
    """

    meta: dict[str, Any]
    sizes: Sequence[int]
    ready: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)
    end: dict[str, Any] = field(default_factory=dict)
    statistics: Tensor = field(default_factory=lambda: torch.empty(0))
    messages: dict[int, Tensor] = field(default_factory=dict)

    def finish(self) -> None:
        """The end is known, or never will be."""
        self.ready.put(None)


class ShardLink:
    """A worker's way to one shard."""

    def __init__(
        self,
        number: int,
        address: str,
        stripe: Stripe,
        views: Sequence[Tensor],
        encoder: PushEncoder | None,
        options: LinkOptions,
    ) -> None:
        self.number, self.address, self.stripe = number, address, stripe
        self.encoder = encoder
        self._views, self._options = views, options
        self._session = os.urandom(8).hex()
        self._socket: socket.socket | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"shard-{number}")
        #: Called with the squared norm of the shard's part of a gradient: that of the whole gradient.
        self.add_up: Callable[[float], float] = lambda squares: squares
        #: Whether the shard has said that it has weights; they are then those of this worker.
        self.has_weights = False
        self.clock = 0
        self.sequence = 0
        self.sent = self.received = 0
        #: Running statistics as they came last.
        self.statistics = torch.empty(0)
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._rows: int | None = None
        self._buffers = 0

    # ------------------------------------------------------------------ calls

    def submit(self, call: Any, *arguments: Any) -> Future[Any]:
        """Have the thread of this shard call something."""
        return self._thread.submit(call, *arguments)

    def hello(self, buffers: int, rows: int | None) -> dict[str, Any]:
        """Come to the shard, and wait until it has weights, unless this is worker 0, which brings them."""
        self._rows, self._buffers = rows, buffers
        with self._named():
            self._connect()
            self._say_hello()
            return self._welcomed()

    def initialise(self, start: dict[str, Any]) -> dict[str, Any]:
        """Bring the weights to a shard that has none."""
        with self._named():
            self._send({"kind": "init"}, pack(start))
            return self._welcomed()

    def push(self, flight: PushFlight) -> dict[str, Any]:
        """Send a gradient piece by piece, then its end, and wait for the weights."""
        self.sequence += 1
        flight.meta |= {"kind": "push", "sequence": self.sequence, "clock": self.clock}
        flight.meta["warm"] = self.encoder.warm if self.encoder is not None else []
        try:
            try:
                self._stream(flight)
                return self._answer()
            except (OSError, Garbled, HandshakeError) as error:
                return self._again(flight, error)
        except BaseException:
            if self.encoder is not None:
                self.encoder.rollback()
            raise

    def ask(self, meta: dict[str, Any], item: Any = None) -> tuple[dict[str, Any], Tensor]:
        """Send a frame, and wait for one that is no `wait`."""
        with self._named():
            self._send(meta, *([] if item is None else [pack(item)]))
            meta, length = self._next()
            payload = torch.empty(length, dtype=torch.uint8)
            self._read(bytes_of(payload))
            self._note_rows(meta)
            return meta, payload

    def unpack_rest(self) -> Any:
        """What worker 0 left at this shard for all workers."""
        return unpack(self._rest)

    def send_coders(self) -> None:
        """Tell the shard what its twins of this worker's coders must know, which has been loaded from a checkpoint."""
        if self.encoder is not None:
            with self._named():
                self._send({"kind": "coders"}, pack(self.encoder.shared_state()))

    def close(self, *, graceful: bool = True) -> None:
        """Leave."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                if graceful:
                    self._send({"kind": "bye"})
                self._socket.shutdown(socket.SHUT_RDWR)  # closing alone does not wake a thread that reads
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    # ------------------------------------------------------------------- parts

    def _connect(self) -> None:
        host, _, port = self.address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), self._options.timeout)
        tune(self._socket)
        handshake = WorkerHandshake(self._options.token, self.address)
        greeting, proof = bytearray(GREETING_BYTES), bytearray(PROOF_BYTES)
        read_exactly(self._socket, memoryview(greeting))
        self._socket.sendall(handshake.reply(bytes(greeting)))
        try:
            read_exactly(self._socket, memoryview(proof))
        except ConnectionError as error:
            raise HandshakeError(f"it did not let this worker in; {TOKEN_VARIABLE} must be equal everywhere") from error
        handshake.check(bytes(proof))

    def _say_hello(self) -> None:
        options = self._options
        state = [] if self.encoder is None else self.encoder.shared_state()
        meta = {
            "kind": "hello",
            "worker": options.worker,
            "session": self._session,
            "fingerprint": options.fingerprint,
            "stripe": self.stripe.fingerprint,
            "policy": options.policy,
            "buffers": self._buffers,
            "rows": self._rows,
        }
        self._send(meta, pack(state))

    def _welcomed(self) -> dict[str, Any]:
        meta, length = self._next()
        if meta["kind"] != "welcome":
            raise self._gone(Garbled(f"{meta['kind']} instead of a welcome"))
        self.has_weights = bool(meta["initialised"])
        if self.has_weights:
            if self.sequence == 0:
                self.sequence = int(meta["sequence"])
            self._take_weights(meta, length - int(meta["rest"]))
            self._rest = torch.empty(int(meta["rest"]), dtype=torch.uint8)
            self._read(bytes_of(self._rest))
        return meta

    def _stream(self, flight: PushFlight) -> None:
        """Send the pieces as they get ready, in their order."""
        self._raw(memoryview(head_of(flight.meta | {"coded": self.encoder is not None}, sum(flight.sizes))))
        waiting: set[int] = set()
        ended = False
        for number in range(len(flight.sizes)):
            while number not in waiting and not ended:
                came = flight.ready.get()
                if came is None:
                    ended = True
                else:
                    waiting.add(came)
            if number not in flight.messages:
                raise SyncError(f"the gradient of {self.stripe.pieces[number].label} was not handed over")
            self._raw(bytes_of(self._message(flight, number)))
        if not ended:
            flight.ready.get()
        self._finish(flight)

    def _message(self, flight: PushFlight, number: int) -> Tensor:
        """A piece as it is sent; it is encoded once, however often it is sent."""
        message = flight.messages[number]
        if self.encoder is not None and message.dtype != torch.uint8:
            message = flight.messages[number] = self.encoder.encode(number, message)
        return message

    def _finish(self, flight: PushFlight) -> None:
        statistics = [bytes_of(flight.statistics)] if flight.statistics.numel() else []
        self._send({"kind": "end"} | flight.end, *statistics)

    def _answer(self) -> dict[str, Any]:
        while True:
            meta, length = self._next()
            if meta["kind"] == "squares":
                self._send({"kind": "norm", "squares": self.add_up(float(meta["squares"]))})
                continue
            if meta["kind"] != "weights":
                raise Garbled(f"{meta['kind']} instead of weights")
            self._take_weights(meta, length)
            if meta["sequence"] == self.sequence:
                break
        self._note_rows(meta)
        if self.encoder is not None:
            self.encoder.commit() if meta["applied"] else self.encoder.rollback()
        return meta

    def _note_rows(self, meta: dict[str, Any]) -> None:
        """Remember up to which step this worker knows what happened, should it have to come again."""
        if meta.get("rows"):
            self._rows = int(meta["rows"][-1]["step"])

    def _again(self, flight: PushFlight, error: BaseException) -> dict[str, Any]:
        """Come again, once, and repeat the push with the same number and the same bytes."""
        if not self._options.returns:
            raise self._gone(error) from error
        while not flight.end:  # the end of the gradient is not known yet
            if flight.ready.get() is None:
                break
        if self._socket is not None:
            self._socket.close()
        try:
            self._connect()
            clock = self.clock
            self._say_hello()
            self._welcomed()
            flight.meta["clock"] = clock  # it was computed on the weights of before
            messages = [bytes_of(self._message(flight, number)) for number in range(len(flight.sizes))]
            self._send(flight.meta | {"coded": self.encoder is not None}, *messages)
            self._finish(flight)
            return self._answer()
        except (OSError, Garbled, HandshakeError) as second:
            raise self._gone(second) from second

    def _take_weights(self, meta: dict[str, Any], length: int) -> None:
        """Read weights into the parameters, and what comes behind them."""
        statistics = 4 * int(meta["buffers"])
        expected = self.stripe.count * (2 if self._options.half else 4)
        if length - statistics not in (0, expected):
            raise Garbled(f"weights of {length - statistics} bytes for a stripe of {self.stripe.count}")
        if length > statistics:
            if self._options.half:
                self._take_half()
            else:
                for view in self._views:
                    self._read(bytes_of(view))
        if statistics:
            self.statistics = torch.empty(statistics // 4)
            self._read(bytes_of(self.statistics))
        self.clock = int(meta["clock"])

    @torch.no_grad()
    def _take_half(self) -> None:
        """Read weights in half precision into the parameters."""
        came = torch.empty(self.stripe.count, dtype=torch.float16)
        self._read(bytes_of(came))
        for view, (first, last) in zip(self._views, self.stripe.ranges, strict=True):
            view.copy_(came[first:last])

    # -------------------------------------------------------------------- wire

    def _next(self) -> tuple[dict[str, Any], int]:
        """Meta data of the next frame that is no `wait`."""
        while True:
            meta, length = self._frame()
            if meta["kind"] != "wait":
                return meta, length

    def _frame(self) -> tuple[dict[str, Any], int]:
        meta, length = read_head(self._open)
        if meta["kind"] == "refused":
            kind = UsageError if meta["error"] == "usage" else SyncError
            raise kind(meta["what"], meta["why"], meta["fix"])
        return meta, length

    @property
    def _open(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionResetError("not connected")
        return self._socket

    def _read(self, into: memoryview) -> None:
        read_exactly(self._open, into)
        self.received += len(into)

    def _send(self, meta: dict[str, Any], *payload: memoryview) -> None:
        for part in frame_of(meta, *payload):
            self._raw(part)

    def _raw(self, part: memoryview) -> None:
        self._open.sendall(part)
        self.sent += len(part)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the connection as what they mean to the user."""
        try:
            yield
        except (OSError, Garbled, HandshakeError) as error:
            raise self._gone(error) from error

    def _gone(self, error: BaseException) -> SyncError:
        options = self._options
        silent = isinstance(error, TimeoutError)
        reason = f"did not answer within {options.timeout:g} s" if silent else f"is gone ({error})"
        return SyncError(
            f"shard {self.number} of {options.shards} at {self.address} {reason}, and worker {options.worker} needs it",
            "Each shard holds a stripe of the parameters that exists nowhere else.",
            "A launched job restarts from its last checkpoint; else start it again with --resume.",
        )
