"""A group whose workers are threads of this process: tests and emulations of many workers use it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.group import Group, Reduction, reduce_rows, split


class Meeting:
    """Where the members of a group hand things to each other.

    Args:
        size: How many there are.
        timeout: Seconds after which a member that does not come is an error.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size, self.timeout = size, timeout
        self.barrier = threading.Barrier(size, timeout=timeout)
        ranks = range(size)
        #: What members send each other, by sender and receiver.
        self.sent = {(source, target): queue.SimpleQueue[Tensor]() for source in ranks for target in ranks}
        self._items: list[Any] = [None] * size

    def gather(self, rank: int, item: Any) -> list[Any]:
        """Every member's item, by rank."""
        self._items[rank] = item
        self.barrier.wait()
        items = list(self._items)
        self.barrier.wait()
        return items


class InProcessGroup(Group):
    """A group of threads. Tensors are reduced where they lie, in the order of ranks.

    Args:
        meeting: Of its members.
        rank: This worker.
        waits: Called before the worker waits for the others.
    """

    def __init__(self, meeting: Meeting, rank: int, waits: Callable[[], None] = lambda: None) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting, self._waits = meeting, waits

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> None:
        if self.size == 1:
            return
        rows, total = self._gather(tensor), torch.empty_like(tensor)
        if self.rank == 0:
            reduce_rows(rows, total, reduction)
        tensor.copy_(self._gather(total)[0])

    def all_to_all(self, out: Tensor, inp: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        for piece, parts in zip(split(out, out_sizes), self._gather(split(inp, in_sizes)), strict=True):
            piece.copy_(parts[self.rank])
        self._gather(None)  # what was sent may be changed

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        torch.cat(self._gather(inp), out=out)
        self._gather(None)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._meeting.sent[self.rank, rank].put(tensor.clone())

    def recv(self, tensor: Tensor, rank: int) -> None:
        self._waits()
        try:
            tensor.copy_(self._meeting.sent[rank, self.rank].get(timeout=self._meeting.timeout))
        except queue.Empty as error:
            raise RuntimeError(f"Timed out waiting {self._meeting.timeout:g} s for a peer") from error

    def close(self) -> None:
        self._meeting.barrier.abort()

    def _gather(self, item: Any) -> list[Any]:
        self._waits()
        return self._meeting.gather(self.rank, item)
