"""Measures the most memory that training needed at any time."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridpar.models.state import give_back_memory

_STATUS = Path("/proc/self/status")
_SHARES = Path("/proc/self/smaps_rollup")
_PEAK_RESET = Path("/proc/self/clear_refs")


class MemoryMeter:
    """Measures how much memory of a device a worker needs, from its making on.

    On a GPU that is what torch has handed out at its peak. On a CPU it is by how much the process has grown at its
    peak, without pages of files: code that is first run meanwhile is no need of the model, and the system can drop it.
    Of memory that several workers share, such as that in which they add gradients, each has its part. What is held
    already, such as the model, counts where `holding` says its bytes. Systems that do not tell give None.
    """

    def __init__(self, device: torch.device, holding: int = 0) -> None:
        self._device = device
        self._before: int | None = 0
        self._resettable = True
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        give_back_memory()  # what was kept of measuring is no need
        try:
            _PEAK_RESET.write_text("5")  # of all that this file resets, 5 is the peak of resident memory (proc(5))
        except OSError:
            self._resettable = False
        # The process is weighed afterwards: what is freed above must not count as having been there.
        now = _anonymous("VmRSS")
        self._before = None if now is None else now - holding // 1024

    def peak_bytes(self) -> int | None:
        """The peak; None where the system does not tell it."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        peak = _anonymous("VmHWM")
        if peak is None or self._before is None or not self._resettable:
            return None
        return max(0, 1024 * (peak - self._before))


def _anonymous(name: str) -> int | None:
    """A figure of the process in kB, less the pages of files that it has in memory now, and its part of shared ones."""
    total, files, shared = _kilobytes(name), _kilobytes("RssFile"), _kilobytes("RssShmem")
    if total is None or files is None or shared is None:
        return None
    part = _kilobytes("Pss_Shmem", _SHARES)
    return total - files - shared + (shared if part is None else part)


def _kilobytes(name: str, file: Path | None = None) -> int | None:
    """A figure of this process from procfs."""
    try:
        lines = (file or _STATUS).read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
