"""Connections between the workers of a group, and how they are made.

Workers of one machine are connected by Unix sockets and share memory, others by TCP. Workers and strangers reach the
same door while connections are made. Both ends prove that they know the job's token (`hybridpar.comm.handshake`); a
stranger is turned away, waits in vain, or gives way to who comes later, and delays nobody.

No name is left on the machine: doors of Unix sockets and memory have none, and end with those who use them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybridpar.comm.group import Gather, WaitOn, never
from hybridpar.comm.handshake import Door, HandshakeError, end, knock
from hybridpar.machine.addresses import gloo_address
from hybridpar.machine.supervise import TOKEN_VARIABLE, new_token

#: Seconds for connections to be made.
_SETUP_SECONDS = 30.0

#: Workers up to which each has a connection to every other worker.
MOST_WORKERS = 16

#: Connections that may be in their handshake at a time, beside those that are expected. The oldest gives way.
_MOST_STRANGERS = 64

_HEADER = struct.Struct("!II")  # rank of the caller in its party, number of the party; behind its reply


class Peer:
    """The connection to another worker of a group.

    After `timeout` seconds of silence `wait_on` says whether to wait again. Whatever goes wrong is a RuntimeError.
    """

    def __init__(self, rank: int, connection: socket.socket, timeout: float, wait_on: WaitOn) -> None:
        self.socket = connection
        self._rank = rank
        self._timeout = timeout
        self._wait_on = wait_on
        self._rung = bytearray(1)
        # The kernel's time-out: that of Python costs a second system call for every wait.
        connection.settimeout(None)
        limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def ring(self) -> None:
        """Tell the peer that something is there or gone."""
        self._wait_for(partial(self.socket.send, b"+"))

    def wait(self) -> None:
        """Wait until the peer has rung once more."""
        self._wait_for(partial(self.socket.recv_into, self._rung, 1))

    def send(self, memory: memoryview) -> None:
        """Send all of it, and wait in the kernel until it has left."""
        while memory:
            memory = memory[self._wait_for(partial(self.socket.send, memory)) :]

    def receive(self, memory: memoryview) -> None:
        """Wait in the kernel until all of it has arrived."""
        while memory:
            memory = memory[self._wait_for(partial(self.socket.recv_into, memory, 0), socket.MSG_WAITALL) :]

    def send_some(self, memory: memoryview) -> memoryview:
        """Send as much as the kernel takes at once; what is left."""
        return memory[self._attempt(partial(self.socket.send, memory), socket.MSG_DONTWAIT) :] if memory else memory

    def receive_some(self, memory: memoryview) -> memoryview:
        """Receive what is there; where the rest goes."""
        use = partial(self.socket.recv_into, memory, 0)
        return memory[self._attempt(use, socket.MSG_DONTWAIT) :] if memory else memory

    def _wait_for(self, use: Callable[[int], int], flags: int = 0) -> int:
        """How many bytes a use of the socket, which is given flags, moves; waits as the class says."""
        given = flags
        while not (moved := self._attempt(use, given)):
            if given == socket.MSG_DONTWAIT:
                raise late(self._timeout)
            # Without patience once more, at once: the peer may have come meanwhile.
            given = flags if self._wait_on() else socket.MSG_DONTWAIT
        return moved

    def _attempt(self, use: Callable[[int], int], flags: int) -> int:
        """How many bytes a use of the socket moves; 0 where it would have to wait (longer)."""
        try:
            moved = use(flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost() from error
        if not moved:
            raise self._lost()
        return moved

    @property
    def number(self) -> int:
        """The number of the file that the system calls the connection."""
        if self.socket.fileno() < 0:
            raise self._lost()
        return self.socket.fileno()

    def close(self) -> None:
        """Leave, and end a wait of another thread. Safe to call twice."""
        end(self.socket)

    def _lost(self) -> RuntimeError:
        if self.socket.fileno() < 0:
            return RuntimeError("Connection closed: this worker has left the job")
        return RuntimeError(f"Connection closed by peer: worker {self._rank} of the group has left")


def late(timeout: float) -> RuntimeError:
    """The error of waiting for too long."""
    return RuntimeError(f"Timed out waiting {timeout:g} s for a peer")


class Connected:
    """A worker that is connected to all others of its group, maybe with memory that all of them see."""

    #: Bytes of that memory for each worker of a group.
    memory_bytes = 0

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        timeout: float,
        wait_on: WaitOn = never,
        memory: mmap.mmap | None = None,
    ) -> None:
        self.rank, self.size = rank, len(sockets) + 1
        self._timeout, self._wait_on = timeout, wait_on
        self._peers = {peer: Peer(peer, sockets[peer], timeout, wait_on) for peer in sorted(sockets)}
        self._memory = memory

    @classmethod
    def fits(cls, hosts: Sequence[object]) -> bool:
        """Whether such a group can be made of workers on these hosts; None where a worker must not share memory."""
        return len(hosts) <= MOST_WORKERS

    def view(self, dtype: torch.dtype) -> Tensor:
        """The memory as a 1-D tensor."""
        if self._memory is None:
            raise RuntimeError("Connection closed: this worker has left the job")
        return torch.frombuffer(self._memory, dtype=dtype)

    def ring(self) -> None:
        """Tell every peer that something is there or gone."""
        for peer in self._peers.values():
            peer.ring()

    def wait(self) -> None:
        """Wait until every peer has rung once more."""
        for peer in self._peers.values():
            peer.wait()

    def close(self) -> None:
        """Leave, and end a wait of another thread. Safe to call twice."""
        for peer in self._peers.values():
            peer.close()
        self._memory = None  # unmapped when the last tensor over it is gone


# ------------------------------------------------------------------------------------------------------------- set-up

_Kind = TypeVar("_Kind", bound=Connected)


def connect(
    kind: type[_Kind],
    mine: int,
    parties: Sequence[Sequence[int]],
    gather: Gather,
    timeout: float,
    wait_on: WaitOn = never,
    *,
    memory_bytes: int = 0,
) -> list[_Kind | None]:
    """Connect every worker of each party to all others of it; a collective of all who `gather`.

    Gives a group for each party, and None where this worker is no member. Parties are ranks among those who gather,
    ascending, as is `mine`; a worker may be in none, or in several, and two may have the same members. `memory_bytes`
    is what each worker has in the memory of a party, where that is not what the kind says.

    Where the environment holds no token of the job, rank 0 hands out a random token. A problem of any worker is an
    OSError on all of them.
    """
    memory_bytes = memory_bytes or kind.memory_bytes
    ranks = {index: party.index(mine) for index, party in enumerate(parties) if mine in party}
    sockets: dict[int, dict[int, socket.socket]] = {index: {} for index in ranks}
    memory: dict[int, mmap.mmap] = {}
    with contextlib.ExitStack() as stack:
        # Each step is followed by a gather, so a worker's problem is everybody's.
        address = problem = None
        try:
            listener = stack.enter_context(contextlib.closing(_listen("" if memory_bytes else gloo_address())))
            name = listener.getsockname()
            address = name.decode() if memory_bytes else name[:2]
        except OSError as error:
            problem = f"worker {mine} cannot listen: {error}"
        secret = os.environ.get(TOKEN_VARIABLE)
        answers: list[Any] = gather((address, None if secret else new_token()))
        addresses, tokens = zip(*answers, strict=True)
        if None not in addresses:
            token, deadline = secret or tokens[0] or "", time.monotonic() + min(timeout, _SETUP_SECONDS)
            try:
                for index, rank in ranks.items():
                    for lower, member in enumerate(parties[index][:rank]):
                        sockets[index][lower] = _call(addresses[member], token, _HEADER.pack(rank, index), deadline)
                calls = sum(len(parties[index]) - 1 - rank for index, rank in ranks.items())
                known = queue.SimpleQueue[tuple[socket.socket, bytes]]()
                door = Door(listener, str(address), token, _left(deadline), calls + _MOST_STRANGERS)
                stack.callback(door.close)
                door.open(lambda *caller: known.put(caller), more=_HEADER.size)
                for _ in range(calls):
                    connection, said = known.get(timeout=_left(deadline))
                    caller, party = _HEADER.unpack(said)
                    sockets[party][caller] = connection
                for connections in () if memory_bytes else sockets.values():
                    for connection in connections.values():
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for index, rank in ranks.items() if memory_bytes else ():
                    memory[index] = _share_memory(memory_bytes * len(parties[index]), sockets[index], rank)
            except (OSError, queue.Empty) as error:
                problem = f"worker {mine} cannot reach all others: {str(error) or 'not all have called in time'}"
                _close(sockets)  # so that nobody waits for this worker
        problems = [answer for answer in gather(problem) if answer is not None]
    if problems:
        _close(sockets)
        raise OSError(problems[0])
    return [
        kind(ranks[index], sockets[index], timeout, wait_on, memory.get(index)) if index in ranks else None
        for index in range(len(parties))
    ]


def _close(sockets: Mapping[int, Mapping[int, socket.socket]]) -> None:
    for connections in sockets.values():
        for connection in connections.values():
            connection.close()


def _share_memory(count: int, sockets: Mapping[int, socket.socket], rank: int) -> mmap.mmap:
    """Map the memory of a party, a file without a name, which its first worker makes and hands to the others.

    Its pages are taken when they are first written to.
    """
    if rank == 0:
        file = os.memfd_create("hybridpar")
        os.truncate(file, count)
    else:
        files = socket.recv_fds(sockets[0], 1, 1)[1]
        if not files:
            raise ConnectionResetError("the first worker of a party has left")
        file = files[0]
    try:
        for connection in sockets.values() if rank == 0 else ():
            socket.send_fds(connection, [b"+"], [file])
        return mmap.mmap(file, count)
    finally:
        os.close(file)


def _call(address: str | tuple[str, int], token: str, header: bytes, deadline: float) -> socket.socket:
    """Connect to a worker that listens, and say who calls for which group; again where strangers were in the way."""
    host = address if isinstance(address, str) else address[0]
    family = socket.AF_UNIX if host is address else socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        connection = socket.socket(family)
        connection.settimeout(_left(deadline))
        try:
            connection.connect(address)
            knock(connection, token, str(address), header)
            return connection
        except (HandshakeError, OSError) as error:
            connection.close()
            # A Unix door at which too many stand does not let callers wait; a worker that is gone refuses.
            again = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError, BlockingIOError)
            if not isinstance(error, again) or time.monotonic() > deadline:
                raise OSError(str(error)) from error
            time.sleep(0.01)


def _listen(address: str) -> socket.socket:
    """Listen at an IP address; an empty one stands for a Unix socket without a name in any directory."""
    family = socket.AF_UNIX if not address else socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0) if address else "")
        listener.listen(socket.SOMAXCONN)  # strangers must not fill it before workers call
    except OSError:
        listener.close()
        raise
    return listener


def _left(deadline: float) -> float:
    """Seconds until then, as a time-out: 0 would mean none."""
    return max(deadline - time.monotonic(), 1e-3)
