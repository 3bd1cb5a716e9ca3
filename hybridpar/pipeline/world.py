"""Why: a worker must find its peers once, with a time-out, and leave them cleanly.

Each sync lane needs a process group of its own: collectives of one group must be issued in the same order on every
worker, and two threads (or streams) cannot promise that for a group they share. Groups are made eagerly and in a
fixed order, because making them lazily is a collective whose order nobody controls.

A process that ends without destroying its groups can abort inside the backend's threads; `World.close` is therefore
part of every exit path.
"""

from __future__ import annotations

import datetime
import logging
import os
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from hybridpar.errors import LaunchError, SyncError
from hybridpar.pipeline.collective import BackendSum, SumGroup
from hybridpar.pipeline.shared_memory import SharedMemorySum, host_identity

_log = logging.getLogger(__name__)


@dataclass
class World:
    """This worker's place among its peers.

    A world of one worker has no process groups, and no collective is ever called in it.

    Attributes:
        rank: This worker's number, from 0.
        size: Number of workers.
        device: The device this worker computes on.
        timeout: Seconds after which a silent peer is an error.
        lane_sums: What adds gradients, one for each sync lane.
        control_sum: What adds control messages.
        control: Process group for everything that is not in a step: broadcasts at the start, facts for a checkpoint.
        transport: What gradients travel by: `gloo`, `nccl`, `shared memory`, or `none`.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: float = 120.0
    lane_sums: list[SumGroup] = field(default_factory=list)
    control_sum: SumGroup | None = None
    control: dist.ProcessGroup | None = None
    transport: str = "none"
    _groups: list[dist.ProcessGroup] = field(default_factory=list)
    _owner: bool = False

    @classmethod
    def join(
        cls,
        *,
        lanes: int = 2,
        timeout: float = 120.0,
        device: torch.device | None = None,
        shared_memory: bool = True,
    ) -> World:
        """Take this process's place in the job that its environment describes.

        Under torchrun, or any launcher that sets `RANK`, `WORLD_SIZE` and `MASTER_ADDR`, the default process group is
        initialised (NCCL for CUDA tensors, gloo for CPU tensors) unless the caller already did. Without these
        variables, or with `WORLD_SIZE=1`, the world is this process alone.

        Args:
            lanes: Number of sync lanes, each of which gets a process group.
            timeout: Seconds after which a silent peer is an error.
            device: Device to compute on; default: the GPU numbered `LOCAL_RANK`, else the CPU.
            shared_memory: Let CPU workers of one host add through shared memory instead of over the network.

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
            control = _new_group(limit)
            world.control, world._groups = control, [control]
            if world._one_host(shared_memory) and world._share_memory(lanes):
                return world
            world._groups += [_new_group(limit) for _ in range(lanes)]
            world.lane_sums = [BackendSum(group) for group in world._groups[1:]]
            world.control_sum = BackendSum(control)
            world.transport = "nccl" if device.type == "cuda" else "gloo"
        except RuntimeError as error:
            raise LaunchError(
                f"worker {world.rank} of {size} cannot connect to its peers: {_first_line(error)}",
                "Every worker must reach every other one.",
                "On several network interfaces, name the right one in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.",
            ) from error
        return world

    def _one_host(self, wanted: bool) -> bool:
        """Whether all workers share this host's memory, want to use it, and compute on the CPU."""
        mine = host_identity() if wanted and self.device.type == "cpu" else None
        answers = self.gather(mine)
        return mine is not None and all(answer == mine for answer in answers)

    def _share_memory(self, lanes: int) -> bool:
        """Set up shared memory for all lanes, on all workers or on none."""
        try:
            sums = [SharedMemorySum(self.rank, self.size, self.gather, self.timeout) for _ in range(lanes + 1)]
        except OSError as error:
            _log.warning("no shared memory between workers (%s); gradients travel over gloo", error)
            return False
        self.control_sum, self.lane_sums = sums[0], [*sums[1:]]
        self.transport = "shared memory"
        return True

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
        for one in [*self.lane_sums, self.control_sum]:
            if one is not None:
                one.close()
        groups, self._groups = self._groups, []
        self.lane_sums, self.control_sum, self.control = [], None, None
        if not dist.is_initialized():
            return
        if self._owner:
            dist.destroy_process_group()
            return
        for group in groups:
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
        dist.init_process_group(
            backend, timeout=limit, device_id=device if device.type == "cuda" else None, **_own_store(limit)
        )
    except (RuntimeError, ValueError, KeyError) as error:
        place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        if "EADDRINUSE" in str(error):
            raise LaunchError(
                f"the job cannot meet at {place}: the port is in use",
                "MASTER_PORT must be free on the host of worker 0; another job may be using it.",
                "Set another MASTER_PORT, or start with `torchrun --standalone`, which finds a free one.",
            ) from error
        raise LaunchError(
            f"worker {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')} cannot join the job at "
            f"{place}: {_first_line(error)}",
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must describe a job whose workers reach each other.",
            "Start workers with `hybridpar train --workers N`, or with torchrun.",
        ) from error


def _own_store(limit: datetime.timedelta) -> dict[str, Any]:
    """Arguments that have the workers of this attempt meet apart from those of the attempt before.

    Torch's elastic launcher keeps one store for all attempts, so that restarted workers may read the addresses of dead
    ones. With several launchers, one per host, their restarts are counted apart and the number names no attempt.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is None or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    # Both are documented parts of torch.distributed, which declares no exports.
    store, rank, size = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]
    apart = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    return {"store": apart, "rank": rank, "world_size": size}


def _new_group(limit: datetime.timedelta) -> dist.ProcessGroup:
    """A group of all workers with threads of its own; every worker makes the same groups in the same order."""
    group = dist.new_group(timeout=limit)
    assert isinstance(group, dist.ProcessGroup)
    return group


def default_device() -> torch.device:
    """The GPU numbered `LOCAL_RANK` where there are GPUs, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
