"""Spreads the range of a kernel over threads.

TVM's own pool of threads is never used: it pins and spins, as torch's threads do, and both together are slower than one
thread. The ranges run on torch's threads (`openmp`), or else on helper threads that sleep while there is no work.
Kernels release the GIL while they run.

A helper takes one task after another and never waits for another task, so any number of threads may call at the same
time, also from backward passes and lanes. A forked process starts helpers of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from hybridpar.tvm_kernels.openmp import OpenMP, torchs_openmp

Range = Callable[[int, int], object]
_Task = tuple[Range, int, int, "SimpleQueue[BaseException | None]"]


class _Helpers:
    """Threads that wait for tasks; as many as were ever needed at a time by one caller."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[_Task] = SimpleQueue()
        self.count = 0
        self.starting = threading.Lock()

    def at_least(self, count: int) -> None:
        with self.starting:
            while self.count < count:
                threading.Thread(target=self._work, name=f"kernels-{self.count}", daemon=True).start()
                self.count += 1

    def _work(self) -> None:
        while True:
            run, begin, end, done = self.tasks.get()
            try:
                run(begin, end)
                done.put(None)
            except BaseException as error:
                done.put(error)


_helpers = _Helpers()


def _forget_helpers() -> None:
    global _helpers
    _helpers = _Helpers()  # threads do not survive a fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)


def _run_on_team(openmp: OpenMP, run: Range, rows: int, parts: int) -> None:
    # An interrupt between two parts leaves one undone, and foreign code has no way to pass it on.
    errors: list[BaseException | None] = [KeyboardInterrupt() for _ in range(parts)]

    def work(number: int, size: int) -> None:
        for part in range(number, parts, size):
            try:
                run(rows * part // parts, rows * (part + 1) // parts)
                errors[part] = None
            except BaseException as error:
                errors[part] = error

    openmp.on_team(work, parts)
    for error in errors:
        if error is not None:
            raise error


def run_ranges(run: Range, rows: int, threads: int) -> None:
    """Call `run(begin, end)` for ranges that cover all rows, one range per thread, and wait until all have returned.

    Args:
        run: Computes rows from begin to before end; called on several threads at a time.
        rows: How many rows there are.
        threads: How many threads may be used; this one is one of them.

    Raises:
        BaseException: What `run` raised first, by the order of the ranges' ends.
    """
    parts = min(threads, rows)
    if parts <= 1:
        run(0, rows)
        return
    if (openmp := torchs_openmp()) is not None:
        _run_on_team(openmp, run, rows, parts)
        return
    if _helpers.count < parts - 1:
        _helpers.at_least(parts - 1)
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    for part in range(1, parts):
        _helpers.tasks.put((run, rows * part // parts, rows * (part + 1) // parts, done))
    errors: list[BaseException | None] = []
    try:
        run(0, rows // parts)
    finally:  # the others write to memory that the caller would free
        errors = [done.get() for _ in range(1, parts)]
    for error in errors:
        if error is not None:
            raise error
