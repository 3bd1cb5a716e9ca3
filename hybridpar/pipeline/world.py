"""Why: a worker must find its peers once, with a time-out, and leave them cleanly.

Each sync lane needs a process group of its own: collectives of one group must be issued in the same order on every
worker, and two threads (or streams) cannot promise that for a group they share. Groups are made eagerly and in a
fixed order, because making them lazily is a collective whose order nobody controls.

A process that ends without destroying its groups can abort inside the backend's threads; `World.close` is therefore
part of every exit path.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field
from types import TracebackType

import torch
import torch.distributed as dist

from hybridpar.errors import LaunchError, SyncError


@dataclass
class World:
    """This worker's place among its peers.

    A world of one worker has no process groups, and no collective is ever called in it.

    Attributes:
        rank: This worker's number, from 0.
        size: Number of workers.
        device: The device this worker computes on.
        timeout: Seconds after which a silent peer is an error.
        lane_groups: One process group per sync lane.
        control: Process group of the control messages.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: float = 120.0
    lane_groups: list[dist.ProcessGroup] = field(default_factory=list)
    control: dist.ProcessGroup | None = None
    _owner: bool = False

    @classmethod
    def join(cls, *, lanes: int = 2, timeout: float = 120.0, device: torch.device | None = None) -> World:
        """Take this process's place in the job that its environment describes.

        Under torchrun, or any launcher that sets `RANK`, `WORLD_SIZE` and `MASTER_ADDR`, the default process group is
        initialised (NCCL for CUDA tensors, gloo for CPU tensors) unless the caller already did. Without these
        variables, or with `WORLD_SIZE=1`, the world is this process alone.

        Args:
            lanes: Number of sync lanes, each of which gets a process group.
            timeout: Seconds after which a silent peer is an error.
            device: Device to compute on; default: the GPU numbered `LOCAL_RANK`, else the CPU.

        Raises:
            LaunchError: The peers cannot be reached within the time-out.
        """
        device = device or default_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        owner = False
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                return cls(device=device, timeout=timeout)
            owner = True
            _initialise(device, timeout)
        size = dist.get_world_size()
        if size == 1:
            return cls(device=device, timeout=timeout, _owner=owner)
        world = cls(dist.get_rank(), size, device, timeout, _owner=owner)
        limit = datetime.timedelta(seconds=timeout)
        try:
            world.lane_groups = [dist.new_group(timeout=limit) for _ in range(lanes)]
            world.control = dist.new_group(timeout=limit)
        except RuntimeError as error:
            raise LaunchError(
                f"worker {world.rank} of {size} cannot connect to its peers: {_first_line(error)}",
                "Every worker must reach every other one.",
                "On several network interfaces, name the right one in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.",
            ) from error
        return world

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that writes files and talks to the terminal."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait on the host until every worker is here.

        Raises:
            SyncError: A peer did not come within the time-out, or died.
        """
        self.gather(None)

    def gather(self, item: object) -> list[object]:
        """Every worker's item, on every worker, by rank. For start-up and checkpoints, never within a step.

        Raises:
            SyncError: A peer did not answer within the time-out, or died.
        """
        if self.control is None:
            return [item]
        items: list[object] = [None] * self.size
        with self.named_errors("exchanging start-up or checkpoint facts"):
            dist.all_gather_object(items, item, group=self.control)
        return items

    def named_errors(self, doing: str) -> _NamedErrors:
        """Context that turns a backend's error into a `SyncError` that says who waited for what."""
        return _NamedErrors(self, doing)

    def peer_error(self, doing: str, error: BaseException) -> SyncError:
        """The backend's error as one that says which worker waited for what."""
        text = _first_line(error)
        lost = any(sign in text for sign in ("onnection", "reset by peer", "remote process", "Broken pipe"))
        reason = "a peer has died" if lost else f"a peer did not answer within {self.timeout:g} s, or failed"
        return SyncError(
            f"worker {self.rank} of {self.size} stopped while {doing}: {reason}",
            f"The backend says: {text}",
            "Look at the first worker that failed; a launched job restarts from its last checkpoint.",
        )

    def close(self) -> None:
        """Destroy all process groups of this world. Safe to call twice."""
        groups, self.lane_groups = [*self.lane_groups, self.control], []
        self.control = None
        if not dist.is_initialized():
            return
        if self._owner:
            dist.destroy_process_group()
            return
        for group in groups:
            if group is not None:
                dist.destroy_process_group(group)


class _NamedErrors:
    def __init__(self, world: World, doing: str) -> None:
        self._world = world
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            raise self._world.peer_error(self._doing, error) from error


def _initialise(device: torch.device, timeout: float) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = datetime.timedelta(seconds=timeout)
    try:
        dist.init_process_group(backend, timeout=limit, device_id=device if device.type == "cuda" else None)
    except (RuntimeError, ValueError, KeyError) as error:
        place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise LaunchError(
            f"worker {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')} cannot join the job at "
            f"{place}: {_first_line(error)}",
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must describe a job whose workers reach each other.",
            "Start workers with `hybridpar train --workers N`, or with torchrun.",
        ) from error


def default_device() -> torch.device:
    """The GPU numbered `LOCAL_RANK` where there are GPUs, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
