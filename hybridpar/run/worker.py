"""This worker process: its determinism, its share of the cores, denormal numbers; and how much memory it needs."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.machine.devices import cpu_name
from hybridpar.machine.process import TUNED_VARIABLE, affinity, available_cores, cores_identity, share_cores
from hybridpar.machine.process import describe as describe_process
from hybridpar.models.state import give_back_memory

_STATUS = Path("/proc/self/status")
_SHARES = Path("/proc/self/smaps_rollup")
_PEAK_RESET = Path("/proc/self/clear_refs")


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
        local, workers = (some.count(cores[world.rank]) for some in (cores[: world.rank], cores))
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


class MemoryMeter:
    """Measures the most memory of a device that a worker needs at any time, from its making on.

    On a GPU that is what torch has handed out at its peak. On a CPU it is by how much the process has grown at its
    peak, without pages of files: code that is first run meanwhile is no need of the model, and the system can drop it.
    Of memory that several workers share, such as that in which they add gradients, each has its part. What is held
    already, such as the model, counts where `holding` says its bytes. Systems that do not tell give None.
    """

    def __init__(self, device: torch.device, holding: int = 0) -> None:
        self._is_gpu, self._device = device.type == "cuda", device
        self._before: int | None = None
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
            return
        give_back_memory()  # what was kept of measuring is no need
        try:
            _PEAK_RESET.write_text("5")  # of all that this file resets, 5 is the peak of resident memory (proc(5))
        except OSError:
            return
        # The process is weighed afterwards: what is freed above must not count as having been there.
        now = _anonymous("VmRSS")
        self._before = None if now is None else now - holding // 1024

    def peak_bytes(self) -> int | None:
        """The peak; None where the system does not tell it."""
        if self._is_gpu:
            return int(torch.cuda.max_memory_allocated(self._device))
        peak = _anonymous("VmHWM")
        return None if peak is None or self._before is None else max(0, 1024 * (peak - self._before))


def _anonymous(name: str) -> int | None:
    """A figure of the process in kB, less the pages of files that it has in memory now, and its part of shared ones."""
    total, files, shared = (_kilobytes(_STATUS, key) for key in (name, "RssFile", "RssShmem"))
    if total is None or files is None or shared is None:
        return None
    part = _kilobytes(_SHARES, "Pss_Shmem")
    return total - files - shared + (shared if part is None else part)


def _kilobytes(file: Path, name: str) -> int | None:
    """A figure of this process from procfs."""
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
