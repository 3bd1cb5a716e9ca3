"""Every kind of group does what a plain loop does, and says so where a peer is silent, leaves or is a stranger."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rig.in_process import InProcessGroup, Meeting
from hybridpar.comm import connections
from hybridpar.comm.connections import connect
from hybridpar.comm.group import Group, Reduction, TorchGroup, open_group
from hybridpar.comm.sockets import CHUNK_BYTES, SharedMemoryGroup, SocketGroup
from hybridpar.comm.world import World
from tests.ranks import run_ranks
from tests.threads import on_threads

#: Elements: none, few, odd numbers of them, and, in some types, more than a chunk has.
COUNTS = [0, 1, 2, 7, 8191]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8]
CASES = [(count, dtype) for count in COUNTS for dtype in DTYPES]
CASES += [(CHUNK_BYTES // 4 + 3, torch.float32), (CHUNK_BYTES + 1, torch.uint8)]

Open = Callable[[Meeting, int], Group]


def opened(kind: type[Any], gather: Any, size: int, rank: int, timeout: float = 20.0, wait_on: Any = None) -> Group:
    (group,) = connect(kind, rank, [range(size)], gather, timeout, wait_on or (lambda: False))
    assert group is not None
    return group


def shared_memory(meeting: Meeting, rank: int, *waits: Any) -> Group:
    return opened(SharedMemoryGroup, lambda item: meeting.gather(rank, item), meeting.size, rank, *waits)


def sockets(meeting: Meeting, rank: int, *waits: Any) -> Group:
    return opened(SocketGroup, lambda item: meeting.gather(rank, item), meeting.size, rank, *waits)


KINDS: list[Open] = [InProcessGroup, shared_memory, sockets]
#: Those between processes, which wait for peers outside of this one.
WAITING: list[Any] = [shared_memory, sockets]


def values(rank: int, count: int, dtype: torch.dtype, most: int = 30) -> Tensor:
    """Small whole numbers, of which all sums are exact."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return torch.randint(0, most, (count,), generator=generator).to(dtype)


def plainly(rows: list[Tensor], reduction: Reduction) -> Tensor:
    """What an all-reduce is, element by element."""
    stack = torch.stack([row.double() for row in rows])
    if reduction is Reduction.SUM:
        total = stack.sum(0)
    elif reduction is Reduction.MAX:
        total = stack.amax(0)
    else:
        return rows[0] & rows[1] & rows[-1]
    return total.to(rows[0].dtype)


