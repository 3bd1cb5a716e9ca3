"""What a measuring process does first and last: it joins the others, reads its link, and counts what it sent.

`python -m benchmarks.rig.rank MODULE ARGUMENTS` calls `MODULE.measure` with arguments in JSON;
`benchmarks.rig.launch.measure_in_ranks` starts one in every rank.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from benchmarks.rig.launch import exit_with
from hybridpar.errors import LaunchError


@contextmanager
def process_group(timeout: float = 60.0) -> Iterator[tuple[int, int]]:
    """Join the other ranks over gloo; leave them in order.

    Args:
        timeout: Seconds that a collective may wait for the others. Torch's default of 30 minutes hides a hang.

    Yields:
        Rank and number of ranks.
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


if __name__ == "__main__":
    exit_with(lambda: importlib.import_module(sys.argv[1]).measure(**json.loads(sys.argv[2])))
