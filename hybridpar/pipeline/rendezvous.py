"""Why: how a job meets is torch's, but its time-outs, restarts and errors are not left to its defaults.

The default time-out is half an hour, a restarted job may meet the addresses of the dead one, and the messages do not
say what to do. So the default group is made here and nowhere else.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

from hybridpar.errors import LaunchError


def initialise(device: torch.device, timeout: float) -> None:
    """Make torch's default process group: NCCL for CUDA tensors, gloo for CPU tensors.

    Args:
        device: The device this worker computes on.
        timeout: Seconds after which a silent peer is an error.

    Raises:
        LaunchError: The peers cannot be reached within the time-out.
    """
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
            f"{place}: {first_line(error)}",
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


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
