"""Workers of one job as threads of one process, so that two cores can train sixteen of them for accuracy.

Every worker is a whole `Trainer`, with the engine, codecs and outer steps that it has in a process of its own; only its
world differs, of which the groups add tensors where they lie. Workers compute one after the other: a worker gives up
its turn when it first waits for the others in a step. Threads share torch's random numbers, so models that draw some
while they train (dropout) are not for this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.compress import Exchange
from hybridpar.compress.codec import Collective
from hybridpar.compress.group import Group

#: Seconds after which a worker that does not come is an error.
TIMEOUT = 3600.0

_T = TypeVar("_T")


class _Meeting:
    """Where the members of a group hand things to each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.items: list[Any] = [None] * size
        self.sum = torch.empty(0)
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)

    def swap(self, rank: int, item: Any) -> list[Any]:
        self.items[rank] = item
        self.barrier.wait()
        found = list(self.items)
        self.barrier.wait()
        return found


class EmulatedGroup(Group):
    """A group of threads. Sums are taken in the order of ranks.

    Args:
        meeting: Of its members.
        rank: This worker.
        waits: Called before the worker waits for the others.
    """

    def __init__(self, meeting: _Meeting, rank: int, waits: Callable[[], None]) -> None:
        self._meeting, self._rank, self._waits = meeting, rank, waits

    @property
    def size(self) -> int:
        return self._meeting.size

    @property
    def rank(self) -> int:
        return self._rank

    def all_reduce(self, tensor: Tensor, collective: Collective = Collective.SUM) -> None:
        self._waits()
        meeting = self._meeting
        meeting.items[self._rank] = tensor
        meeting.barrier.wait()
        if self._rank == 0:
            total = meeting.items[0].clone()
            for other in meeting.items[1:]:
                if collective is Collective.SUM:
                    total.add_(other)
                elif collective is Collective.MAX:
                    torch.maximum(total, other, out=total)
                else:
                    total.bitwise_and_(other)
            meeting.sum = total
        meeting.barrier.wait()
        tensor.copy_(meeting.sum)
        meeting.barrier.wait()

    def all_to_all(self, out: Tensor, inp: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        self._waits()
        parts = self._meeting.swap(self._rank, torch.split(inp, list(in_sizes)))
        for place, given in zip(torch.split(out, list(out_sizes)), parts, strict=True):
            place.copy_(given[self._rank])
        self._meeting.barrier.wait()

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        self._waits()
        for place, given in zip(out.view(self.size, -1), self._meeting.swap(self._rank, inp), strict=True):
            place.copy_(given)
        self._meeting.barrier.wait()

    def close(self) -> None:
        """Do nothing: there is nothing to leave."""


def run_together(
    exchanges: Sequence[Exchange], gradients: Sequence[Sequence[Tensor]], outs: Sequence[Sequence[Tensor]]
) -> None:
    """One step of the exchanges of all workers, by rank, in a thread each."""
    meeting = _Meeting(len(exchanges))

    def run(rank: int) -> None:
        try:
            exchanges[rank].run(EmulatedGroup(meeting, rank, lambda: None), gradients[rank], outs[rank])
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(exchanges)) as pool:
        for step in [pool.submit(run, rank) for rank in range(len(exchanges))]:
            step.result()


class EmulatedWorld(World):
    """The world of a worker that is a thread."""

    def gather(self, item: object) -> list[object]:
        """Every worker's item, by rank."""
        if self.size == 1:
            return [item]
        self.waits()
        return self.meeting.swap(self.rank, item)

    def gather_on_main(self, mine: object, ranks: Sequence[int]) -> list[Any] | None:
        """What the workers of `ranks` have, on rank 0."""
        found = self.gather(mine)
        return [found[rank] for rank in ranks] if self.rank == 0 else None

    meeting: _Meeting
    waits: Callable[[], None]


def run_emulated(function: Callable[..., _T], workers: int, *args: Any) -> list[_T]:
    """Call `function(world, turn, *args)` for every worker, and return what it returned, by rank.

    Args:
        function: It enters `turn`, a context manager, to compute. Models must be equal on all workers.
        workers: How many.
        args: Handed to every worker.

    Raises:
        Exception: What a worker raised first.
    """
    shared = threading.Lock()
    meetings = [_Meeting(workers) for _ in range(4)]  # of two lanes, of control messages, of facts
    results: list[Any] = [None] * workers
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        turn = _Turn(shared)
        groups = [EmulatedGroup(meeting, rank, turn.give_up) for meeting in meetings]
        world = EmulatedWorld(rank, workers, torch.device("cpu"), TIMEOUT, share_memory=False, transport="threads")
        if workers > 1:
            world.lane_sums, world.control_sum = [*groups[:2]], groups[2]
        world.meeting, world.waits = meetings[3], turn.give_up
        try:
            results[rank] = function(world, turn, *args)
        except BaseException as error:
            errors.append(error)
            for meeting in meetings:
                meeting.barrier.abort()
        finally:
            turn.give_up()

    threads = [threading.Thread(target=work, args=(rank,), name=f"worker {rank}") for rank in range(workers)]
    # Broadcasts are torch's, between processes; what rank 0 would tell, weights and the order of gradients, all have.
    with mock.patch("torch.distributed.broadcast"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise next((one for one in errors if not isinstance(one.__cause__, threading.BrokenBarrierError)), errors[0])
    return results


class _Turn:
    """A worker's turn to compute; any of its threads may give it up."""

    def __init__(self, shared: threading.Lock) -> None:
        self._shared, self._mine, self._guard = shared, False, threading.Lock()

    def __enter__(self) -> None:
        self._shared.acquire()
        self._mine = True

    def __exit__(self, *error: object) -> None:
        self.give_up()

    def give_up(self) -> None:
        with self._guard:
            if self._mine:
                self._mine = False
                self._shared.release()
