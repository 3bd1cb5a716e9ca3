"""Memory allocator, thread counts and CPU affinity of worker processes, set for training on a CPU.

**Allocator.** glibc hands large blocks back to the system when they are freed, and the next training step faults every
page in again. MobileNetV2 at batch 32 on one core spends a third of its time there: 160 thousand page faults a step,
against almost none where the allocator keeps what was freed. Three settings do that, as variables for a process that
is started or by `mallopt` in one that runs: no block is mapped on its own
(`MALLOC_MMAP_MAX_`), the heap is not trimmed (`MALLOC_TRIM_THRESHOLD_`), and threads share the main heap
(`MALLOC_ARENA_MAX`), because glibc unmaps a thread's own heap whatever the trim threshold says. The price is that the
resident size stays at its peak. Huge pages (`glibc.malloc.hugetlb=1`) showed no further gain and are left alone.

**Threads.** Workers share the cores, so each gets its part of them, counted in physical cores: two threads on one
core compete for the same vector units. What there is to share is what the affinity mask and cgroups leave this
process, not what the machine has.

This module imports neither torch nor anything of the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Set in a process that `tune_this_process` has tuned, and in those that it starts.
TUNED_VARIABLE = "HYBRIDPAR_TUNED"

#: What makes glibc keep freed memory: a variable with its value, the name under which GLIBC_TUNABLES knows the setting,
#: and its number and value for `mallopt`, of malloc.h. The threshold is never reached: 64 TiB, and for `mallopt`, which
#: takes ints, -1.
_ALLOCATOR = {
    "MALLOC_MMAP_MAX_": ("0", "glibc.malloc.mmap_max", (-4, 0)),
    "MALLOC_TRIM_THRESHOLD_": (str(1 << 46), "glibc.malloc.trim_threshold", (-1, -1)),
    "MALLOC_ARENA_MAX": ("1", "glibc.malloc.arena_max", (-8, 1)),
}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


def host_identity() -> str:
    """Equal in two processes exactly where they may share memory and nothing lies between them.

    Processes of one machine in different network namespaces count as different hosts: who puts workers there wants
    their traffic on the link between the namespaces.
    """
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net", "/proc/self/ns/ipc"):
        try:
            parts.append(os.readlink(path) if path.startswith("/proc/self/ns") else Path(path).read_text().strip())
        except OSError:
            parts.append("?")
    return "|".join(parts)


def available_cores() -> list[int]:
    """The logical cores that this process may use, in ascending order.

    Respects the affinity mask and a cgroup's CPU quota. A quota is rounded down, because a thread more than it pays
    for is throttled while all others wait for it. A quota limits time and not places, so which cores remain then says
    nothing; only their number does.
    """
    cores = _affinity_mask()
    quota = cpu_quota()
    return cores if quota is None else cores[: max(1, math.floor(quota))]


def seconds_waited(proc: Path = Path("/proc/self")) -> float:
    """Seconds that the threads of this process were ready to run while other programs had the cores, all added up."""
    waited = 0
    for path in proc.glob("task/*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread may end meanwhile
            waited += int(path.read_text().split()[1])
    return waited / 1e9


def _affinity_mask() -> list[int]:
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_quota(proc: Path = Path("/proc/self")) -> float | None:
    """The CPU quota of this process's cgroup, in cores; None where nothing limits it.

    Reads cgroup v1 (`cpu.cfs_quota_us`) and v2 (`cpu.max`). A limit may be set on any ancestor; the least one holds.
    """
    quotas = []
    for directory in _cgroup_directories("cpu", proc):
        try:
            if (directory / "cpu.max").exists():
                quota, period = (directory / "cpu.max").read_text().split()
            else:
                quota = (directory / "cpu.cfs_quota_us").read_text()
                period = (directory / "cpu.cfs_period_us").read_text()
            quotas.append(int(quota) / int(period))
        except (OSError, ValueError):  # no limit at this level; version 2 spells "none" as the word max
            continue
    return min((quota for quota in quotas if quota > 0), default=None)


def usable_memory(proc: Path = Path("/proc/self")) -> int:
    """Bytes of main memory that this process may use: what the machine has, or less where a cgroup limits it."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for directory in _cgroup_directories("memory", proc):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                limits.append(int((directory / name).read_text()))
            except (OSError, ValueError):
                continue
    return min(limits)


def _cgroup_directories(controller: str, proc: Path) -> list[Path]:
    """The mounted directories of a process's cgroup and its ancestors, for one controller, of version 1 and 2."""
    try:
        memberships = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return []
    # A line is ID:CONTROLLERS:PATH, with no controllers for the one hierarchy of version 2.
    paths = {}
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif controller in controllers.split(","):
            paths["cgroup"] = path
    groups = []
    for line in mounts:
        # ID PARENT MAJOR:MINOR ROOT MOUNT-POINT OPTIONS [TAGS...] - TYPE SOURCE SUPER-OPTIONS
        place, _, kind = line.partition(" - ")
        root, top = place.split()[3:5]
        filesystem, _, options = kind.split(" ", 2)
        if filesystem not in paths or (filesystem == "cgroup" and controller not in options.strip().split(",")):
            continue
        # A container mounts only the subtree at `root`, while the path may still be told from the host's top. A path
        # outside of that subtree is not to be seen; the mount's top is then the nearest that is.
        inside = os.path.relpath(paths[filesystem], root)
        steps = [] if inside.startswith("..") else [step for step in Path(inside).parts if step != "."]
        groups += [Path(top, *steps[:depth]) for depth in range(len(steps) + 1)]
    return groups


