"""Collectives of CPU workers over TCP connections, carried out by the thread that calls them.

Gloo hands each message to threads of its own, which cost a core that computes more than the message does, and each
must wake up before the next can go on. Here the calling thread, which is a sync lane, writes to and reads from a
connection to each peer. Messages that arrive while others leave are added up on the way.

Workers and strangers reach the same door while connections are made. Both ends prove that they know the job's token
(`hybridpar.comm.handshake`); a stranger is turned away, waits in vain, or gives way to who comes later, and delays
nobody.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.group import REDUCE, SMALL, Gather, Group, Reduction, WaitOn, buffer_of, never, reduce_rows, split
from hybridpar.comm.handshake import (
    GREETING_BYTES,
    PROOF_BYTES,
    REPLY_BYTES,
    HandshakeError,
    ServerHandshake,
    WorkerHandshake,
)
from hybridpar.machine.addresses import gloo_address
from hybridpar.machine.supervise import TOKEN_VARIABLE, new_token

#: Bytes after which what arrives is added up while the rest is on its way.
_CHUNK = 1 << 18

#: Workers up to which each has a connection to every other one.
MOST_WORKERS = 16

#: Seconds for connections to be made.
_SETUP_SECONDS = 30.0

#: Connections that may be in their handshake at a time, beside those that are expected. The oldest gives way.
_MOST_STRANGERS = 64

_HEADER = struct.Struct("!II")  # rank of the caller, number of the group; behind its reply

_NOTHING = torch.empty(0, dtype=torch.uint8)


class SocketGroup(Group):
    """A connection to every other worker. After `timeout` seconds of silence `wait_on` says whether to wait again."""

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout: float, wait_on: WaitOn = never) -> None:
        self.rank, self.size = rank, len(peers) + 1
        self._peers = dict(sorted(peers.items()))
        self._timeout = timeout
        self._wait_on = wait_on
        self._scratch = _NOTHING
        # The kernel's time-out: Python's own costs a second system call for every wait.
        limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        for one in self._peers.values():
            one.settimeout(None)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> None:
        flat = tensor.detach().view(-1)
        if not flat.numel() or self.size == 1:
            return
        if self.size == 2:
            self._reduce_with_the_other(flat, REDUCE[reduction])
        elif flat.nbytes <= SMALL:
            rows = flat.new_empty(self.size * flat.numel())
            self.all_gather(rows, flat)
            reduce_rows(rows.view(self.size, -1), flat, reduction)
        else:
            self._reduce_by_stripes(flat, reduction)

    def all_to_all(self, out: Tensor, inp: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        sent, received = split(inp, in_sizes), split(out, out_sizes)
        received[self.rank].copy_(sent[self.rank])
        self._exchange(sent, received)

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        rows = split(out, [inp.numel()] * self.size)
        rows[self.rank].copy_(inp)
        self._exchange([inp] * self.size, rows)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._carry([_Stream(rank, self._peers[rank], tensor, _NOTHING)])

    def recv(self, tensor: Tensor, rank: int) -> None:
        self._carry([_Stream(rank, self._peers[rank], _NOTHING, tensor)])

    def close(self) -> None:
        for one in self._peers.values():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _reduce_with_the_other(self, flat: Tensor, reduce: Callable[..., Tensor]) -> None:
        """Exchange everything with the one peer; what has left and has arrived is added meanwhile."""
        count, unit = flat.nbytes, flat.element_size()
        if self._scratch.numel() < count:
            self._scratch = torch.empty(count, dtype=torch.uint8)
        theirs = self._scratch[:count].view(flat.dtype)
        done = 0

        def advance(bytes_both_ways: int) -> None:
            nonlocal done
            ready = bytes_both_ways // unit
            if ready > done:
                part = slice(done, ready)
                reduce(flat[part], theirs[part], out=flat[part])
                done = ready

        self._exchange([flat, flat], [theirs, theirs], advance if count > _CHUNK else None)
        advance(count)

    def _reduce_by_stripes(self, flat: Tensor, reduction: Reduction) -> None:
        """Each worker reduces a stripe, by rank, and sends the result to all."""
        bounds = [flat.numel() * part // self.size for part in range(self.size + 1)]
        sizes = [stop - start for start, stop in pairwise(bounds)]
        mine = sizes[self.rank]
        rows = flat.new_empty(self.size * mine)
        self.all_to_all(rows, flat, [mine] * self.size, sizes)
        stripes = split(flat, sizes)
        reduce_rows(rows.view(self.size, -1), stripes[self.rank], reduction)
        self._exchange([stripes[self.rank]] * self.size, stripes)

    # ---------------------------------------------------------------- messages

    def _exchange(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], advance: Callable[[int], None] | None = None
    ) -> None:
        """Send each peer a message and receive one from each, all at a time."""
        self._carry([_Stream(rank, peer, sent[rank], received[rank]) for rank, peer in self._peers.items()], advance)

    def _carry(self, streams: Sequence[_Stream], advance: Callable[[int], None] | None = None) -> None:
        """Send and receive until nothing is missing."""
        try:
            for stream in streams:
                stream.send()
            if any(stream.unsent for stream in streams):
                self._go_on_both_ways(streams, advance)
            for stream in streams:
                flags = socket.MSG_WAITALL  # waits for a whole chunk, in the kernel
                while stream.missing:
                    if stream.receive(_CHUNK if advance is not None else stream.missing, flags):
                        flags = socket.MSG_WAITALL
                    elif flags == socket.MSG_DONTWAIT:
                        raise self._late()
                    elif not self._wait_on():
                        flags = socket.MSG_DONTWAIT  # it may have arrived meanwhile
                    if advance is not None:
                        advance(stream.arrived)
        except OSError as error:
            raise RuntimeError(f"Connection closed by peer: {error}") from error

    def _go_on_both_ways(self, streams: Sequence[_Stream], advance: Callable[[int], None] | None) -> None:
        """Send and receive, whatever is possible, until everything has left."""
        poller = select.poll()
        by_number = {stream.number: stream for stream in streams}
        for stream in streams:
            poller.register(stream.number, stream.wanted)
        patience = self._timeout
        while any(stream.unsent for stream in streams):
            ready = poller.poll(patience * 1e3)
            if not ready and not patience:
                raise self._late()
            patience = self._timeout if ready or self._wait_on() else 0.0  # once more, at once
            for number, events in ready:
                stream = by_number[number]
                if events & ~select.POLLOUT and stream.missing:
                    stream.receive(stream.missing, socket.MSG_DONTWAIT)
                if events & ~select.POLLIN and stream.unsent:
                    stream.send()
                if stream.wanted:
                    poller.modify(number, stream.wanted)
                else:  # a peer that is done and leaves would be reported for ever
                    poller.unregister(number)
            if advance is not None:
                stream = streams[0]
                advance(min(stream.arrived, stream.left) // _CHUNK * _CHUNK)

    def _late(self) -> RuntimeError:
        return RuntimeError(f"Timed out waiting {self._timeout:g} s for a peer")


class _Stream:
    """A message to a peer and one from it."""

    def __init__(self, rank: int, connection: socket.socket, sent: Tensor, received: Tensor) -> None:
        self._rank = rank
        self._socket = connection
        self._out, self._in = buffer_of(sent), buffer_of(received)
        self.number = connection.fileno()
        self.left = self.arrived = 0
        if self.number < 0:
            raise RuntimeError("Connection closed: this worker has left the job")

    @property
    def unsent(self) -> int:
        """Bytes that have not left."""
        return len(self._out) - self.left

    @property
    def missing(self) -> int:
        """Bytes that have not arrived."""
        return len(self._in) - self.arrived

    @property
    def wanted(self) -> int:
        """What the poller is to look for."""
        return (select.POLLOUT if self.unsent else 0) | (select.POLLIN if self.missing else 0)

    def send(self) -> None:
        """Send as much as the kernel takes."""
        if self.unsent:
            with contextlib.suppress(BlockingIOError), self._named():
                self.left += self._socket.send(self._out[self.left :], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def receive(self, most: int, flags: int) -> bool:
        """Receive up to `most` bytes; False where there are none yet, as poll may be wrong and waiting has an end."""
        with self._named():
            try:
                got = self._socket.recv_into(self._in[self.arrived : self.arrived + most], 0, flags)
            except BlockingIOError:
                return False
            if not got:
                raise ConnectionResetError
        self.arrived += got
        return True

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            raise ConnectionResetError(f"worker {self._rank} of the group has left") from error


# --------------------------------------------------------------------- set-up


def open_sockets(
    own: int,
    members: Sequence[int],
    gather: Gather,
    timeout: float,
    count: int,
    wait_on: WaitOn = never,
) -> list[SocketGroup]:
    """Connect every worker of a party to every other one, for several groups; a collective of all parties.

    Workers listen on the address that gloo listens on. Where the environment holds no token of the job, rank 0 hands
    out a random one by `gather`.
    """
    peers: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    rank, size = members.index(own), len(members)
    with contextlib.ExitStack() as stack:
        # Each step is followed by a gather, so a worker's problem is everybody's.
        door, problem = None, None
        try:
            door = stack.enter_context(contextlib.closing(_Door(size * count)))
        except OSError as error:
            problem = f"worker {own} cannot listen: {error}"
        secret = os.environ.get(TOKEN_VARIABLE)
        answers: list[Any] = gather((None if door is None else door.address, None if secret else new_token()))
        addresses, tokens = zip(*answers, strict=True)
        if door is not None and None not in addresses:
            token = secret or tokens[0] or ""
            try:
                deadline = time.monotonic() + min(timeout, _SETUP_SECONDS)
                for lower in range(rank):
                    for number, known in enumerate(peers):
                        known[lower] = _call(addresses[members[lower]], token, rank, number, deadline)
                door.answer(token, peers, count * (size - 1 - rank), deadline)
            except OSError as error:
                problem = f"worker {own} cannot reach all others: {error}"
        problems = [answer for answer in gather(problem) if answer is not None]
    for connection in (one for known in peers for one in known.values()):
        if problems:
            connection.close()
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if problems:
        raise OSError(problems[0])
    return [SocketGroup(rank, known, timeout, wait_on) for known in peers]


def _call(address: tuple[str, int], token: str, rank: int, number: int, deadline: float) -> socket.socket:
    """Connect to a worker that listens, and say who calls for which group; again where strangers were in the way."""
    while True:
        connection = socket.create_connection(address, _left(deadline))
        handshake = WorkerHandshake(token, str(address))
        try:
            reply = handshake.reply(_receive(connection, GREETING_BYTES))
            connection.sendall(reply + _HEADER.pack(rank, number))
            handshake.check(_receive(connection, PROOF_BYTES))
            return connection
        except (HandshakeError, OSError) as error:
            connection.close()
            if not isinstance(error, ConnectionError) or time.monotonic() > deadline:
                raise OSError(str(error)) from error
            time.sleep(0.01)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it closed the connection during the handshake")
        data += more
    return data


class _Door:
    """Where workers with higher ranks call. What a stranger does there, or does not do, changes nothing."""

    def __init__(self, callers: int) -> None:
        address = gloo_address()
        self._callers = callers
        self._strangers: dict[socket.socket, ServerHandshake] = {}  # in their handshake, the oldest first
        self._selector = selectors.DefaultSelector()
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.bind((address, 0))
            self._socket.listen(socket.SOMAXCONN)  # strangers must not fill it before workers call
        except OSError:
            self.close()
            raise
        self._socket.setblocking(False)  # who has been reported may have left
        self._selector.register(self._socket, selectors.EVENT_READ)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def answer(self, token: str, peers: Sequence[dict[int, socket.socket]], calls: int, deadline: float) -> None:
        """Let so many workers in, each for a group."""
        while calls:
            if time.monotonic() > deadline:
                raise TimeoutError("not all have called in time")
            for key, _ in self._selector.select(_left(deadline)):
                connection: Any = key.fileobj
                with contextlib.suppress(OSError, HandshakeError, struct.error):
                    if connection is self._socket:
                        self._greet(connection.accept()[0], token)
                    elif connection in self._strangers:  # it has not given way meanwhile
                        caller, number, known = self._let_in(connection)
                        peers[number][caller] = known
                        calls -= 1

    def close(self) -> None:
        """End all connections of strangers."""
        for connection in (self._socket, *self._strangers):
            connection.close()
        self._selector.close()

    def _greet(self, stranger: socket.socket, token: str) -> None:
        self._strangers[stranger] = handshake = ServerHandshake(token, str(self.address))
        self._selector.register(stranger, selectors.EVENT_READ)
        if len(self._strangers) > self._callers + _MOST_STRANGERS:
            self._forget(next(iter(self._strangers))).close()
        # To be reported when all of a reply is there.
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, REPLY_BYTES + _HEADER.size)
        stranger.setblocking(False)
        stranger.send(handshake.greeting)

    def _let_in(self, stranger: socket.socket) -> tuple[int, int, socket.socket]:
        handshake = self._strangers[stranger]
        with self._forget(stranger):
            data = stranger.recv(REPLY_BYTES + _HEADER.size)
            proof = handshake.proof(data[:REPLY_BYTES])
            caller, number = _HEADER.unpack(data[REPLY_BYTES:])
            stranger.send(proof)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return caller, number, stranger.dup()

    def _forget(self, stranger: socket.socket) -> socket.socket:
        self._selector.unregister(stranger)
        del self._strangers[stranger]
        return stranger


def _left(deadline: float) -> float:
    """Seconds until then, as a time-out: 0 would mean none."""
    return max(deadline - time.monotonic(), 1e-3)
