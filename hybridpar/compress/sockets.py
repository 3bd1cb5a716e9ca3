"""Collectives of CPU workers over TCP connections, carried out by the thread that calls them.

Gloo hands each message to threads of its own, which cost a core that computes more than the message does, and each
must wake up before the next can go on. Here the calling thread, which is a sync lane, writes to and reads from
one connection per peer. Messages that arrive while others leave are added up on the way.
"""

from __future__ import annotations

import contextlib
import secrets
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

from hybridpar.compress.codec import Collective
from hybridpar.compress.exchange import split
from hybridpar.compress.group import Group
from hybridpar.machine.addresses import gloo_address

#: Bytes after which what arrives is added up while the rest is on its way.
_CHUNK = 1 << 18

#: Sums of at most so many bytes are gathered by every worker, which adds them up: one message instead of two.
_SMALL = 1 << 15

#: Workers up to which each has a connection to every other one.
MOST_WORKERS = 16

#: Seconds for connections to be made.
_SETUP_SECONDS = 30.0

_TOKEN_BYTES = 16
_HEADER = struct.Struct(f"!{_TOKEN_BYTES}sII")  # token, rank of the caller, number of the group

_REDUCE: dict[Collective, Callable[..., Tensor]] = {
    Collective.SUM: torch.add,
    Collective.MAX: torch.maximum,
    Collective.AND: torch.bitwise_and,
}

Gather = Callable[[object], list[object]]