def physical_cores(cores: Sequence[int], system: Path = Path("/sys/devices/system/cpu")) -> list[list[int]]:
    """Group logical cores by the physical core they run on."""
    groups: dict[str, list[int]] = {}
    for core in cores:
        try:
            siblings = (system / f"cpu{core}" / "topology" / "thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(core)
        groups.setdefault(siblings, []).append(core)
    return list(groups.values())


def threads_per_worker(workers: int, cores: Sequence[int]) -> int:
    """Compute threads of each of `workers` processes that share `cores`: its part of the physical cores, at least 1."""
    return max(1, len(physical_cores(cores)) // workers)


def worker_environment(
    workers: int, cores: Sequence[int], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables that CPU workers are to be started with, beside those that are set already.

    What the user has set stays: an allocator variable, the same setting in `GLIBC_TUNABLES`, another allocator in
    `LD_PRELOAD`, or a number of threads.
    """
    present = os.environ if environment is None else environment
    added = {}
    if platform.libc_ver()[0] == "glibc" and not _other_allocator(present):
        tunables = present.get("GLIBC_TUNABLES", "")
        for name, (value, tunable, _) in _ALLOCATOR.items():
            if name not in present and f"{tunable}=" not in tunables:
                added[name] = value
    # Torch takes the first of the two that is set, so setting the second could undo what the user chose by the first.
    if not any(name in present for name in _THREADS):
        added.update(dict.fromkeys(_THREADS, str(threads_per_worker(workers, cores))))
    return added


#: Whether this process chose its number of threads itself.
_chose_threads = False


def tune_this_process(workers: int) -> None:
    """Give this process what `worker_environment` says, as if it had been started with it. Changes nothing twice."""
    global _chose_threads
    if os.environ.get(TUNED_VARIABLE) == "1":
        return
    if _threads_of_torchrun():
        del os.environ["OMP_NUM_THREADS"]
    added = worker_environment(workers, available_cores())
    _chose_threads = _THREADS[0] in added
    for name in _ALLOCATOR.keys() & added.keys():
        ctypes.CDLL(None).mallopt(*_ALLOCATOR[name][2])
    os.environ.update(added)
    os.environ[TUNED_VARIABLE] = "1"
    if _chose_threads and "torch" in sys.modules:  # which read the variable when it was imported
        sys.modules["torch"].set_num_threads(int(added[_THREADS[0]]))


def share_cores(workers: int) -> int | None:
    """Threads of this process beside `workers` - 1 others with the same cores; None where it did not choose them.

    What torch computes with is the caller's to set; what is started from here inherits the number.
    """
    if not _chose_threads:
        return None
    threads = threads_per_worker(workers, available_cores())
    os.environ.update(dict.fromkeys(_THREADS, str(threads)))
    return threads


def cores_identity() -> str:
    """Equal in two processes that share their cores: of one machine, with one affinity mask and one CPU quota."""
    parts = [str(_affinity_mask())]
    quota = cpu_quota()
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        if quota is not None:
            parts += [str(quota), os.readlink("/proc/self/ns/cgroup"), Path("/proc/self/cgroup").read_text()]
    except OSError:
        parts.append(socket.gethostname())
    return "|".join(parts)


def _threads_of_torchrun(parent: Path | None = None) -> bool:
    """Whether torchrun chose one thread for each of its workers, as it does where its user chose no number.

    Its workers cannot tell from their own environment, but from the one it was started with.
    """
    given = {name: os.environ[name] for name in _THREADS if name in os.environ}
    if "TORCHELASTIC_RUN_ID" not in os.environ or given != {"OMP_NUM_THREADS": "1"}:
        return False
    try:
        started_with = ((parent or Path(f"/proc/{os.getppid()}")) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return not any(variable.startswith(b"OMP_NUM_THREADS=") for variable in started_with)


def describe(environment: Mapping[str, str] | None = None) -> str:
    """One line on how a worker with this environment runs, for the head of a run's output."""
    present = os.environ if environment is None else environment
    threads = next((present[name] for name in _THREADS if name in present), None)
    if threads is None:
        share = "torch's default number of threads"
    else:
        share = f"{threads} thread{'' if threads == '1' else 's'} per worker"
    return f"{describe_allocator(present)}, {share}; off with --no-tune-process"


def describe_allocator(environment: Mapping[str, str] | None = None) -> str:
    """What a process with this environment allocates memory with. Times measured under another do not compare."""
    present = os.environ if environment is None else environment
    other = _other_allocator(present)
    if other:
        return f"allocator {other} from LD_PRELOAD"
    if all(present.get(name) == value for name, (value, *_) in _ALLOCATOR.items()):
        return "allocator keeps freed memory"
    if any(name in present for name in _ALLOCATOR) or "glibc.malloc." in present.get("GLIBC_TUNABLES", ""):
        return "allocator as set in the environment"
    return "allocator with the system's defaults"


def _other_allocator(environment: Mapping[str, str]) -> str | None:
    preloaded = environment.get("LD_PRELOAD", "")
    return next((name for name in _OTHER_ALLOCATORS if name in preloaded), None)


def affinity(rank: int, workers: int, cores: Sequence[int]) -> set[int] | None:
    """The cores that one worker should be pinned to, for `os.sched_setaffinity`.

    Slices are disjoint, as equal as the number of cores allows, and share no physical core unless there are more
    workers than physical cores.
    """
    if not 0 <= rank < workers:
        raise ValueError(f"rank {rank} of {workers} workers")
    if workers > len(cores) or sys.platform != "linux" or cpu_quota() is not None:
        return None
    shares = physical_cores(cores)
    if workers > len(shares):
        shares = [[core] for share in shares for core in share]
    first, end = (len(shares) * at // workers for at in (rank, rank + 1))
    return {core for share in shares[first:end] for core in share}
