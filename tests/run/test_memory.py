"""The most memory that training needs is measured from a moment on, and what was freed before does not count."""

from __future__ import annotations

import mmap
import subprocess
import sys
from multiprocessing import shared_memory

import pytest
import torch

from hybridpar.run import memory as run_memory
from hybridpar.run.memory import MemoryMeter

BIG = 200 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="procfs tells it")
def test_the_peak_is_that_since_the_meter_was_made():
    meter = MemoryMeter(torch.device("cpu"))
    held = torch.ones(BIG // 4)
    grown = meter.peak_bytes()
    if grown is None:
        pytest.skip("this system does not let the peak be reset")
    assert grown > 0.9 * BIG
    cpu = torch.device("cpu")
    assert MemoryMeter(cpu).peak_bytes() < 0.5 * BIG
    assert MemoryMeter(cpu, holding=held.nbytes).peak_bytes() > 0.9 * BIG
    del held
    assert MemoryMeter(cpu).peak_bytes() < 0.5 * BIG


@pytest.mark.skipif(sys.platform != "linux", reason="procfs tells it")
def test_pages_of_files_are_not_the_model_s(tmp_path):
    file = tmp_path / "library"
    with file.open("wb") as stream:
        stream.truncate(BIG)
    meter = MemoryMeter(torch.device("cpu"))
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        sum(mapped[at] for at in range(0, BIG, mmap.PAGESIZE))
        files = run_memory._kilobytes("RssFile")
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
    meter = MemoryMeter(torch.device("cpu"))
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
    if alone is None or run_memory._kilobytes("Pss_Shmem", run_memory._SHARES) is None:
        pytest.skip("this system does not tell what processes share")
    assert alone - together == pytest.approx(memory.size / 2, rel=0.1)


def test_a_system_that_does_not_tell_gives_none(tmp_path, monkeypatch):
    monkeypatch.setattr(run_memory, "_STATUS", tmp_path / "none")
    assert MemoryMeter(torch.device("cpu")).peak_bytes() is None
    monkeypatch.setattr(run_memory, "_PEAK_RESET", tmp_path / "no" / "such" / "place")
    assert MemoryMeter(torch.device("cpu")).peak_bytes() is None
