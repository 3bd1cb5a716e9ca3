"""Why: torch's threads cannot be given work of ours from Python, and TVM's would fight with them for the cores.

A few threads wait for work; the caller does the first part itself. They start when they are first needed, and again in
a forked process, to which threads do not come along.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_pool: ThreadPoolExecutor | None = None


def spread_out(parts: int, work: Callable[[int], object]) -> None:
    """Call work(0) to work(parts - 1) side by side, and return when all have ended.

    Args:
        parts: How many; the first is done by the calling thread.
        work: Must release the GIL where it takes its time.
    """
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="hybridpar-kernel")
    waiting = [_pool.submit(work, part) for part in range(1, parts)]
    try:
        work(0)
    finally:
        for one in waiting:
            one.result()


def _forget() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget)