def operations(group: Group) -> bool:
    """All operations in all sizes and dtypes, one after the other, as in a run."""
    size, rank = group.size, group.rank
    for count, dtype in CASES:
        inputs = [values(other, count, dtype) for other in range(size)]
        reductions = [Reduction.SUM, Reduction.MAX, *([] if dtype.is_floating_point else [Reduction.AND])]
        for reduction in reductions:
            mine = inputs[rank].clone()
            group.all_reduce(mine, reduction)
            assert torch.equal(mine, plainly(inputs, reduction)), ("all_reduce", count, dtype, reduction)
        rows = torch.empty(size * count, dtype=dtype)
        group.all_gather(rows, inputs[rank])
        assert torch.equal(rows, torch.cat(inputs)), ("all_gather", count, dtype)
        # Worker a sends b count * (a + 2 b) // 4 elements: also none, and different numbers there and back.
        sizes = [[count * (a + 2 * b) // 4 for b in range(size)] for a in range(size)]
        sent = [values(other, sum(sizes[other]), dtype) for other in range(size)]
        received = [sizes[other][rank] for other in range(size)]
        out = torch.empty(sum(received), dtype=dtype)
        group.all_to_all(out, sent[rank], received, sizes[rank])
        starts = [list(accumulate(sizes[other], initial=0)) for other in range(size)]
        parts = [sent[other][starts[other][rank] : starts[other][rank + 1]] for other in range(size)]
        assert torch.equal(out, torch.cat(parts)), ("all_to_all", count, dtype)
        # Round the ring, and back to rank 0 from the last.
        token = inputs[0].clone() if rank == 0 else torch.empty(count, dtype=dtype)
        if rank:
            group.recv(token, rank - 1)
        group.send(token, (rank + 1) % size)
        if rank == 0:
            token = torch.empty(count, dtype=dtype)
            group.recv(token, size - 1)
        assert torch.equal(token, inputs[0]), ("send", count, dtype)
    return True


def sums_in_order(group: Group) -> list[Tensor]:
    """Sums that depend on the order, of which each result is the one that the order of ranks gives."""
    tensors = []
    for count in (1, 8191, CHUNK_BYTES // 4 + 3):
        for dtype in (torch.float32, torch.bfloat16):
            rows = [torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(3)]
            mine = rows[group.rank].clone()
            group.all_reduce(mine)
            assert torch.equal(mine, rows[0] + rows[1] + rows[2])
            tensors.append(mine)
    return tensors


def over_torch(world: World) -> tuple[bool, list[Any]]:
    group = TorchGroup()
    assert (group.rank, group.size) == (world.rank, world.size)
    words = torch.tensor([7, 12, 255]) - world.rank
    group._and_by_gathering(words)  # the way of NCCL, which has no bitwise operations
    return operations(group), words.tolist()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_is_what_a_plain_loop_does(kind: Open, size: int) -> None:
    assert on_threads(size, operations, kind) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_of_a_process_group_is_what_a_plain_loop_does(size: int) -> None:
    words = [7 & 6, 12 & 11, 255 & 254] if size == 2 else [7 & 6 & 5, 12 & 11 & 10, 255 & 254 & 253]
    assert run_ranks(over_torch, size) == [(True, words)] * size


@pytest.mark.parametrize("kind", KINDS)
def test_elements_are_added_in_the_order_of_ranks_and_equal_everywhere(kind: Open) -> None:
    first, *others = on_threads(3, sums_in_order, kind)
    for tensors in others:
        assert all(map(torch.equal, first, tensors))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_overwritten_while_a_slow_peer_still_reads(kind: Open) -> None:
    def work(group: Group) -> bool:
        right = True
        for turn in range(40):
            if group.rank == turn % 3:
                time.sleep(0.002)
            tensor = torch.full((3000 if turn % 2 else 30_000,), float(turn + group.rank))
            group.all_reduce(tensor)
            right &= bool((tensor == 3 * turn + 3).all())
            message = torch.full((3000,), turn)
            if group.rank == 0:
                group.send(message, 1 + turn % 2)
            elif group.rank == 1 + turn % 2:
                message.zero_()
                group.recv(message, 0)
            right &= bool((message == turn).all())
        return right

    assert on_threads(3, work, kind) == [True] * 3


# ----------------------------------------------------------------------------- peers that do not come


@pytest.mark.parametrize(
    ("operation", "count"), [("all_reduce", 10), ("all_reduce", 1 << 22), ("send", 1 << 24), ("recv", 10)]
)
@pytest.mark.parametrize("kind", WAITING)
def test_a_silent_peer_ends_the_wait_at_the_time_out(kind: Any, operation: str, count: int) -> None:
    done = threading.Event()

    def work(group: Group) -> str:
        if group.rank == 1:
            done.wait(20)
            return ""
        with pytest.raises(RuntimeError) as caught:
            use(group, operation, count)
        done.set()
        return str(caught.value)

    answers = on_threads(2, work, lambda meeting, rank: kind(meeting, rank, 0.2))
    assert "Timed out waiting 0.2 s" in answers[0]


def use(group: Group, operation: str, count: int) -> Tensor:
    tensor = torch.ones(count, dtype=torch.uint8)
    if operation == "all_reduce":
        group.all_reduce(tensor)
    elif operation == "all_gather":
        tensor = torch.empty(group.size * count, dtype=torch.uint8)
        group.all_gather(tensor, torch.ones(count, dtype=torch.uint8))
    elif (operation == "send") == (group.rank == 0):
        group.send(tensor, 1 - group.rank)
    else:
        group.recv(tensor, 1 - group.rank)
    return tensor


@pytest.mark.parametrize("count", [10, 1 << 22])
@pytest.mark.parametrize("operation", ["all_reduce", "recv"])
@pytest.mark.parametrize("kind", WAITING)
def test_a_peer_that_is_alive_and_busy_is_waited_for(kind: Any, operation: str, count: int) -> None:
    asked, twice = [], threading.Event()

    def wait_on() -> bool:
        asked.append(True)
        if len(asked) >= 2:
            twice.set()
        return True

    def work(group: Group) -> Tensor:
        if group.rank == 1:
            assert twice.wait(20)
        return use(group, operation, count)

    for answer in on_threads(2, work, lambda meeting, rank: kind(meeting, rank, 0.05, wait_on)):
        assert answer.eq(1 if operation == "recv" else 2).all()
    assert len(asked) >= 2


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "recv"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_leaves_ends_the_wait_at_once(kind: Open, operation: str) -> None:
    if kind is InProcessGroup and operation == "recv":
        pytest.skip("a thread that leaves has nothing to close")

    def work(group: Group) -> str:
        if group.rank == 1:
            group.close()
            return ""
        with pytest.raises(RuntimeError) as caught:
            use(group, operation, 10)
        return str(caught.value)

    answer = on_threads(2, work, kind)[0]
    assert kind is InProcessGroup or "Connection closed by peer" in answer


@pytest.mark.parametrize("kind", WAITING)
def test_the_last_messages_of_a_worker_that_has_left_arrive(kind: Any) -> None:
    left = threading.Event()

    def work(group: Group) -> list[float]:
        messages = [torch.full((3,), float(number)) for number in range(2)]
        if group.rank == 0:
            for message in messages:
                group.send(message, 1)
            group.close()
            left.set()
            return []
        assert left.wait(20)
        received = [torch.empty(3) for _ in messages]
        for message in received:
            group.recv(message, 0)
        with pytest.raises(RuntimeError, match="Connection closed by peer: worker 0 of the group has left"):
            group.recv(torch.empty(3), 0)
        return [float(message[0]) for message in received]

    assert on_threads(2, work, kind)[1] == [0.0, 1.0]


@pytest.mark.parametrize("kind", WAITING)
def test_a_group_that_is_left_ends_the_wait_of_another_thread(kind: Any) -> None:
    def work(group: Group) -> bool:
        if group.rank == 1:
            return True
        errors: list[str] = []

        def wait() -> None:
            try:
                group.all_reduce(torch.ones(4))
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        group.close()
        group.close()
        thread.join(10)
        with pytest.raises(RuntimeError, match="has left the job"):
            group.all_reduce(torch.ones(4))
        return bool(errors)

    assert on_threads(2, work, kind) == [True, True]


def test_a_silent_peer_is_noticed_where_another_is_done_and_leaves() -> None:
    (one, first), (two, second) = socket.socketpair(), socket.socketpair()
    group, count = SocketGroup(0, {1: one, 2: two}, 0.3), 1 << 22

    def take_part_and_leave() -> None:
        first.sendall(bytes(count))
        left = count
        while left:
            left -= len(first.recv(left))
        first.close()

    thread = threading.Thread(target=take_part_and_leave)
    thread.start()
    with pytest.raises(RuntimeError, match="Timed out"):
        group.all_gather(torch.empty(3 * count, dtype=torch.uint8), torch.zeros(count, dtype=torch.uint8))
    thread.join()
    group.close()
    second.close()


# ----------------------------------------------------------------------------- strangers, and workers that cannot


def knock(address: str | tuple[str, int]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    connection.settimeout(20)
    connection.connect(address)
    return connection


class Stranger:
    """Somebody who knows where a worker listens, and not the token."""

    def __init__(self, address: str | tuple[str, int], kind: str) -> None:
        self.kind = kind
        self.connections = [knock(address) for _ in range(200 if kind == "many" else 1)]
        with suppress(BlockingIOError):  # the queue at the door is full
            while kind == "fills":
                self.connections.append(knock(address))

    def act(self) -> None:
        (connection, *_) = self.connections
        if self.kind == "talks":
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
        elif self.kind == "begins":
            connection.sendall(b"?")
        elif self.kind == "resets":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


@pytest.mark.parametrize("doors", [SocketGroup, SharedMemoryGroup])
@pytest.mark.parametrize("kind", ["silent", "talks", "begins", "resets", "many"])
def test_a_stranger_neither_delays_nor_ends_anything(
    kind: str, doors: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All waits are longer than the test may take."""
    monkeypatch.setattr(connections, "_SETUP_SECONDS", 300.0)
    add_up_beside(kind, doors)


def test_a_worker_waits_at_a_door_at_which_too_many_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "SOMAXCONN", 2)
    add_up_beside("fills", SharedMemoryGroup)


def add_up_beside(kind: str, doors: type[Any]) -> None:
    """Connect three workers while a stranger stands at the door of the first, and have them add up."""
    strangers: list[Stranger] = []

    def open_group(meeting: Meeting, rank: int) -> Group:
        answers = []

        def gather(item: object) -> list[object]:
            answers.append(meeting.gather(rank, item))
            if len(answers) == 1 and rank == 0:  # before any worker calls
                (address, _), *_ = answers[0]
                strangers.append(Stranger(address, kind))
                strangers[0].act()
            if len(answers) == 1:
                meeting.barrier.wait()
            return answers[-1]

        return connect(doors, rank, [range(meeting.size)] * 2, gather, 300.0)[1]

    try:
        answers = on_threads(3, lambda group: use(group, "all_reduce", 10), open_group)
        assert all(answer.eq(3).all() for answer in answers)
    finally:
        strangers[0].close()


def problem_of(meeting: Meeting, rank: int) -> str:
    with pytest.raises(OSError, match="worker") as caught:
        sockets(meeting, rank)
    return str(caught.value)


def test_where_a_worker_cannot_listen_all_know(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def listen(address: str) -> Any:
        tried.append(address)
        if len(tried) == 2:
            raise OSError("no such address")
        return real(address)

    real = connections._listen
    monkeypatch.setattr(connections, "_listen", listen)
    meeting = Meeting(2)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: problem_of(meeting, rank), range(2))
    assert first == second
    assert "cannot listen: no such address" in first


@pytest.mark.parametrize("step", ["memfd_create", "mmap"])
def test_a_worker_without_shared_memory_makes_all_do_without(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(connections.os if step == "memfd_create" else connections.mmap, step, full)
    meeting = Meeting(2)

    def problem(rank: int) -> str:
        with pytest.raises(OSError, match="No space left") as caught:
            shared_memory(meeting, rank)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(problem, range(2)))) == 1


def opened_while_another_still_connects(world: World, flag: str) -> bool:
    make = dist.new_group

    def slow(*args: Any, **options: Any) -> Any:
        group = make(*args, **options)
        time.sleep(0.5)  # in which the other worker would come back, if it did not wait
        Path(flag).touch()
        return group

    with pytest.MonkeyPatch.context() as patched:
        if world.rank == 0:
            patched.setattr(dist, "new_group", slow)
        open_group([0, 1], timeout=30)
    return Path(flag).exists()


def test_no_worker_goes_on_while_another_still_connects(tmp_path: Path) -> None:
    assert run_ranks(opened_while_another_still_connects, 2, str(tmp_path / "flag")) == [True, True]
