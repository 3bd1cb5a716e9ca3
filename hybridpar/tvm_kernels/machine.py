"""What this CPU is and does: its fingerprint, registers, caches, multiply-adds a second, and the speed of copies."""

from __future__ import annotations

import functools
import hashlib
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridpar.codegen.build import Session, cpu_info
from hybridpar.codegen.compile_pool import Builder, Request
from hybridpar.machine.cluster import cpu_name
from hybridpar.tvm_kernels.measure import torch_threads

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_PEAK = Path(__file__).with_name("schedules") / "cpu_peak.py"
#: Sizes in bytes at which copying is timed.
_COPIED = (1 << 20, 6 << 20, 24 << 20, 64 << 20)


def cpu_features() -> frozenset[str]:
    """The instruction sets of the CPU, as Linux names them; empty where they are not known."""
    return frozenset((cpu_info().get("flags") or cpu_info().get("Features", "")).split())


@functools.cache
def cpu_fingerprint() -> str:
    """The CPU's name and eight digits over its instruction sets, which differ between kinds of CPU.

    Records of kernels hold for one fingerprint.
    """
    digest = hashlib.sha256(" ".join(sorted(cpu_features())).encode()).hexdigest()[:8]
    return f"{cpu_name()} {digest}"


@dataclass(frozen=True)
class Machine:
    """A CPU as the cost model sees it.

    Attributes:
        lanes: Float32 values in a vector register.
        registers: Vector registers.
        level1: Bytes of a core's first cache.
        level2: Bytes of its second.
        level3: Bytes of the last one.
    """

    lanes: int
    registers: int
    level1: int = 32 << 10
    level2: int = 512 << 10
    level3: int = 8 << 20


@dataclass(frozen=True)
class Speed:
    """What one thread of a CPU can do.

    Attributes:
        multiply_adds: Float32 multiply-adds a second.
        copies: (bytes read and written in total, bytes a second), by size.
    """

    multiply_adds: float
    copies: tuple[tuple[int, float], ...]

    def bandwidth(self, size: int) -> float:
        """The speed of memory for operands of a size.

        Args:
            size: Bytes.

        Returns:
            Bytes a second.
        """
        return copy_speed(self.copies, size)

    def floor_ms(self, multiply_adds: int, size: int, threads: int = 1) -> float:
        """The time that neither arithmetic nor memory can beat. Memory counts as one thread's speed times the threads.

        Args:
            multiply_adds: Of a call.
            size: Bytes.
            threads: That share the work.

        Returns:
            Milliseconds.
        """
        return 1e3 * max(multiply_adds / self.multiply_adds, size / self.bandwidth(size)) / threads


def copy_speed(copies: Sequence[tuple[int, float]], size: int) -> float:
    """Look up the speed of copies of a size.

    Args:
        copies: As `Speed.copies`.
        size: Bytes.

    Returns:
        Bytes a second.
    """
    return next((rate for most, rate in copies if size <= most), copies[-1][1])


@functools.cache
def this_machine() -> Machine:
    """The CPU that this process runs on."""
    flags = cpu_features()
    if platform.machine() in ("aarch64", "arm64"):
        lanes, registers = 4, 32
    elif "avx512f" in flags:
        lanes, registers = 16, 32
    else:
        lanes, registers = 8 if "avx" in flags else 4, 16
    sizes = {level: size for level, size in map(_cache, _CACHES.glob("index*")) if size}
    known = {f"level{level}": size for level, size in sizes.items() if level in (1, 2, 3)}
    return Machine(lanes, registers, **known)


def _cache(directory: Path) -> tuple[int, int]:
    """Level and bytes of a cache; none for one of instructions."""
    try:
        if (directory / "type").read_text().strip() == "Instruction":
            return 0, 0
        size = (directory / "size").read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(size[-1:], 1)
        return int((directory / "level").read_text()), int(size.rstrip("KM")) * unit
    except (OSError, ValueError):
        return 0, 0


def measure_speed(builder: Builder, machine: Machine | None = None) -> Speed:
    """Time a loop of multiply-adds that needs no memory, and copies of several sizes; takes about a second.

    Args:
        builder: Builds the loop.
        machine: The CPU; this one where None.

    Returns:
        The speed of one thread.

    Raises:
        KernelsUnavailable: The loop cannot be built.
    """
    machine = machine or this_machine()
    chains = 12 if machine.registers >= 16 else 6
    built = builder.build(Request((_PEAK,), {"lanes": machine.lanes, "chains": chains}))
    peak = Session().load(built, keep=False)["peak"]
    memory = torch.zeros(machine.lanes * chains)
    count = 200_000
    seconds = _least(lambda: peak(memory.data_ptr(), count), 15)
    return Speed(count * chains * machine.lanes / seconds, measure_copies())


def measure_copies() -> tuple[tuple[int, float], ...]:
    """The speed of copies by one thread, as `Speed` has it."""
    return tuple((size, size / _copied(size)) for size in _COPIED)


def _copied(size: int) -> float:
    """Seconds to read one half of so many bytes and write the other."""
    source = torch.zeros(size // 8)
    out = torch.empty_like(source)
    return _least(lambda: out.copy_(source), 9)


def _least(run: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of some calls, on one thread."""
    with torch_threads(1):
        spent = []
        for _ in range(times):
            began = time.thread_time()
            run()
            spent.append(time.thread_time() - began)
    return min(spent[1:])