class SocketGroup(Group):
    """A connection to every other worker. After `timeout` seconds of silence `wait_on` says whether to wait again."""

    def __init__(
        self, rank: int, peers: dict[int, socket.socket], timeout: float, wait_on: Callable[[], bool] = lambda: False
    ) -> None:
        self._rank = rank
        self._peers = dict(sorted(peers.items()))
        self._timeout = timeout
        self._wait_on = wait_on
        self._scratch = torch.empty(0, dtype=torch.uint8)
        # The kernel's time-out: Python's own costs a second system call for every wait.
        limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        for one in self._peers.values():
            one.settimeout(None)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    @property
    def size(self) -> int:
        return len(self._peers) + 1

    @property
    def rank(self) -> int:
        return self._rank

    def all_reduce(self, tensor: Tensor, collective: Collective = Collective.SUM) -> None:
        flat = tensor.detach().view(-1)
        if not flat.numel() or self.size == 1:
            return
        if self.size == 2:
            self._reduce_with_the_other(flat, _REDUCE[collective])
        elif flat.numel() * flat.element_size() <= _SMALL:
            rows = flat.new_empty(self.size * flat.numel())
            self.all_gather(rows, flat)
            _reduce_rows(rows.view(self.size, -1), flat, _REDUCE[collective])
        else:
            self._reduce_by_stripes(flat, _REDUCE[collective])

    def all_to_all(self, out: Tensor, inp: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        sent, received = split(inp, in_sizes), split(out, out_sizes)
        received[self._rank].copy_(sent[self._rank])
        self._exchange(sent, received)

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        rows = split(out, [inp.numel()] * self.size)
        rows[self._rank].copy_(inp)
        self._exchange([inp] * self.size, rows)

    def close(self) -> None:
        """Close the connections, and end a call that waits on another thread. Safe to call twice."""
        for one in self._peers.values():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _reduce_with_the_other(self, flat: Tensor, reduce: Callable[..., Tensor]) -> None:
        """Exchange everything with the one peer; what has left and has arrived is added meanwhile."""
        count, unit = flat.numel() * flat.element_size(), flat.element_size()
        if self._scratch.numel() < count:
            self._scratch = torch.empty(count, dtype=torch.uint8)
        theirs = self._scratch[:count].view(flat.dtype)
        done = 0

        def advance(bytes_both_ways: int) -> None:
            nonlocal done
            ready = bytes_both_ways // unit
            if ready > done:
                place = slice(done, ready)
                reduce(flat[place], theirs[place], out=flat[place])
                done = ready

        self._exchange([flat, flat], [theirs, theirs], advance if count > _CHUNK else None)
        advance(count)

    def _reduce_by_stripes(self, flat: Tensor, reduce: Callable[..., Tensor]) -> None:
        """Each worker reduces a stripe, by rank, and sends the result to all."""
        bounds = [flat.numel() * part // self.size for part in range(self.size + 1)]
        sizes = [stop - start for start, stop in pairwise(bounds)]
        own = sizes[self._rank]
        rows = flat.new_empty(self.size * own)
        self.all_to_all(rows, flat, [own] * self.size, sizes)
        stripes = split(flat, sizes)
        _reduce_rows(rows.view(self.size, -1), stripes[self._rank], reduce)
        self._exchange([stripes[self._rank]] * self.size, stripes)

    # ---------------------------------------------------------------- messages

    def _exchange(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], advance: Callable[[int], None] | None = None
    ) -> None:
        """Send each peer a message and receive one from each, all at a time."""
        streams = [_Stream(rank, one, sent[rank], received[rank]) for rank, one in self._peers.items()]
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
        self._out, self._in = _memory_of(sent), _memory_of(received)
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


def _memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    memory: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(memory)


def _reduce_rows(rows: Tensor, out: Tensor, reduce: Callable[..., Tensor]) -> None:
    """Reduce rows in their order."""
    reduce(rows[0], rows[1], out=out)
    for row in rows[2:]:
        reduce(out, row, out=out)


# --------------------------------------------------------------------- set-up


def open_sockets(
    own: int,
    members: Sequence[int],
    gather: Gather,
    timeout: float,
    count: int,
    wait_on: Callable[[], bool] = lambda: False,
) -> list[SocketGroup]:
    """Connect every worker of a party to every other one, for several groups; a collective of all parties.

    Workers listen on the address that gloo listens on.
    """
    peers: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    rank, size = members.index(own), len(members)
    with contextlib.ExitStack() as stack:
        # Each step is followed by a gather, so a worker's problem is everybody's.
        door, problem = None, None
        try:
            door = stack.enter_context(_listen(size * count))
        except OSError as error:
            problem = f"worker {own} cannot listen: {error}"
        token = secrets.token_hex(_TOKEN_BYTES)
        places = gather(None if door is None else (*door.getsockname()[:2], token))
        if None not in places:
            try:
                deadline = time.monotonic() + min(timeout, _SETUP_SECONDS)
                for lower in range(rank):
                    for number, known in enumerate(peers):
                        known[lower] = _call(places[members[lower]], rank, number, deadline)  # type: ignore[arg-type]
                assert door is not None
                _answer(door, token, peers, count * (size - 1 - rank), deadline)
            except OSError as error:
                problem = f"worker {own} cannot reach all others: {error}"
        problems = [one for one in gather(problem) if one is not None]
    for connection in (one for known in peers for one in known.values()):
        if problems:
            connection.close()
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if problems:
        raise OSError(problems[0])
    return [SocketGroup(rank, known, timeout, wait_on) for known in peers]


def _listen(callers: int) -> socket.socket:
    address = gloo_address()
    door = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        door.bind((address, 0))
        door.listen(callers)
    except OSError:
        door.close()
        raise
    return door


def _call(place: tuple[str, int, str], rank: int, number: int, deadline: float) -> socket.socket:
    """Connect to a worker that listens, and say who calls for which group."""
    address, port, token = place
    connection = socket.create_connection((address, port), _left(deadline))
    try:
        connection.sendall(_HEADER.pack(bytes.fromhex(token), rank, number))
    except OSError:
        connection.close()
        raise
    return connection


def _answer(
    door: socket.socket, token: str, peers: Sequence[dict[int, socket.socket]], calls: int, deadline: float
) -> None:
    """Take so many calls. What calls without the token is no worker, and is turned away; who is silent is let wait."""
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        selector.register(door, selectors.EVENT_READ)
        while calls:
            ready = selector.select(_left(deadline))
            if not ready:
                raise TimeoutError("not all have called in time")
            for connection in (key.fileobj for key, _ in ready):
                assert isinstance(connection, socket.socket)
                if connection is door:
                    stranger = stack.enter_context(door.accept()[0])
                    # To be reported when all of a header is there.
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _HEADER.size)
                    selector.register(stranger, selectors.EVENT_READ)
                    continue
                selector.unregister(connection)
                header = connection.recv(_HEADER.size)
                if len(header) == _HEADER.size and header.startswith(bytes.fromhex(token)):
                    _, caller, number = _HEADER.unpack(header)
                    worker = peers[number][caller] = connection.dup()  # stays when all that called are closed
                    worker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                    calls -= 1
                connection.close()


def _left(deadline: float) -> float:
    """Seconds until then, as a time-out: 0 would mean none."""
    return max(deadline - time.monotonic(), 1e-3)
