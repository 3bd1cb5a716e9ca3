"""Measures the CPU load that other processes cause during a round; such a round is not counted.

Foreign load is what the machine did in processes, less what the ranks did. Two of the kernel's accounts say what the
machine did, and each misses something. The account of the CPUs sees other containers too, and what the hypervisor took
away. But it books network traffic apart (as soft interrupts), which the ranks' own account includes, so that traffic of
four ranks hides 0.3 of a core of foreign load. The accounts of the single processes match the ranks' own, but show only
what is visible from here. The larger of the two counts.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress

from hybridpar.errors import LaunchError

#: Seconds; the kernel's counters move in steps of 10 ms, so over less than this they say little.
LEAST_WINDOW = 0.5

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in the kernel's include/linux/sched.h

#: The clock; CPU seconds of the machine by its two accounts, without the relay's; CPU seconds of this process.
Account = tuple[float, float, float, float]


def account() -> Account:
    """What has been used so far."""
    relay = relay_seconds()
    return time.perf_counter(), busy_seconds() - relay, process_seconds() - relay, own_seconds()


def foreign_cores(before: Account, after: Account, total: Callable[[float], float]) -> float:
    """Cores' worth of work that others did between two accounts; `total` adds up what the ranks used."""
    seconds, busy, processes, used = (now - then for now, then in zip(after, before, strict=True))
    return max(0.0, (max(busy, processes) - total(used)) / max(seconds, 1e-9))


def busy_seconds() -> float:
    """CPU seconds since boot that all processes of the machine used, with those that the hypervisor took away."""
    try:
        with open("/proc/stat") as table:
            ticks = [int(field) for field in table.readline().split()[1:]]
    except FileNotFoundError as error:
        raise LaunchError(
            "no /proc/stat to read the machine's load from",
            "A comparison is only worth something when the machine was otherwise idle.",
            "Measure on Linux.",
        ) from error
    user, nice, system, _idle, _wait, _irq, _softirq, steal = ticks[:8]
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def process_seconds() -> float:
    """CPU seconds that all visible processes used so far, with those of children that they have waited for.

    Kernel threads are left out: what they do under load is mostly the ranks' own network traffic.
    """
    return sum(_seconds(f"/proc/{process}") for process in os.listdir("/proc") if process.isdigit())


def own_seconds() -> float:
    """CPU seconds that this process used so far, all threads, with its children, running and ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    running: list[str] = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/children") as children:
            running += children.read().split()
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(
        _seconds(f"/proc/{child}") for child in running
    )


def relay_seconds() -> float:
    """CPU seconds that the relay of this rank's link used so far: the link's own cost, as the kernel's for others."""
    relay = os.environ.get("RIG_RELAY")
    return _seconds(f"/proc/{relay}") if relay else 0.0


def _seconds(process: str) -> float:
    """CPU seconds of a process, and of children that it has waited for; 0 for one that has ended or is the kernel's."""
    try:
        with open(f"{process}/stat") as stat:
            # The command's name comes second, in brackets, and may itself hold blanks and brackets.
            fields = stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return 0.0 if int(fields[6]) & _KERNEL_THREAD else sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
