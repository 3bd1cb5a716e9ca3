"""A worker divides the machine with those that share its cores; the most memory that it needs is measured."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from multiprocessing import shared_memory

import pytest
import torch

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.run import worker
from tests.runs import restored_modes


class Job(World):
    """A job of four workers: the last two share the cores of this machine, each started by a launcher of its own."""

    def gather(self, item: object) -> list[object]:
        return ["other machine", None, item, item]


@pytest.mark.parametrize(("rank", "position"), [(2, 0), (3, 1)])
def test_workers_of_several_launchers_divide_the_cores_of_their_machine(monkeypatch, rank, position):
    asked = []
    monkeypatch.setenv("HYBRIDPAR_TUNED", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(worker, "share_cores", lambda workers: asked.append(workers) or 3)
    monkeypatch.setattr(worker, "affinity", lambda *given: asked.append(given[:2]))
    before = torch.get_num_threads()
    try:
        with restored_modes():
            worker.tune_worker(TrainConfig(), Job(rank, 4))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert asked == [2, (position, 2)]
    monkeypatch.delenv("HYBRIDPAR_TUNED")
    with restored_modes():
        worker.tune_worker(TrainConfig(), Job(rank, 4))
    assert len(asked) == 2, "nothing is set unless it was asked for"
    assert torch.get_num_threads() == before
    assert os.environ["LOCAL_WORLD_SIZE"] == "1"


# ----------------------------------------------------------------------------------------------------------- memory

BIG = 200 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="procfs tells it")
def test_the_peak_is_that_since_the_meter_was_made():
    meter = worker.MemoryMeter(torch.device("cpu"))
    held = torch.ones(BIG // 4)
    grown = meter.peak_bytes()
    if grown is None:
        pytest.skip("this system does not let the peak be reset")
    assert grown > 0.9 * BIG
    cpu = torch.device("cpu")
    assert worker.MemoryMeter(cpu).peak_bytes() < 0.5 * BIG
    assert worker.MemoryMeter(cpu, holding=held.nbytes).peak_bytes() > 0.9 * BIG
    del held
    assert worker.MemoryMeter(cpu).peak_bytes() < 0.5 * BIG


@pytest.mark.skipif(sys.platform != "linux", reason="procfs tells it")
def test_pages_of_files_are_not_the_model_s(tmp_path):
    file = tmp_path / "library"
    with file.open("wb") as stream:
        stream.truncate(BIG)
    meter = worker.MemoryMeter(torch.device("cpu"))
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        sum(mapped[at] for at in range(0, BIG, mmap.PAGESIZE))
        files = worker._kilobytes(worker._STATUS, "RssFile")
        grown = meter.peak_bytes()
    if grown is None or files is None or files * 1024 < BIG:
        pytest.skip("this system does not tell what of a process are files")
    assert grown < 0.5 * BIG


#: Maps memory that another process made, touches all of it, says so, and waits for its end.
_SHARER = """
import sys
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *given: None
memory = shared_memory.SharedMemory(sys.argv[1])
sum(memory.buf[at] for at in range(0, memory.size, 4096))
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="procfs tells it")
def test_of_memory_that_two_processes_share_each_has_half():
    meter = worker.MemoryMeter(torch.device("cpu"))
    memory = shared_memory.SharedMemory(create=True, size=64 << 20)
    try:
        torch.frombuffer(memory.buf, dtype=torch.uint8).fill_(1)
        alone = meter.peak_bytes()
        with subprocess.Popen(
            [sys.executable, "-c", _SHARER, memory.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout.readline() == b"there\n"
            together = meter.peak_bytes()
            other.communicate()
    finally:
        memory.unlink()
    if alone is None or worker._kilobytes(worker._SHARES, "Pss_Shmem") is None:
        pytest.skip("this system does not tell what processes share")
    assert alone - together == pytest.approx(memory.size / 2, rel=0.1)


def test_a_system_that_does_not_tell_gives_none(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "_STATUS", tmp_path / "none")
    assert worker.MemoryMeter(torch.device("cpu")).peak_bytes() is None
    monkeypatch.setattr(worker, "_PEAK_RESET", tmp_path / "no" / "such" / "place")
    assert worker.MemoryMeter(torch.device("cpu")).peak_bytes() is None
