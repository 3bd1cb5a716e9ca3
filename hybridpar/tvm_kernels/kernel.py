"""Kernels as machine code: phases, how far each counts, the scratch that a call needs, and making them from records.

A kernel for the CPU runs in phases, one after the other. Each is a function over a range that may be cut anywhere and
shared among threads, for example `prepare` over channels and then `rows` over strips of the image; the result is the
same bit for bit however it is cut. Functions take addresses and nothing is checked in them, so the caller has checked
that tensors are float32, dense in the kernel's layout, on the CPU and as large as the shape says. Any multiple of 4 is
an address; of the result only a multiple of 64 where the kernel writes past the caches, as torch allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridpar.codegen.build import Session, contents_of, kernel_path, session
from hybridpar.codegen.cache import KernelsUnavailable, first_line
from hybridpar.codegen.compile_pool import Built, Request
from hybridpar.errors import KernelError
from hybridpar.machine.process import available_cores
from hybridpar.tvm_kernels import shapes
from hybridpar.tvm_kernels.database import KernelRecord
from hybridpar.tvm_kernels.operation import Parameters, operation_of
from hybridpar.tvm_kernels.schedules import cpu_gather, cpu_weight, geometry
from hybridpar.tvm_kernels.shapes import ConvShape, Direction
from hybridpar.tvm_kernels.spread import run_ranges

_FLOAT = 4


@dataclass(frozen=True)
class Variant:
    """One way to compute one direction of one shape in channels_last.

    Attributes:
        shape: What is computed.
        direction: Which of the three; weights are always contiguous (C, 1, KH, KW).
        parameters: By name, as `hybridpar.tvm_kernels.space` describes them.
    """

    shape: ConvShape
    direction: Direction
    parameters: Parameters

    @property
    def _schedule(self) -> Any:
        return cpu_weight if self.direction is Direction.WEIGHT_GRADIENT else cpu_gather

    @property
    def arguments(self) -> dict[str, Any]:
        """What `define` in the schedule's file takes."""
        told = {"shape": self.shape.text, "direction": str(self.direction)}
        return {**told, "parameters": dict(sorted(self.parameters.items()))}

    @property
    def request(self) -> Request:
        """What compiles it."""
        return Request((Path(self._schedule.__file__),), self.arguments)

    @property
    def path(self) -> Path:
        """The cache file of its object file."""
        sources = [self._schedule.__file__, geometry.__file__, shapes.__file__]
        return kernel_path("depthwise", [Path(one) for one in sources], **self.arguments)

    @property
    def phases(self) -> tuple[tuple[str, int], ...]:
        """Functions in the order in which they run, and how far each counts."""
        return tuple(self._schedule.work(self.shape, self.direction, self.parameters)[0].items())

    @property
    def align_out(self) -> int:
        """What the address of the result must be a multiple of."""
        return 64 if self.parameters.get("stream") else _FLOAT

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that a call needs, for all threads together; what they hold before and after is not used."""
        return _FLOAT * int(self._schedule.work(self.shape, self.direction, self.parameters)[1])


#: Small phases, beside the one that reads images: they turn the weights, or add up partial sums. With up to so many
#: bytes of scratch memory they take 10 to 30 us, and starting threads takes 40 to 70.
_ON_SCRATCH, _MOST_ALONE = ("prepare", "merge"), 256 << 10

#: A function of a kernel takes the addresses of first, second, third, out and scratch, then begin and end of a range,
#: and releases the GIL; with how far the range goes that must be computed before the next function.
Phase = tuple[Callable[..., Any], int]


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """A compiled kernel of one record. It checks nothing: what it is given must be dense, float32 and aligned.

    Attributes:
        phases: What is computed, in order.
        scratch_bytes: Memory that it needs meanwhile.
        align: What all addresses are multiples of.
        threads: On how many threads it runs.
        align_out: What the address of the result is a multiple of; else the process would be killed.
        alone: Places of the phases that the calling thread computes by itself, as they take less time than it takes to
            start threads.
    """

    phases: Sequence[Phase]
    scratch_bytes: int
    align: int
    threads: int
    align_out: int = 4
    alone: frozenset[int] = frozenset()

    def takes(self, *tensors: Tensor) -> bool:
        """Whether the addresses are aligned as they must be."""
        for tensor in tensors:  # noqa: SIM110 - a generator costs more than all the rest
            if tensor.data_ptr() % self.align:
                return False
        return True

    def __call__(self, first: Tensor, second: Tensor, third: Tensor | None, out: Tensor) -> None:
        """Run the kernel."""
        if out.data_ptr() % self.align_out:
            raise KernelError(
                f"a result at address {out.data_ptr():#x}",
                f"This kernel writes whole cache lines, so its result is aligned to {self.align_out} bytes.",
                "Use torch's own allocator, or set HYBRIDPAR_KERNELS=off.",
            )
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8) if self.scratch_bytes else None
        places = (
            first.data_ptr(),
            second.data_ptr(),
            0 if third is None else third.data_ptr(),
            out.data_ptr(),
            0 if scratch is None else scratch.data_ptr(),
        )
        for place, (function, count) in enumerate(self.phases):
            if self.threads == 1 or place in self.alone:
                function(*places, 0, count)
            else:
                run_ranges(partial(function, *places), count, self.threads)


def load_image(variant: Variant, built: Built, into: Session | None = None, threads: int = 1) -> TunedKernel:
    """The kernel in an object file."""
    functions = session().load(built) if into is None else into.load(built, keep=False)
    phases = tuple((functions[name], count) for name, count in variant.phases)
    small = variant.scratch_bytes <= _MOST_ALONE
    alone = frozenset(place for place, (name, _) in enumerate(variant.phases) if small and name in _ON_SCRATCH)
    return TunedKernel(phases, variant.scratch_bytes, _FLOAT, threads, variant.align_out, alone)


def make_kernels(records: Sequence[KernelRecord]) -> list[Any]:
    """The kernels of some records, together: what is not in the cache of this machine is built."""
    built: dict[int, Built | KernelsUnavailable] = {}
    variants: dict[int, Any] = {}
    for index, record in enumerate(records):
        try:
            if reason := record.rejected:
                raise KernelsUnavailable(reason)
            variants[index] = operation_of(record.key).variant(record.key, record.parameters)
        except KernelsUnavailable as error:
            built[index] = error
    try:
        contents = contents_of(
            [one.path for one in variants.values()],
            [one.request for one in variants.values()],
            len(available_cores()),
        )
    except (KernelsUnavailable, OSError) as error:
        contents = [KernelsUnavailable(str(error)) for _ in variants]
    built |= zip(variants, contents, strict=True)
    return [_loaded(record, built[index]) for index, record in enumerate(records)]


def _loaded(record: KernelRecord, built: Built | KernelsUnavailable) -> Any:
    if isinstance(built, KernelsUnavailable):
        return built
    try:
        kernel = operation_of(record.key).load(record.key, record.parameters, built, None)
    except (KernelsUnavailable, ImportError, RuntimeError, OSError, ValueError, AssertionError) as error:
        return KernelsUnavailable(first_line(error))
    return replace(kernel, align=record.align) if isinstance(kernel, TunedKernel) else kernel


class AnyKernel(Protocol):
    """A kernel for the CPU or a GPU, as the operation `depthwise_conv2d` runs it."""

    def takes(self, *tensors: Tensor) -> bool:
        """Whether the addresses are aligned as the kernel needs it."""
        ...

    def __call__(self, first: Tensor, second: Tensor, third: Tensor | None, out: Tensor) -> object:
        """Compute, as `TunedKernel` does it."""
        ...
