"""Runs functions in several worker processes, which are kept for the whole test session.

Starting a process costs seconds, and most tests need two or three of them for a moment.

One pool of processes serves the whole test session. A test hands over a top-level function; each rank calls it with a
`World` of its own and the results come back by rank. A rank that fails makes the call fail with its traceback; a call
that takes too long kills the pool, which starts again at the next use. Only tests that kill workers start their own,
by `start_processes`. All of them are forked from one process that has imported torch and has no threads, so that the
import is paid for once.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import itertools
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SIZE = 4

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["pytest", "hybridpar.run.run", "networkx", "torch.utils.tensorboard", "tests.runs", "tests.pipeline.oracle"]
)
_pool: list[tuple[Any, Connection]] = []


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, lanes: int = 2, timeout: float = 90, shared_memory: bool = True
) -> list[Any]:
    """Call `function(world, *args)` on `size` ranks and return their results by rank.

    Args:
        function: A top-level function of an importable module; results must pickle.
        size: Number of ranks, at most `SIZE`. With one rank the function runs in the pool too, in a world of one.
        args: Handed to every rank.
        lanes: Sync lanes of the world.
        shared_memory: Whether gradients may travel through shared memory; else over gloo.
        timeout: Seconds until the pool is killed; process groups get two thirds of it.

    Raises:
        RankError: A rank raised or did not finish.
    """
    assert 1 <= size <= SIZE
    _start(size)
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(size):
            _pool[rank][1].send(
                (function, args, rank, size, f"file://{directory}/store", lanes, timeout * 2 / 3, shared_memory)
            )
        answers: list[Any] = [None] * size
        deadline = time.monotonic() + timeout
        for rank in range(size):
            try:
                if not _pool[rank][1].poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError("no answer")
                answers[rank] = _pool[rank][1].recv()
            except (EOFError, OSError) as error:
                stop_pool()
                raise RankError(f"rank {rank} did not answer within {timeout:g} s, or died") from error
    problems = [f"rank {rank}:\n{answer[1]}" for rank, answer in enumerate(answers) if answer[0] == "error"]
    if problems:
        raise RankError("\n".join(problems))
    return [answer[1] for answer in answers]


def stop_pool() -> None:
    """Kill all processes of the pool."""
    for process, pipe in _pool:
        with contextlib.suppress(OSError):
            pipe.close()
        process.kill()
        process.join()
    _pool.clear()


@contextlib.contextmanager
def start_processes(function: Callable[..., None], size: int, *args: Any) -> Iterator[Any]:
    """Run `function(rank, directory, *args, answers)` in processes of their own, which are killed in the end.

    Args:
        function: A top-level function of an importable module.
        size: Number of processes.
        args: Handed to every process, after its rank and the name of a directory that all of them share.

    Yields:
        `answers`, the queue on which the processes put what they found.
    """
    answers = _context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        processes = [
            _context.Process(target=_run_alone, args=(function, rank, directory, *args, answers), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            yield answers
        finally:
            for process in processes:
                process.kill()
                process.join()


def _run_alone(function: Callable[..., None], *args: Any) -> None:
    _prepare()
    function(*args)


def _start(size: int) -> None:
    if not _pool:
        atexit.register(stop_pool)
    while len(_pool) < size:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _pool.append((process, ours))


def keep_what_is_left() -> None:
    """Collect garbage, and have later collections pass over what is left: modules and caches, which stay anyway.

    Runs collect garbage several times each, which took longer than the runs in a process that had run many tests.
    """
    gc.collect()
    gc.freeze()


def leave_to_the_system(descriptor: int) -> None:
    """Instead of `os.fsync`: no test cuts the power, and a tenth of a short run was spent in waiting."""


def _prepare() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    gc.freeze()  # what was imported before the fork is never garbage
    os.fsync = leave_to_the_system
    torch.set_num_threads(1)


def _serve(pipe: Connection) -> None:
    _prepare()
    home = Path.cwd()
    for call in itertools.count(1):
        if call % 50 == 0:
            keep_what_is_left()
        try:
            function, args, *place = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send(("result", _call(function, args, *place)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
        finally:
            os.chdir(home)


def _call(
    function: Any, args: Any, rank: int, size: int, store: str, lanes: int, timeout: float, shared_memory: bool
) -> Any:
    import torch.distributed as dist

    from hybridpar.comm.world import World

    if size == 1:
        return function(World(), *args)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout)
    )
    try:
        world = World.join(lanes=lanes, timeout=timeout, shared_memory=shared_memory)
        try:
            return function(world, *args)
        finally:
            world.close()
    finally:
        dist.destroy_process_group()
