"""Collectives of CPU workers over TCP connections, carried out by the thread that calls them.

Gloo hands each message to threads of its own, which cost a core that computes more than the message does, and each
must wake up before the next can go on. Here the calling thread, which is a sync lane, writes to and reads from a
connection to each peer. Messages that arrive while others leave are added up on the way.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from hybridpar.comm.connections import Connected, Peer, late
from hybridpar.comm.group import REDUCE, SMALL, Group, Reduction, buffer_of, reduce_rows, split

#: Bytes after which what arrives is added up while the rest is on its way.
_CHUNK = 1 << 18

#: Called with how many bytes have both left and arrived.
_Advance = Callable[[int], None]


class SocketGroup(Connected, Group):
    """A connection to every other worker."""

    transport = "sockets"
    _scratch = torch.empty(0, dtype=torch.uint8)

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
        self._peers[rank].send(buffer_of(tensor))

    def recv(self, tensor: Tensor, rank: int) -> None:
        self._peers[rank].receive(buffer_of(tensor))

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

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor], advance: _Advance | None = None) -> None:
        """Send each peer a message and receive one from each, all at a time."""
        self._carry([_Stream(peer, sent[rank], received[rank]) for rank, peer in self._peers.items()], advance)

    def _carry(self, streams: Sequence[_Stream], advance: _Advance | None = None) -> None:
        """Send and receive until nothing is missing."""
        for stream in streams:
            stream.send()
        if any(stream.out for stream in streams):
            self._go_on_both_ways(streams, advance)
        for stream in streams:
            if advance is None:
                stream.peer.receive(stream.into)
                continue
            while stream.into:
                stream.peer.receive(stream.into[:_CHUNK])
                stream.into = stream.into[_CHUNK:]
                advance(stream.done)

    def _go_on_both_ways(self, streams: Sequence[_Stream], advance: _Advance | None) -> None:
        """Send and receive, whatever is possible, until everything has left."""
        poller = select.poll()
        by_number = {stream.peer.number: stream for stream in streams}
        for number, stream in by_number.items():
            poller.register(number, stream.wanted)
        patience = self._timeout
        while any(stream.out for stream in streams):
            ready = poller.poll(patience * 1e3)
            if not ready and not patience:
                raise late(self._timeout)
            patience = self._timeout if ready or self._wait_on() else 0.0  # once more, at once
            for number, events in ready:
                stream = by_number[number]
                if events & ~select.POLLOUT:
                    stream.receive()
                if events & ~select.POLLIN:
                    stream.send()
                if stream.wanted:
                    poller.modify(number, stream.wanted)
                else:  # a peer that is done and leaves would be reported for ever
                    poller.unregister(number)
            if advance is not None:
                advance(streams[0].done // _CHUNK * _CHUNK)


class _Stream:
    """A message to a peer and a message from it, or what is left of them."""

    def __init__(self, peer: Peer, sent: Tensor, received: Tensor) -> None:
        self.peer = peer
        self.out, self.into = buffer_of(sent), buffer_of(received)
        self._count = len(self.out)

    @property
    def done(self) -> int:
        """Bytes that have left and arrived, where as many go each way."""
        return self._count - max(len(self.out), len(self.into))

    @property
    def wanted(self) -> int:
        """What the poller is to look for."""
        return (select.POLLOUT if self.out else 0) | (select.POLLIN if self.into else 0)

    def send(self) -> None:
        """Send as much as the kernel takes."""
        if self.out:
            self.out = self.out[self.peer.attempt(partial(self.peer.socket.send, self.out)) :]

    def receive(self) -> None:
        """Receive what is there."""
        if self.into:
            self.into = self.into[self.peer.attempt(partial(self.peer.socket.recv_into, self.into, 0)) :]
