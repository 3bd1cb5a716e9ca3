"""Waiting for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def eventually(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until something holds, and fail if it does not.

    Args:
        holds: Asked again and again.
        seconds: When to give up; long, because the machine may be busy.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        time.sleep(0.01)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def saved(run_dir: Path) -> bool:
    """Whether a run has a finished checkpoint."""
    return any((run_dir / "checkpoints").glob("step-*/manifest.json"))
