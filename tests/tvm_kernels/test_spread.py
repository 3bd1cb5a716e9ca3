"""Tests how rows are spread over threads: each is computed once, errors come back, and forks work."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from hybridpar.tvm_kernels import spread
from hybridpar.tvm_kernels.spread import run_ranges, torchs_openmp


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 100])
def test_ranges_cover_all_rows_once(rows, threads):
    seen: list[tuple[int, int, int]] = []
    run_ranges(lambda begin, end: seen.append((begin, end, threading.get_ident())), rows, threads)
    ends = [0, *(end for _, end, _ in sorted(seen))]
    assert [begin for begin, _, _ in sorted(seen)] == ends[:-1]
    assert ends[-1] == rows
    assert len(seen) == max(1, min(rows, threads))


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_comes_back_when_all_have_ended(bad):
    ended: list[int] = []

    def work(begin: int, end: int) -> None:
        if begin == bad:
            raise ValueError(f"row {bad}")
        ended.append(begin)

    with pytest.raises(ValueError, match=f"row {bad}"):
        run_ranges(work, 2, 2)
    assert ended == [1 - bad]
    run_ranges(lambda begin, end: ended.append(end), 2, 2)
    assert sorted(ended[1:]) == [1, 2], "the helpers live on"


def test_a_forked_process_has_helpers_of_its_own():
    run_ranges(lambda begin, end: None, 2, 2)
    child = os.fork()
    if child == 0:
        seen: list[int] = []
        run_ranges(lambda begin, end: seen.append(begin), 2, 2)
        os._exit(0 if sorted(seen) == [0, 1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_torchs_own_threads_compute():
    """Threads of another pool would share a core with torch's, which spin."""
    openmp = torchs_openmp()
    if openmp is None:
        pytest.skip("torch's OpenMP is not known here")
    before = {path.name for path in Path("/proc/self/task").iterdir()}
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.randn(1 << 18).exp_()  # torch's threads are there
    torch.set_num_threads(threads)
    with_torch = {path.name for path in Path("/proc/self/task").iterdir()}
    seen: list[int] = []
    run_ranges(lambda begin, end: seen.append(threading.get_native_id()), 2, 2)
    assert len(set(seen)) == 2
    assert {str(one) for one in seen} <= with_torch | before


def test_without_openmp_helpers_compute(monkeypatch):
    monkeypatch.setattr(spread, "torchs_openmp", lambda: None)
    both = threading.Barrier(2, timeout=30)
    run_ranges(lambda begin, end: both.wait(), 2, 2)
