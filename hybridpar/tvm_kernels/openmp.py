"""Runs work on the OpenMP threads that torch computes with.

OpenMP's threads spin for a while when they have nothing to do, so any other thread has to share a core with them. So
ranges are handed to the very threads that torch computes with, by the function that compiled OpenMP code calls. They
are the calling thread's own, as in torch: a backward pass on another thread has others.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

#: Libraries in which torch finds OpenMP; both others can be called as the first one is.
_NAMES = ("libgomp", "libomp", "libiomp5")
_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass(frozen=True)
class OpenMP:
    """The library that this process computes with.

    Attributes:
        parallel: GOMP_parallel(body, data, threads, flags): calls `body` once on each of so many threads.
        thread_number: omp_get_thread_num().
        team_size: omp_get_num_threads().
    """

    parallel: Any
    thread_number: Callable[[], int]
    team_size: Callable[[], int]

    def on_team(self, work: Callable[[int, int], None], threads: int) -> None:
        """Call `work(number, size)` on each thread of a team and wait for all; it must not raise.

        Args:
            work: Given the thread's number, and how many there are: `threads` or fewer.
            threads: How many are wanted; the calling one is the first.
        """

        def body(_data: object) -> None:
            work(self.thread_number(), self.team_size())

        self.parallel(_BODY(body), None, threads, 0)


@cache
def _find() -> OpenMP | None:
    for path in _loaded():
        try:
            library = ctypes.CDLL(str(path))
            parallel = library.GOMP_parallel
            number, size = library.omp_get_thread_num, library.omp_get_num_threads
        except (OSError, AttributeError):
            continue
        parallel.argtypes = (_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return OpenMP(parallel, number, size)
    return None


def torchs_openmp() -> OpenMP | None:
    """The library whose threads torch computes with; None where it cannot be told, or in a forked child."""
    return _find() if os.getpid() == _PROCESS else None


#: A forked child has its parent's books of threads, and none of the threads.
_PROCESS = os.getpid()


def _loaded() -> list[Path]:
    """The library of OpenMP that torch has loaded; nothing where there are several and none is in torch."""
    if sys.platform != "linux":
        return []
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/")}
    found = sorted(path for path in paths if path.name.startswith(_NAMES))
    return found if len(found) == 1 else [path for path in found if torch.__path__[0] in str(path)]
