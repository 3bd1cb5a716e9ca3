"""Sets up a worker process before it trains: determinism, its share of the cores, denormal numbers."""

from __future__ import annotations

import os

import torch

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.machine.devices import cpu_name
from hybridpar.machine.process import TUNED_VARIABLE, affinity, available_cores, cores_identity, share_cores
from hybridpar.machine.process import describe as describe_process


def device_name(device: torch.device) -> str:
    """What the maker calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def describe_worker(config: TrainConfig) -> list[str]:
    """Lines on how this process runs."""
    tuned = [describe_process()] if os.environ.get(TUNED_VARIABLE) == "1" else []
    compiled = ["compile  the first step compiles the model, which may take minutes"] if config.compile else []
    return [*tuned, *compiled]


def tune_worker(config: TrainConfig, world: World) -> None:
    """Set what torch and the system must know of this worker: determinism, its cores, denormal numbers.

    A collective: workers that share their cores divide them, also those of several launchers on one machine.
    """
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    local, workers = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if world.size > 1:
        # Workers on GPUs compute elsewhere.
        cores = world.gather(cores_identity() if world.device.type == "cpu" else None)
        local, workers = (one.count(cores[world.rank]) for one in (cores[: world.rank], cores))
    if world.device.type != "cpu":
        return
    if os.environ.get(TUNED_VARIABLE) == "1":
        if (threads := share_cores(workers)) is not None:
            torch.set_num_threads(threads)
        mine = affinity(local, workers, available_cores())
        if mine is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, mine)
    # Denormal numbers appear late in training and are handled in microcode, a hundred times slower.
    torch.set_flush_denormal(True)
