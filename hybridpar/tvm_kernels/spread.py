"""Runs a range of work on several threads: on the OpenMP threads that torch computes with, where they can be found.

OpenMP's threads spin for a while after they ran out of work, and TVM's own pool pins its threads and spins too, so a
second pool of threads would share cores with torch's and be slower than one thread. Therefore ranges are handed to
torch's threads, by the function that compiled OpenMP code calls (`GOMP_parallel`). As in torch, they belong to the
calling thread: a backward pass on another thread has others.

Where torch's OpenMP library is not known (not on Linux, several of them loaded, or in a forked child, which has none of
its parent's threads) ranges run on threads that are started for the call.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

Range = Callable[[int, int], object]

#: Libraries in which torch finds OpenMP; both others can be called as the first one is.
_NAMES = ("libgomp", "libomp", "libiomp5")
_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PROCESS = os.getpid()


def torchs_openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch computes with; None where it is not known, and in a forked child."""
    return _library() if os.getpid() == _PROCESS else None


@cache
def _library() -> ctypes.CDLL | None:
    for path in _loaded():
        try:
            library = ctypes.CDLL(str(path))
            parallel, _, _ = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads
        except (OSError, AttributeError):
            continue
        parallel.argtypes = (_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return library
    return None


def _loaded() -> list[Path]:
    """The library of OpenMP that torch has loaded; nothing where there are several and none is in torch."""
    if sys.platform != "linux":
        return []
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/")}
    libraries = sorted(path for path in paths if path.name.startswith(_NAMES))
    return libraries if len(libraries) == 1 else [path for path in libraries if torch.__path__[0] in str(path)]


def _run_on_team(openmp: Any, run: Range, ranges: Sequence[tuple[int, int]]) -> None:
    # An interrupt between two ranges leaves one undone, and foreign code cannot pass it on.
    errors: list[BaseException | None] = [KeyboardInterrupt() for _ in ranges]

    def body(_: object) -> None:
        for index in range(openmp.omp_get_thread_num(), len(ranges), openmp.omp_get_num_threads()):
            try:
                run(*ranges[index])
                errors[index] = None
            except BaseException as error:
                errors[index] = error

    openmp.GOMP_parallel(_BODY(body), None, len(ranges), 0)
    for error in errors:
        if error is not None:
            raise error


def run_ranges(run: Range, rows: int, threads: int) -> None:
    """Call `run(begin, end)` for ranges that cover all rows, one range per thread, and wait until all have returned."""
    parts = min(threads, rows)
    if parts <= 1:
        run(0, rows)
        return
    ranges = [(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]
    if (openmp := torchs_openmp()) is not None:
        _run_on_team(openmp, run, ranges)
        return
    with ThreadPoolExecutor(parts - 1) as pool:  # its end waits for all: they write to memory of the caller
        results = [pool.submit(run, *each) for each in ranges[1:]]
        run(*ranges[0])
    for result in results:
        result.result()
