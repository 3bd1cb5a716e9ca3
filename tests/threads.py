"""Runs the workers of a group as threads of this process: several of them are ready in no time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from benchmarks.rig.in_process import InProcessGroup, Meeting
from hybridpar.comm.group import Group

_T = TypeVar("_T")


def on_threads(
    size: int,
    work: Callable[[Group], _T],
    open_group: Callable[[Meeting, int], Group] = InProcessGroup,
) -> list[_T]:
    """Call `work(group)` on a thread for each worker, and return what it returned, by rank.

    Args:
        size: How many workers there are.
        work: All groups are closed when all have returned.
        open_group: Makes the group of a worker from the meeting of all of them and its rank.
    """
    meeting, groups = Meeting(size), list[Group]()

    def run(rank: int) -> _T:
        group = open_group(meeting, rank)
        groups.append(group)
        return work(group)

    try:
        with ThreadPoolExecutor(size) as pool:
            return [answer.result(60) for answer in [pool.submit(run, rank) for rank in range(size)]]
    finally:
        for group in groups:
            group.close()
