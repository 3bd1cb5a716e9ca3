"""Starts forked processes and their store, for tests of whole runs with parameter servers."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridpar.comm.handshake import TOKEN_VARIABLE
from hybridpar.comm.world import World
from hybridpar.errors import HybridparError
from tests.ranks import start_processes
from tests.runs import train

#: What tells a process of its place; as our launcher sets it.
_PLACE = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "HYBRIDPAR_JOINS"),
    TOKEN_VARIABLE,
)


@contextlib.contextmanager
def store() -> Iterator[int]:
    """A store of torch.distributed; gives its port."""
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=30))
    yield made.port


@contextlib.contextmanager
def placed(rank: int, size: int, port: int, *, joins: bool = False) -> Iterator[None]:
    """The environment of one process of a job."""
    own = (str(rank), str(size), "127.0.0.1", str(port), "True", "1" if joins else "0", "a secret of this test")
    before = {name: os.environ.get(name) for name in _PLACE}
    os.environ.update(zip(_PLACE, own, strict=True))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def train_process(world: World, port: int, run_dir: Path, model: str, options: dict[str, Any]) -> int:
    """One process of a run, for `run_ranks`; worker or server, as the options have it."""
    with placed(world.rank, world.size, port):
        return train(run_dir, model, **options)


def _alone(
    rank: int,
    directory: str,
    size: int,
    port: int,
    run_dir: Path,
    model: str,
    options: dict[str, Any],
    answers: Any,
    *,
    joins: bool = False,
) -> None:
    answers.put(("pid", rank, os.getpid()))
    with placed(rank, size, port, joins=joins):
        try:
            code: Any = train(run_dir, model, **options)
        except HybridparError as error:
            code = f"{type(error).__name__}: {error.what}"
    answers.put(("end", rank, code))


@contextlib.contextmanager
def job(size: int, run_dir: Path, *, port: int | None = None, model: str = "plain", **options: Any) -> Iterator[Any]:
    """A run on processes that may be killed; gives the queue on which they tell their pids and how they ended."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(store()) if port is None else port
        yield stack.enter_context(start_processes(_alone, size, size, port, run_dir, model, options))


def _instead(_: int, directory: str, rank: int, *facts: Any) -> None:
    _alone(rank, directory, *facts, joins=True)


def replacement(rank: int, size: int, port: int, run_dir: Path, model: str = "plain", **options: Any) -> Any:
    """The same of a process that replaces a worker that died."""
    return start_processes(_instead, 1, rank, size, port, run_dir, model, options)


def ends(answers: Any, count: int, timeout: float = 120) -> dict[int, Any]:
    """How so many processes ended, by rank."""
    found: dict[int, Any] = {}
    while len(found) < count:
        kind, rank, value = answers.get(timeout=timeout)
        if kind == "end":
            found[rank] = value
    return found


def pids(answers: Any, count: int, timeout: float = 120) -> dict[int, int]:
    """The processes' ids, by rank."""
    found: dict[int, int] = {}
    while len(found) < count:
        kind, rank, value = answers.get(timeout=timeout)
        assert kind == "pid"
        found[rank] = value
    return found
