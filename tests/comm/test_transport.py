"""Messages between two workers: whole, in order, in the right memory format, and never a silent hang; and the grid of
positions and replicas: who meets whom, over what, and what is left of it afterwards.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar.comm.sockets import CHUNK_BYTES
from hybridpar.comm.transport import Grid, MessagePart, payload
from hybridpar.comm.world import World
from hybridpar.errors import SyncError
from hybridpar.schedule.layout import Layout
from tests.lanes.checked import Checker, Lanes
from tests.ranks import run_ranks

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.uint8, torch.complex64),
]
BOTH_FORMS = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "sockets"])


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random bytes seen as a dtype where every pattern is a value, else random numbers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def channels_last(seed: int, *shape: int) -> Tensor:
    order = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return values(seed, *shape).to(memory_format=order)


def messages() -> list[list[Tensor]]:
    """What can go wrong: dtypes, memory formats, odd, empty and huge tensors, none at all."""
    piece = CHUNK_BYTES // 8
    return [
        *([values(1, 3, 5, dtype=dtype)] for dtype in DTYPES),
        [values(number, 3 + number, dtype=dtype) for number, dtype in enumerate(DTYPES)],
        [],
        [torch.empty(0)],
        [torch.empty(0, 3, 4, 4).to(memory_format=torch.channels_last), values(2, 7), torch.empty(2, 0)],
        [torch.tensor(3.5)],
        [channels_last(3, 2, 3, 5, 7)],
        [channels_last(4, 2, 3, 2, 5, 7), values(5, 2, 3, 5, 7)],
        [channels_last(6, 4, 1, 5, 7), channels_last(7, 4, 3, 1, 1)],
        # Not dense: gaps, overlaps, another order of dimensions, and a part of something larger.
        [values(8, 6, 8)[:, ::2], values(9, 1, 4).expand(5, 4), values(10, 4, 6).T, values(11, 100)[3:9]],
        [channels_last(12, 2, 8, 5, 7)[:, 2:5]],
        [values(13, 4).requires_grad_() * 2],
        *([values(14, piece + more)] for more in (-1, 0, 1)),
        [values(15, 2 * piece + 5), values(16, 3, dtype=torch.bool), values(17, 4 * piece)],
    ]


def check_message(received: list[Tensor], sent: list[Tensor]) -> None:
    assert len(received) == len(sent)
    for got, meant in zip(received, sent, strict=True):
        part = MessagePart.of(meant)
        assert got.dtype == meant.dtype
        assert got.is_contiguous(memory_format=part.memory_format)
        assert not got.requires_grad
        assert torch.equal(got, meant)


# ------------------------------------------------------------------------------ what a message is


@pytest.mark.parametrize(
    "tensors",
    [[torch.zeros(2, 3)], [torch.zeros(3, 2, dtype=torch.float64)], [], [torch.zeros(3, 2), torch.zeros(1)]],
)
def test_what_the_other_end_does_not_expect_is_not_sent(tensors: list[Tensor]) -> None:
    with pytest.raises(SyncError, match="was to be sent as 3x2 float32"):
        payload(tensors, [MessagePart((3, 2))])


# ------------------------------------------------------------------------------ over a channel


def send_all(world: World) -> str:
    grid = Grid(world, Layout.dealt(2, 2), [(0, 1)])
    try:
        if grid.position == 0:
            sender = grid.senders[1]
            for message in messages():
                sender.send(message)
            world.barrier()
            return sender.group.transport
        receiver = grid.receivers[0]
        for message in messages():
            check_message(receiver.receive([MessagePart.of(tensor) for tensor in message]), message)
        world.barrier()
        return receiver.group.transport
    finally:
        grid.close()


@BOTH_FORMS
def test_messages_arrive_as_they_were_sent(shared_memory: bool) -> None:
    transport = "shared memory" if shared_memory else "sockets"
    assert run_ranks(send_all, 2, shared_memory=shared_memory) == [transport] * 2


def size_of(sender: int, number: int) -> int:
    """Mostly small, now and then several pieces; different in the two directions."""
    return CHUNK_BYTES // 2 if (number + sender) % 41 == 40 else 1 + (number * 7919 + sender * 104729) % 20_000


def cross_traffic(world: World, count: int, check: bool) -> bool:
    """Everybody sends to and receives from everybody at once, each end on a lane of its own, in two rounds."""
    positions = world.size
    grid = Grid(
        world,
        Layout.dealt(positions, positions),
        [(p, q) for p in range(positions) for q in range(positions) if p != q],
    )
    received: dict[int, list[Tensor]] = {peer: [] for peer in grid.receivers}
    sent = []
    try:
        with Lanes(world.device, check=Checker(seed=world.rank, max_delay=0.0005) if check else None) as lanes:
            queues = {end: lanes.open(f"{end}") for peer in grid.senders for end in (("to", peer), ("from", peer))}

            def send(peer: int, message: list[Tensor]) -> None:
                grid.senders[peer].send(message)

            def receive(peer: int, number: int) -> None:
                received[peer] += grid.receivers[peer].receive([MessagePart((size_of(peer, number),))])

            for number in range(count):
                message = [torch.full((size_of(world.rank, number),), float(1000 * world.rank + number))]
                sent += message
                for peer in grid.senders:
                    queues["to", peer].wait(lanes.caller.record())
                    queues["to", peer].submit(lambda peer=peer, message=message: send(peer, message), uses=message)
                    queues["from", peer].submit(lambda peer=peer, number=number: receive(peer, number))
            for queue in queues.values():
                lanes.caller.wait(queue.record())
        world.barrier()
    finally:
        grid.close()
    return all(
        tensor.shape == (size_of(peer, number),) and bool((tensor == 1000 * peer + number).all())
        for peer, tensors in received.items()
        for number, tensor in enumerate(tensors)
    ) and all(len(tensors) == count for tensors in received.values())


@BOTH_FORMS
@pytest.mark.parametrize(("size", "count", "check"), [(2, 400, False), (3, 60, True)])
def test_traffic_in_all_directions_keeps_its_order(size: int, count: int, check: bool, shared_memory: bool) -> None:
    assert run_ranks(cross_traffic, size, count, check, shared_memory=shared_memory) == [True] * size


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
