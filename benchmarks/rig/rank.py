"""Sets up and tears down the process group of a measuring process; reads its link and the bytes it sent."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hybridpar.errors import LaunchError


@contextmanager
def process_group(timeout: float = 60.0) -> Iterator[tuple[int, int]]:
    """Join the other ranks over gloo; leave them in order.

    Args:
        timeout: Seconds that a collective may wait for the others. Torch's default of 30 minutes hides a hang.

    Yields:
        Rank and number of ranks.

    Raises:
        LaunchError: This process was not started as a rank.
    """
    if "RANK" not in os.environ:
        raise LaunchError(
            "this process is no rank", "RANK and WORLD_SIZE are not set.", "Start it through benchmarks.rig.launch."
        )
    # Autograd's own threads read this setting, not the environment.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        # Without it, gloo's threads are still alive at exit and abort the process now and then.
        dist.destroy_process_group()


def link() -> str:
    """The link that this rank was started on, as the table's column `link` says it."""
    return os.environ.get("RIG_LINK", "none")


def sent_bytes() -> int:
    """Bytes that the interface of this rank's node has sent so far.

    The difference over some steps is what they put on the wire. On the loopback it counts all processes of the machine.

    Raises:
        LaunchError: This process was not started as a rank, or has no such interface.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    # Of all the kernel's tables this one belongs to the namespace of the reader, whatever is mounted where.
    with open("/proc/self/net/dev") as table:
        for line in table:
            name, _, counters = line.partition(":")
            if counters and name.strip() == interface:
                return int(counters.split()[8])
    raise LaunchError(
        f"no interface {interface!r} to count",
        "GLOO_SOCKET_IFNAME names it.",
        "Start it through benchmarks.rig.launch.",
    )
