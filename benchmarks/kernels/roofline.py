"""What neither arithmetic nor memory can beat: multiply-adds a second, and the speed of copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridpar.codegen.build import Session
from hybridpar.codegen.compile_pool import Builder, Request
from hybridpar.tvm_kernels.machine import Machine, this_machine
from hybridpar.tvm_kernels.measure import torch_threads
from hybridpar.tvm_kernels.schedules.geometry import axis
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, NormShape

_PEAK = Path(__file__).with_name("cpu_peak.py")
#: Sizes in bytes at which copying is timed.
_COPIED = (1 << 20, 6 << 20, 24 << 20, 64 << 20)

#: Bytes a second of memory, and float32 multiply-adds a second, of SXM modules.
_GPUS = {
    "NVIDIA A100-SXM4-80GB": (2.039e12, 9.75e12),
    "NVIDIA H100 80GB HBM3": (3.35e12, 33.5e12),
    "NVIDIA H200": (4.8e12, 33.5e12),
}

#: Bytes read and written in total, and bytes a second, by size.
Copies = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Speed:
    """What one thread of a CPU can do.

    Attributes:
        multiply_adds: Float32 multiply-adds a second.
        copies: Speed of copies, by size.
    """

    multiply_adds: float
    copies: Copies

    def floor_ms(self, multiply_adds: int, size: int, threads: int = 1) -> float:
        """The time that neither arithmetic nor memory can beat. Memory counts as one thread's speed times the threads.

        Operands come from memory, however small they are, as in a training step and where kernels are timed.
        """
        return 1e3 * max(multiply_adds / self.multiply_adds, size / self.copies[-1][1]) / threads


def measure_speed(builder: Builder, machine: Machine | None = None) -> Speed:
    """Time a loop of multiply-adds that needs no memory, and copies of several sizes, on one thread."""
    machine = machine or this_machine()
    chains = 12 if machine.registers >= 16 else 6
    built = builder.build(Request((_PEAK,), {"lanes": machine.lanes, "chains": chains}))
    peak = Session().load(built, keep=False)["peak"]
    memory = torch.zeros(machine.lanes * chains)
    count = 200_000
    seconds = _least(lambda: peak(memory.data_ptr(), count), 15)
    return Speed(count * chains * machine.lanes / seconds, measure_copies())


def measure_copies() -> Copies:
    """The speed of copies by one thread."""
    return tuple((size, size / _copied(size)) for size in _COPIED)


def multiply_adds(shape: ConvShape) -> int:
    """Multiplications with an element of the image, not with padding; the same in all three directions."""
    met = [
        sum(len(along.bounded(out)) for out in range(along.out))
        for along in (axis(shape, Direction.FORWARD, which) for which in (0, 1))
    ]
    return shape.batch * shape.channels * met[0] * met[1]


def gpu_floor_ms(name: str, shape: ConvShape, item: int) -> float | None:
    """What neither arithmetic nor memory of a GPU can beat, by its data sheet; None where that is not here."""
    if name not in _GPUS:
        return None
    bandwidth, per_second = _GPUS[name]
    return 1e3 * max(multiply_adds(shape) / per_second, shape.least_bytes * item / 4 / bandwidth)


def norm_floor_ms(shape: NormShape, copies: Copies, threads: int = 1) -> float:
    """Milliseconds of a norm's least passes over memory, forward and backward, at the speed of copies of that size.

    Forward reads the input twice, for the moments and to write the result: three passes over two tensors. Backward
    reads the input and a gradient twice, for two sums and to write the other gradient: five passes over three.
    """

    def speed(size: int) -> float:
        return next((rate for most, rate in copies if size <= most), copies[-1][1])

    return 1e3 * (3 * shape.bytes / speed(2 * shape.bytes) + 5 * shape.bytes / speed(3 * shape.bytes)) / threads


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
