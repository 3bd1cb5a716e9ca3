"""Goes on with a run whose hosts do not share its directory: brings worker 0's checkpoint to those that lack it.

Checkpoints are written by worker 0 alone where the others cannot see its disk (`hybridpar.train.checkpoint`). So a run
that is resumed has them on one host, and every worker reads its checkpoint from its own disk.
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import CheckpointError
from hybridpar.machine.process import host_identity
from hybridpar.observe.files import run_directory_error
from hybridpar.run.directory import RunPlace, find_place, resumed_directory, was_restarted
from hybridpar.train.checkpoint_files import digest_of, latest_checkpoint, resolve_checkpoint

#: Bytes that are sent at a time.
_CHUNK = 1 << 24


def place_of_all(config: TrainConfig, model: str, world: World) -> tuple[RunPlace, str | None]:
    """Where a run writes, as worker 0 decides, with the checkpoint on the disk of every worker; a collective.

    Args:
        config: Options of the run.
        model: What the command line calls the model.
        world: All workers.

    Returns:
        The place, and a line on what was fetched, if anything was.

    Raises:
        UsageError: As `find_place`.
        CheckpointError: As `find_place`; where another host has the checkpoint, it says so.
        RunDirectoryError: A host cannot write what it is to fetch.
    """
    # With a launcher on each host, only that of the worker that died counts the restart.
    restarted = any(world.gather(was_restarted()))
    try:
        place = world.from_main(lambda: find_place(config, model, restarted=restarted))
    except CheckpointError as error:
        if not config.resume:
            raise
        newest = latest_checkpoint(resumed_directory(config, model) / "checkpoints")
        found = world.gather((socket.gethostname(), None if newest is None else newest.name))
        others = [(rank, *one) for rank, one in enumerate(found) if isinstance(one, tuple) and one[1] is not None]
        if not others:
            raise
        rank, host, name = others[0]
        raised = CheckpointError(
            f"{error.what} on the host of worker 0; worker {rank} has {name} on {host}",
            "These hosts do not share the run directory, and the checkpoint of worker 0 counts.",
            f"Copy the directory from {host} to the host of worker 0, or start so that {host} has worker 0: the host "
            "whose address comes first in alphabetical order.",
        )
        raised.is_repeated, raised.exit_code = world.rank > 0, error.exit_code
        raise raised from error
    return place, _fetch(place, world) if place.checkpoint is not None else None


def _fetch(place: RunPlace, world: World) -> str | None:
    """Bring the checkpoint to the hosts that do not have it."""
    assert place.checkpoint is not None
    path = world.from_main(lambda: resolve_checkpoint(place.checkpoint or Path()))
    mine = (host_identity(), digest_of(path))
    answers: list[tuple[str, str]] = world.gather(mine)  # type: ignore[assignment]
    lacking = {rank: host for rank, (host, digest) in enumerate(answers) if digest != answers[0][1]}
    if not lacking:
        return None
    # One worker of each host does it.
    writes = world.rank == next((rank for rank, host in lacking.items() if host == mine[0]), None)
    files = sorted(one.name for one in path.iterdir() if one.is_file()) if world.is_main else []
    sizes = world.from_main(lambda: {name: (path / name).stat().st_size for name in files})
    aside = path.with_name(f"{path.name}.partial")
    problem: OSError | None = None
    if writes:
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        except OSError as error:
            problem = error
    with world.named_errors("fetching the checkpoint of worker 0"):
        for name, size in sizes.items():
            problem = _broadcast(path / name, aside / name, size, world, writes and problem is None) or problem
    if writes and problem is None:
        try:
            shutil.rmtree(path, ignore_errors=True)
            aside.rename(path)
        except OSError as error:
            problem = error

    def fail() -> None:
        if problem is not None:
            raise run_directory_error(path, problem)

    world.on_all(fail)
    hosts = len(set(lacking.values()))
    return f"{path.name} was fetched from the host of worker 0 by {hosts} other{'' if hosts == 1 else 's'}"


def _broadcast(source: Path, target: Path, size: int, world: World, writes: bool) -> OSError | None:
    """Send a file of worker 0 to all; those that write it keep it."""
    problem: OSError | None = None
    reader = source.open("rb") if world.is_main else None
    try:
        writer = target.open("wb") if writes else None
    except OSError as error:
        writer, problem = None, error
    try:
        for start in range(0, size, _CHUNK):
            count = min(_CHUNK, size - start)
            data = bytearray(count) if reader is None else bytearray(reader.read(count))
            chunk = torch.frombuffer(data, dtype=torch.uint8).to(world.device)
            dist.broadcast(chunk, group_src=0, group=world.control)
            if writer is not None and problem is None:
                try:
                    writer.write(chunk.cpu().numpy().data)
                except OSError as error:
                    problem = error
    finally:
        for one in (reader, writer):
            if one is not None:
                one.close()
    return problem
