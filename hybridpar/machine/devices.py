"""What this machine offers at a glance: its CPU, its GPUs, how busy it is, and so how many workers a run starts."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from hybridpar.errors import check
from hybridpar.machine.process import available_cores

#: Where Linux shows a driver that torch's `cuda` devices need: NVIDIA's, the one of WSL, AMD's.
_GPU_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def gpu_count() -> int:
    """GPUs that torch can use. Torch is imported only on a machine that has a GPU's driver; no GPU is touched."""
    if not has_gpu_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def require_gpu(device: str) -> None:
    """Refuse `--device cuda` where torch has no GPU."""
    why, fix = "torch can use none here.", "Leave it out to train on the CPU; `hybridpar doctor` says more."
    check(device != "cuda" or gpu_count() > 0, "--device cuda without a GPU", why, fix)


def hide_gpus() -> None:
    """Have this process, and those that it starts, compute on the CPU; before torch is imported."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def has_gpu_driver() -> bool:
    """Whether there may be a GPU, as far as that can be said without torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return sys.platform != "linux" or any(Path(driver).exists() for driver in _GPU_DRIVERS)


def default_workers() -> int:
    """Workers that a run starts where nothing else is asked for: as many as GPUs, else 2 on the CPU, or 1 on a core."""
    return gpu_count() or min(2, len(available_cores()))


def machine_load() -> float:
    """How many processes wanted to run in the last minute, per core that this process may use."""
    return os.getloadavg()[0] / len(available_cores())


def cpu_name() -> str:
    """The CPU's model name as the system tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"
