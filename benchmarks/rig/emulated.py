"""Workers of one job as threads of one process, so that two cores can train sixteen of them for accuracy.

Every worker is a whole `Trainer`, with the engine, codecs and outer steps that it has in a process of its own; only its
world differs, of which the groups add tensors where they lie. Workers compute one after the other: a worker gives up
its turn when it first waits for the others in a step. Threads share torch's random numbers, so models that draw some
while they train (dropout) are not for this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch

from benchmarks.rig.in_process import InProcessGroup, Meeting
from hybridpar.comm.world import World

#: Seconds after which a worker that does not come is an error.
TIMEOUT = 3600.0

_T = TypeVar("_T")


class EmulatedWorld(World):
    """The world of a worker that is a thread."""

    def gather(self, item: object) -> list[object]:
        """Every worker's item, by rank."""
        if self.size == 1:
            return [item]
        self.waits()
        return self.meeting.gather(self.rank, item)

    def gather_on_main(self, mine: object, ranks: Sequence[int]) -> list[Any] | None:
        """What the workers of `ranks` have, on rank 0."""
        everyone = self.gather(mine)
        return [everyone[rank] for rank in ranks] if self.rank == 0 else None

    meeting: Meeting
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
    meetings = [Meeting(workers, TIMEOUT) for _ in range(4)]  # of two lanes, of control messages, of facts
    results: list[Any] = [None] * workers
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        turn = _Turn(shared)
        groups = [InProcessGroup(meeting, rank, turn.give_up) for meeting in meetings]
        world = EmulatedWorld(rank, workers, torch.device("cpu"), TIMEOUT, share_memory=False, transport="threads")
        if workers > 1:
            world.lane_groups, world.control_group = [*groups[:2]], groups[2]
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
        raise next(
            (error for error in errors if not isinstance(error.__cause__, threading.BrokenBarrierError)), errors[0]
        )
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
