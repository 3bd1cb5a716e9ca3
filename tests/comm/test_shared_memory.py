"""Sums through shared memory: right for all sizes, equal on all ranks, and never a silent hang."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from hybridpar.comm import shared_memory
from hybridpar.comm.shared_memory import CHUNK_BYTES, Bell, SharedMemorySum
from hybridpar.machine.process import host_identity


class Meeting:
    """`gather` for ranks that are threads of one process."""

    def __init__(self, size: int) -> None:
        self.items: list[object] = [None] * size
        self.barrier = threading.Barrier(size)

    def gather(self, rank: int, item: object) -> list[object]:
        self.items[rank] = item
        self.barrier.wait(20)
        answer = list(self.items)
        self.barrier.wait(20)
        return answer


def on_threads(size: int, work, timeout: float = 20.0) -> list:
    """Call `work(rank, group)` on a thread per rank."""
    meeting = Meeting(size)

    def one(rank: int):
        group = SharedMemorySum(rank, size, lambda item: meeting.gather(rank, item), timeout)
        try:
            return work(rank, group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return [future.result(60) for future in [pool.submit(one, rank) for rank in range(size)]]


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * numel + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def test_a_peer_that_is_busy_is_waited_for_and_a_silent_one_is_not():
    one, other = socket.socketpair()
    peer, asked = Bell(other, 20.0), []

    def wait_on() -> bool:
        asked.append(True)
        if len(asked) == 2:
            peer.ring("testing")
        return len(asked) < 4

    bell = Bell(one, 0.05, wait_on)
    assert bell.wait("adding") == 1
    assert len(asked) >= 2
    with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.05 s for a peer while adding"):
        bell.wait("adding")


SIZES = [0, 1, 2, 5, 1000, CHUNK_BYTES // 4 - 1, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1, 5 * CHUNK_BYTES // 4 + 3]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_of_any_size_are_right_and_equal_everywhere(size: int, dtype: torch.dtype) -> None:
    def work(rank: int, group: SharedMemorySum) -> list[Tensor]:
        tensors = [values(rank, numel, dtype) for numel in SIZES]
        for tensor in tensors:
            group.all_reduce(tensor)
        return tensors

    answers = on_threads(size, work)
    for place, numel in enumerate(SIZES):
        expected = sum(values(rank, numel, dtype).double() for rank in range(size))
        for answer in answers:
            assert torch.equal(answer[place], answers[0][place])
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
        torch.testing.assert_close(answers[0][place].double(), expected, rtol=tolerance, atol=tolerance)


def test_slots_are_not_overwritten_while_a_slow_peer_still_reads() -> None:
    def work(rank: int, group: SharedMemorySum) -> bool:
        for turn in range(40):
            if rank == turn % 3:
                time.sleep(0.002)
            tensor = torch.full((3000,), float(turn + rank))
            group.all_reduce(tensor)
            if not bool((tensor == 3 * turn + 3).all()):
                return False
        return True

    assert on_threads(3, work) == [True] * 3


def test_a_peer_that_leaves_ends_the_wait_at_once() -> None:
    def work(rank: int, group: SharedMemorySum) -> str:
        if rank == 1:
            return "left"
        with pytest.raises(RuntimeError) as caught:
            group.all_reduce(torch.ones(10))
        return str(caught.value)

    assert "Connection closed by peer" in on_threads(2, work)[0]


def test_a_peer_that_stalls_ends_the_wait_at_the_time_out() -> None:
    done = threading.Event()

    def work(rank: int, group: SharedMemorySum) -> str:
        if rank == 1:
            done.wait(20)
            return "stalled"
        with pytest.raises(RuntimeError) as caught:
            group.all_reduce(torch.ones(10))
        done.set()
        return str(caught.value)

    assert "Timed out waiting 0.2 s" in on_threads(2, work, timeout=0.2)[0]


def test_nothing_is_left_behind_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_SHARED", tmp_path)

    def work(rank: int, group: SharedMemorySum) -> list[Path]:
        group.all_reduce(torch.ones(3))  # from here on every rank has finished its set-up
        return list(tmp_path.iterdir())

    assert on_threads(2, work) == [[], []]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_without_shared_memory_makes_all_do_without(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_SHARED", Path("/nonexistent"))
    opened = SharedMemorySum._open

    def fail_on_one(self: SharedMemorySum, place: Path, stack) -> None:
        if self.rank == 1:
            raise OSError(28, "No space left on device")
        opened(self, place, stack)

    if rank == 1:
        monkeypatch.setattr(SharedMemorySum, "_open", fail_on_one)
    else:
        monkeypatch.setattr(shared_memory, "shared_directory", Mock(side_effect=OSError(28, "No space left on device")))
    meeting = Meeting(2)

    def one(rank: int) -> str:
        with pytest.raises(OSError, match="No space left") as caught:
            SharedMemorySum(rank, 2, lambda item: meeting.gather(rank, item), 5.0)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(one, range(2)))) == 1


def test_other_network_namespaces_are_other_hosts() -> None:
    assert "net:[" in host_identity()
