"""Kernels as machine code: candidates for CPUs and GPUs, how one is loaded and called, and making them from records.

A kernel for the CPU runs in phases, one after the other. Each is a function over a range that may be cut anywhere and
shared among threads, for example `prepare` over channels and then `rows` over strips of the image; the result is the
same bit for bit however it is cut. Functions take addresses and nothing is checked in them, so the caller has checked
that tensors are of the kernel's dtype, dense in its layout, on the CPU and as large as the shape says. Any multiple of
an element's size is an address; of the result one of 64 where the kernel writes past the caches, as torch allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.codegen.build import Session, contents_of, kernel_path, session
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built, Request
from hybridpar.errors import KernelError, first_line
from hybridpar.machine.process import available_cores
from hybridpar.tvm_kernels import shapes
from hybridpar.tvm_kernels.cuda_kernel import CudaVariant
from hybridpar.tvm_kernels.database import KernelRecord
from hybridpar.tvm_kernels.machine import is_gpu
from hybridpar.tvm_kernels.schedules import geometry
from hybridpar.tvm_kernels.shapes import ITEM, KernelKey, Parameters
from hybridpar.tvm_kernels.space import reject, schedule_of
from hybridpar.tvm_kernels.spread import run_ranges

#: Small phases, beside the one that reads images: they turn the weights, or add up partial sums. With up to so many
#: bytes of scratch memory they take 10 to 30 us, and starting threads takes 40 to 70.
_ON_SCRATCH, _MOST_ALONE = ("prepare", "merge"), 256 << 10

#: A function of a kernel takes the addresses of first, second, third, out and scratch, then begin and end of a range,
#: and releases the GIL; with how far the range goes that must be computed before the next function, and on how many
#: threads.
Phase = tuple[Callable[..., Any], int, int]


@dataclass(frozen=True)
class Variant:
    """One way to compute a key on this CPU; weights are always contiguous (C, 1, KH, KW)."""

    key: KernelKey
    parameters: Parameters

    @property
    def arguments(self) -> dict[str, Any]:
        """What `define` in the schedule's file takes."""
        names = {"shape": self.key.shape.text, "direction": str(self.key.direction)}
        return {**names, "dtype": self.key.dtype, "parameters": dict(sorted(self.parameters.items()))}

    @property
    def request(self) -> Request:
        """What compiles it."""
        return Request((Path(schedule_of(self.key).__file__),), self.arguments)

    @property
    def path(self) -> Path:
        """The cache file of its object file."""
        sources = [Path(str(module.__file__)) for module in (schedule_of(self.key), geometry, shapes)]
        return kernel_path("depthwise", sources, **self.arguments)

    @property
    def work(self) -> tuple[dict[str, int], int]:
        """How far each function counts, in the order in which they run; and bytes of scratch memory."""
        work: tuple[dict[str, int], int] = schedule_of(self.key).work(self.key, self.parameters)
        return work

    def load(self, built: Built, into: Session | None = None) -> TunedKernel:
        """The kernel in an object file; a session is given for what a search loads, and None for what is to stay."""
        functions = session().load(built) if into is None else into.load(built, keep=False)
        ranges, scratch = self.work
        small = scratch <= _MOST_ALONE
        threads = {name: 1 if small and name in _ON_SCRATCH else self.key.threads for name in ranges}
        phases = tuple((functions[name], count, threads[name]) for name, count in ranges.items())
        item = ITEM[self.key.dtype]
        return TunedKernel(phases, scratch, item, geometry.LINE if self.parameters.get("stream") else item)


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """A compiled kernel for the CPU. It checks nothing: what it is given must be dense, of its dtype and aligned.

    Attributes:
        phases: What is computed, in order.
        scratch_bytes: Memory that a call needs meanwhile; what it holds before and after is not used.
        align: What the addresses of tensors are multiples of.
        align_out: What the address of the result is a multiple of; else the process would be killed.
    """

    phases: Sequence[Phase]
    scratch_bytes: int
    align: int = ITEM["float32"]
    align_out: int = ITEM["float32"]

    def takes(self, first: Tensor, second: Tensor) -> bool:
        """Whether the addresses are aligned as they must be."""
        return (first.data_ptr() | second.data_ptr()) % self.align == 0

    def __call__(self, first: Tensor, second: Tensor, third: Tensor | None, out: Tensor) -> None:
        """Run the kernel."""
        if out.data_ptr() % self.align_out:
            raise KernelError(
                f"a result at address {out.data_ptr():#x}",
                f"This kernel writes whole cache lines, so its result is aligned to {self.align_out} bytes.",
                "Use torch's own allocator, or set HYBRIDPAR_KERNELS=off.",
            )
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8) if self.scratch_bytes else None
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (first, second, third, out, scratch)]
        for function, count, threads in self.phases:
            if threads == 1:
                function(*addresses, 0, count)
            else:
                run_ranges(partial(function, *addresses), count, threads)


# ----------------------------------------------------------------------------------------------------- on either device


def variant_of(key: KernelKey, parameters: Parameters) -> Variant | CudaVariant:
    """A candidate: its request compiles it, its path is its file in the cache, and it loads what was built."""
    return CudaVariant(key, parameters) if is_gpu(key.device) else Variant(key, parameters)


def make_kernels(records: Sequence[KernelRecord]) -> list[Any]:
    """The kernels of some records, together, or why one cannot be had; what is not in the cache is built."""
    reasons = [reject(record.key, record.parameters) for record in records]
    allowed = [record for record, reason in zip(records, reasons, strict=True) if reason is None]
    variants = [variant_of(record.key, record.parameters) for record in allowed]
    contents: Sequence[Built | KernelsUnavailable]
    try:
        with Builder(len(available_cores())) as builder:
            contents = contents_of([(variant.path, variant.request) for variant in variants], builder)
    except (KernelsUnavailable, OSError) as error:
        contents = [KernelsUnavailable(str(error))] * len(variants)
    loaded = map(_loaded, variants, contents)
    return [next(loaded) if reason is None else KernelsUnavailable(reason) for reason in reasons]


def _loaded(variant: Variant | CudaVariant, built: Built | KernelsUnavailable) -> Any:
    if isinstance(built, KernelsUnavailable):
        return built
    try:
        return variant.load(built)
    except (KernelsUnavailable, ImportError, RuntimeError, OSError, ValueError, AssertionError) as error:
        return KernelsUnavailable(first_line(error))
