"""Why: a worker process prepares itself and its device before it builds anything on them."""

from __future__ import annotations

import os

import torch

from hybridpar.cluster import cpu_name
from hybridpar.config import TrainConfig
from hybridpar.launch import TUNED_VARIABLE
from hybridpar.pipeline.world import World
from hybridpar.process import affinity, available_cores


def device_name(device: torch.device) -> str:
    """What the maker calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def tune_worker(config: TrainConfig, world: World) -> None:
    """Set what torch and the system must know of this worker: determinism, its cores, denormal numbers."""
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if world.device.type != "cpu":
        return
    if os.environ.get(TUNED_VARIABLE) == "1":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        mine = affinity(local, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), available_cores())
        if mine is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, mine)
    # Denormal numbers appear late in training and are handled in microcode, a hundred times slower.
    torch.set_flush_denormal(True)
