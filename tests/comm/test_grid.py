"""The grid of positions and replicas: who meets whom, over what, and what is left of it afterwards."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridpar.comm.transport import Grid, MessagePart
from hybridpar.comm.world import World
from hybridpar.schedule.layout import Layout
from tests.lanes.checked import Checker, Lanes
from tests.ranks import run_ranks

BOTH_FORMS = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "sockets"])
PART = [MessagePart((3,))]


def total(grid: Grid, value: float) -> list[float]:
    """The sum of a value over the replicas, by every sum that the replica world has."""
    world = grid.replica_world
    tensors = []
    for group in [*world.lane_groups, world.control_group]:
        if group is not None:
            tensors.append(torch.tensor([value]))
            group.all_reduce(tensors[-1])
    return [tensor.item() for tensor in tensors]


def pass_on(grid: Grid, value: float) -> float | None:
    """Hand a value from the first position to the last; every position adds 1 to it."""
    with Lanes("cpu", check=Checker(seed=grid.world.rank)) as lanes:
        lane = lanes.open("transfers")
        arrived: list[torch.Tensor] = []

        def work() -> None:
            received = grid.receivers[grid.position - 1].receive(PART)[0] if grid.position else torch.full((3,), value)
            if grid.position + 1 < grid.layout.positions:
                grid.senders[grid.position + 1].send([received + 1], PART)
            else:
                arrived.append(received)

        lane.submit(work)
        lanes.caller.wait(lane.record())
    return arrived[0][0].item() if arrived else None


def line(positions: int, workers: int) -> Layout:
    return Layout.dealt(positions, positions, replicas=workers // positions)


def chain(positions: int) -> list[tuple[int, int]]:
    return [(position, position + 1) for position in range(positions - 1)]


# ------------------------------------------------------------------------------ lines of workers


def one_line(world: World, positions: int) -> dict[str, Any]:
    grid = Grid(world, line(positions, world.size), chain(positions), lanes=3)
    try:
        replicas = grid.replica_world
        return {
            "place": (grid.position, grid.replica, grid.layout.positions, grid.layout.replicas),
            "replica world": (replicas.rank, replicas.size, replicas.transport, replicas.members),
            "sums": total(grid, float(world.rank + 1)),
            "gathered": replicas.gather(world.rank),
            "peers": (sorted(grid.receivers), sorted(grid.senders)),
            "arrived": pass_on(grid, 5.0),
        }
    finally:
        grid.close()
        grid.close()
        world.barrier()  # the world that the grid was made from stays open


@BOTH_FORMS
@pytest.mark.parametrize("size", [2, 3])
def test_a_pipeline_without_replicas(size: int, shared_memory: bool) -> None:
    answers = run_ranks(one_line, size, size, shared_memory=shared_memory)
    for rank, answer in enumerate(answers):
        assert answer["place"] == (rank, 0, size, 1)
        assert answer["replica world"] == (0, 1, "none", (rank,))
        assert answer["sums"] == []
        assert answer["gathered"] == [rank]
        assert answer["peers"] == ([rank - 1] if rank else [], [rank + 1] if rank + 1 < size else [])
        assert answer["arrived"] == (5.0 + size - 1 if rank == size - 1 else None)


# ------------------------------------------------------------------------------ what is refused


# ------------------------------------------------------------------------------ without shared memory


# ------------------------------------------------------------------------------ what is left


def use_and_close(world: World) -> None:
    grid = Grid(world, line(world.size, world.size), [(0, 1), (1, 0)])
    for _ in range(5):
        if grid.position == 0:
            grid.senders[1].send([torch.ones(3)])
            grid.receivers[1].receive(PART)
        else:
            grid.receivers[0].receive(PART)
            grid.senders[0].send([torch.ones(3)])
    world.barrier()
    grid.close()
    world.barrier()


def held() -> dict[str, int]:
    """Open files, Python's threads, and mapped memory of groups."""
    gc.collect()  # memory is unmapped when the last tensor over it is gone
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "segments": Path("/proc/self/maps").read_text().count("/memfd:hybridpar"),
    }


def leftovers(world: World) -> tuple[dict[str, int], dict[str, int]]:
    use_and_close(world)  # the first use opens what the process keeps
    first = held()
    for _ in range(3):
        use_and_close(world)
    for _ in range(200):  # sockets are closed, and threads end, on threads of their own
        last = held()
        if all(last[kind] <= first[kind] for kind in first):
            break
        time.sleep(0.02)
    return first, last


@BOTH_FORMS
def test_nothing_is_left_of_a_closed_grid(shared_memory: bool) -> None:
    for before, after in run_ranks(leftovers, 2, shared_memory=shared_memory):
        assert all(after[kind] <= before[kind] for kind in before), (before, after)


# ------------------------------------------------------------------------------ two by two, and a death
