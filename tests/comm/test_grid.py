"""The grid of positions and replicas: who meets whom, over what, and what is left of it afterwards."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridpar.comm.grid import Grid
from hybridpar.comm.transport import MessagePart
from hybridpar.comm.world import World
from hybridpar.errors import SyncError, UsageError
from hybridpar.schedule.layout import Layout
from tests.lanes.checked import Checker, Lanes
from tests.ranks import run_ranks, start_processes

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


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_must_fill_the_layout(workers: int) -> None:
    with pytest.raises(UsageError) as caught:
        Grid(World(rank=1, size=3), line(2, workers), [])
    assert f"stages are placed on {workers} worker(s), and the job has 3" in caught.value.what
    assert f"Start {workers} workers" in caught.value.fix


def disagree(world: World) -> str:
    with pytest.raises(SyncError) as caught:
        Grid(world, line(2, 2), [(0, 1)] if world.rank else [(0, 1), (1, 0)])
    return str(caught.value)


def test_workers_must_want_the_same_grid() -> None:
    first, second = run_ranks(disagree, 2)
    assert "worker 1 wants stages on ['0,1'] and pairs [(0, 1)], worker 0 wants ['0,1'] and [(0, 1), (1, 0)]" in first
    assert "worker 0 wants" in second


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


def two_by_two(rank: int, directory: str, answers: Any) -> None:
    """A process of its own for each of four workers; the last one is killed in the end."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=4,
        timeout=datetime.timedelta(seconds=60),
    )
    facts: dict[str, Any] = {}
    grids = {}
    for form, shared_memory in (("shared memory", True), ("sockets", False)):
        world = World.join(lanes=1, timeout=60, shared_memory=shared_memory)
        grid = grids[form] = Grid(world, line(2, world.size), [(0, 1), (1, 0)])
        facts[form] = {
            "place": (grid.position, grid.replica),
            "sums": total(grid, float(rank + 1)),
            "arrived": pass_on(grid, 10.0 * rank),
        }
        world.barrier()
    if rank == 3:
        answers.put((rank, facts))
        answers.close()
        answers.join_thread()
        os.kill(os.getpid(), signal.SIGKILL)
    for form, grid in grids.items():
        try:
            if rank == 1:
                with grid.world.named_errors("receiving activations"):
                    grid.receivers[1].receive(PART)
            if rank == 2:
                with grid.replica_world.named_errors("adding gradients"):
                    total(grid, 1.0)
            facts[form]["error"] = None
        except SyncError as error:
            facts[form]["error"] = str(error)
    answers.put((rank, facts))
    answers.close()
    answers.join_thread()
    # Groups of a job that has lost a worker are not worth closing.
    os._exit(0)


@pytest.fixture(scope="module")
def four_workers() -> list[dict[str, Any]]:
    with start_processes(two_by_two, 4) as answers:
        facts = dict(answers.get(timeout=120) for _ in range(4))
    return [facts[rank] for rank in range(4)]


@pytest.mark.parametrize("form", ["shared memory", "sockets"])
def test_two_positions_of_two_replicas(four_workers: list[dict[str, Any]], form: str) -> None:
    facts = [worker[form] for worker in four_workers]
    assert [fact["place"] for fact in facts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # Positions add up over ranks (0, 1) and (2, 3), messages go from 0 to 2 and from 1 to 3.
    assert [fact["sums"] for fact in facts] == [[3.0] * 3, [3.0] * 3, [7.0] * 3, [7.0] * 3]
    assert [fact["arrived"] for fact in facts] == [None, None, 1.0, 11.0]


@pytest.mark.parametrize("form", ["shared memory", "sockets"])
def test_the_death_of_a_worker_is_named_by_ranks_of_the_job(four_workers: list[dict[str, Any]], form: str) -> None:
    first, second, third = (worker[form]["error"] for worker in four_workers[:3])
    assert first is None
    assert "worker 1 of 4 stopped while receiving activations: a peer has died" in second
    assert "worker 2 of 4 stopped while adding gradients with worker 3: a peer has died" in third
