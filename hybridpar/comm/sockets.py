"""Collectives of CPU workers over sockets, carried out by the thread that calls them; of one machine through memory.

Gloo hands each message to threads of its own, which cost a core that computes more than the message does, and each
must wake up before the next can go on. Here the calling thread, which is a sync lane, writes to and reads from a
connection to each peer.

Over TCP on the loopback device a reduced byte is copied some eight times, by the same cores that compute. So workers of
one machine add large tensors in memory that all of them see, in chunks that stay in the cache between writer and
reader, and wait for each other on Unix sockets, one byte per phase. All else goes over these sockets: a message is
copied as often as it would be through memory, and wakes fewer threads.
"""

from __future__ import annotations

import select
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridpar.comm.connections import Connected, late
from hybridpar.comm.group import Group, Reduction, buffer_of, reduce_rows, split

#: Tensors of at most so many bytes are added up by every worker: one message instead of two.
SMALL = 1 << 15

#: Bytes of a chunk: small enough that all workers' parts of it stay in the last-level cache, large enough that meeting
#: twice per chunk costs little.
CHUNK_BYTES = 2 << 20


class SocketGroup(Connected, Group):
    """A connection to every other worker."""

    transport = "sockets"
    _scratch = torch.empty(0, dtype=torch.uint8)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> None:
        flat = tensor.detach().view(-1)
        if not flat.numel() or self.size == 1:
            return
        if self.size > 2 and flat.nbytes > SMALL:
            self._reduce_by_stripes(flat, reduction)
            return
        # All of it to all workers; of two that is as many bytes as by stripes, in one exchange instead of two.
        count = self.size * flat.nbytes
        if self._scratch.numel() < count:
            self._scratch = torch.empty(count, dtype=torch.uint8)
        rows = list(self._scratch[:count].view(flat.dtype).view(self.size, -1))
        self._exchange([flat] * self.size, rows)
        rows[self.rank] = flat if self.size == 2 else flat.clone()
        reduce_rows(rows, flat, reduction)

    def all_to_all(self, out: Tensor, inp: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        sent, received = split(inp, in_sizes), split(out, out_sizes)
        received[self.rank].copy_(sent[self.rank])
        self._exchange(sent, received)

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        rows = out.view(self.size, -1)
        rows[self.rank] = inp
        self._exchange([inp] * self.size, rows)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._peers[rank].send(buffer_of(tensor))

    def recv(self, tensor: Tensor, rank: int) -> None:
        self._peers[rank].receive(buffer_of(tensor))

    def _reduce_by_stripes(self, flat: Tensor, reduction: Reduction) -> None:
        """Each worker reduces a stripe, by rank, and sends the result to all."""
        stripes = flat.tensor_split(self.size)
        mine = stripes[self.rank]
        rows = mine.new_empty(self.size, len(mine))
        rows[self.rank] = mine
        self._exchange(stripes, rows)
        reduce_rows(rows, mine, reduction)
        self._exchange([mine] * self.size, stripes)

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor] | Tensor) -> None:
        """Send each peer a message and receive one from each, all at a time."""
        out, into = dict[int, memoryview](), dict[int, memoryview]()
        for rank, peer in self._peers.items():
            into[rank] = buffer_of(received[rank])
            out[rank] = peer.send_some(buffer_of(sent[rank]))
        if any(map(len, out.values())):
            self._go_on_both_ways(out, into)
        for rank, peer in self._peers.items():
            peer.receive(into[rank])

    def _go_on_both_ways(self, out: dict[int, memoryview], into: dict[int, memoryview]) -> None:
        """Send and receive, whatever is possible, until everything has left."""
        poller = select.poll()
        ranks = {peer.number: rank for rank, peer in self._peers.items()}
        for number in ranks:
            poller.register(number, select.POLLIN | select.POLLOUT)
        patience = self._timeout
        while any(map(len, out.values())):
            ready = poller.poll(patience * 1e3)
            if not ready and not patience:
                raise late(self._timeout)
            patience = self._timeout if ready or self._wait_on() else 0.0  # once more, at once
            for number, events in ready:
                rank = ranks[number]
                if events & ~select.POLLOUT:
                    into[rank] = self._peers[rank].receive_some(into[rank])
                if events & ~select.POLLIN:
                    out[rank] = self._peers[rank].send_some(out[rank])
                wanted = (select.POLLOUT if out[rank] else 0) | (select.POLLIN if into[rank] else 0)
                if wanted:
                    poller.modify(number, wanted)
                else:  # a peer that is done and leaves would be reported for ever
                    poller.unregister(number)


class SharedMemoryGroup(SocketGroup):
    """CPU workers of one machine.

    All workers get the same bits, because each element is reduced in the order of ranks, wherever that happens.
    """

    transport = "shared memory"
    memory_bytes = CHUNK_BYTES

    @classmethod
    def fits(cls, hosts: Sequence[object]) -> bool:
        """All on the same host, where all may share memory."""
        return len(set(hosts)) == 1 and hosts[0] is not None

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> None:
        flat = tensor.detach().view(-1)
        if flat.nbytes <= SMALL:
            super().all_reduce(flat, reduction)
            return
        longest = CHUNK_BYTES // flat.element_size() // self.size
        for chunk in flat.split(self.size * longest):  # type: ignore[no-untyped-call]
            self._reduce_chunk(chunk, longest, reduction)

    def _reduce_chunk(self, chunk: Tensor, longest: int, reduction: Reduction) -> None:
        """A chunk in three phases: each worker hands the others what they reduce, reduces its stripe, takes theirs.

        What others still read of the chunk before are sums, in slots that are written in the second phase alone, when
        all have come to this chunk.
        """
        slots = self.view(chunk.dtype).view(self.size, -1)
        stripes = chunk.tensor_split(self.size)

        def slot(worker: int, stripe: int) -> Tensor:
            return slots[worker, stripe * longest :][: len(stripes[stripe])]

        for other in self._peers:
            slot(self.rank, other).copy_(stripes[other])
        self._meet()
        rows = [stripes[rank] if rank == self.rank else slot(rank, self.rank) for rank in range(self.size)]
        reduce_rows(rows, slot(self.rank, self.rank), reduction)
        self._meet()
        for rank, stripe in enumerate(stripes):
            stripe.copy_(slot(rank, rank))

    def _meet(self) -> None:
        self.ring()
        self.wait()
