"""Kernels for a GPU: a source text that TVM wrote, machine code that NVRTC made of it, and a launch.

Source and machine code need no GPU; only loading does. Both are cached (`hybridpar.codegen.cache`), so a process that
finds them starts neither TVM nor NVRTC. A kernel is loaded on a device when it is first called there, since a process
uses one GPU of many and loading takes memory of it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.codegen.build import Session, kernel_path
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Built, Request
from hybridpar.codegen.cuda_driver import CudaFunction, CudaModule, driver
from hybridpar.codegen.nvrtc import CONTRACTED, DRIVER, compiler, cubin
from hybridpar.tvm_kernels.schedules.cuda import Tile, Tiling
from hybridpar.tvm_kernels.shapes import ITEM, Direction, KernelKey, Parameters

_SCHEDULE = Path(__file__).with_name("schedules") / "cuda.py"
_SOURCES = (_SCHEDULE, Path(__file__).with_name("shapes.py"), Path(__file__).parents[1] / "codegen/cuda_source.py")

_SPILLS = re.compile(r"(\d+) bytes spill stores")

_Step = tuple[CudaFunction, tuple[int, int, int], tuple[int, int, int]]


@dataclass(frozen=True)
class CudaVariant:
    """One way to compute a key on a GPU; weights are always contiguous (C, 1, KH, KW)."""

    key: KernelKey
    parameters: Parameters

    @cached_property
    def tiling(self) -> Tiling:
        """What a block computes, and the sizes that follow."""
        return Tiling(self.key, Tile(**self.parameters))

    @property
    def arguments(self) -> dict[str, Any]:
        """What `define` in the schedule's file takes."""
        key = self.key
        names = {"shape": key.shape.text, "direction": str(key.direction), "layout": str(key.layout)}
        return {**names, "dtype": key.dtype, "parameters": dict(sorted(self.parameters.items()))}

    @property
    def request(self) -> Request:
        """What writes its source."""
        return Request((_SCHEDULE,), self.arguments, target="cuda")

    @property
    def path(self) -> Path:
        """The cache file of its source."""
        return kernel_path("depthwise-cuda", _SOURCES, **self.arguments)

    def load(self, built: Built, into: Session | None = None) -> CudaKernel:
        """The kernel in a source, on the current device; what a search compiles is not cached, and must not spill."""
        architecture = self.key.device.rpartition(" ")[2]
        if into is None:
            code = cubin("depthwise", built.image, architecture, CONTRACTED)
        else:
            code = compile_unspilled(built.image, architecture)
        return load_cubin(self, code, torch.cuda.current_device())


def compile_unspilled(source: bytes, architecture: str) -> bytes:
    """Compile a source without looking into the cache; no thread may keep values in memory for want of registers."""
    _, run = compiler(CONTRACTED)
    code, log = run(source, architecture)
    spilled = max(map(int, _SPILLS.findall(log)), default=0)
    if spilled:
        raise KernelsUnavailable(f"a thread would keep {spilled} bytes in memory for want of registers")
    return code


class CudaKernel:
    """A variant that can be called. It checks nothing: tensors must be dense, of its dtype, aligned, on one GPU."""

    def __init__(self, variant: CudaVariant, load: Callable[[int], CudaModule]) -> None:
        self.variant = variant
        self.scratch_bytes = variant.tiling.scratch_bytes
        #: What all addresses are multiples of.
        self.align = variant.tiling.tile.vector * ITEM[variant.key.dtype]
        self._load = load
        self._loaded: dict[int, list[_Step]] = {}
        self._loading = threading.Lock()

    def takes(self, *tensors: Tensor) -> bool:
        """Whether the addresses are aligned as they must be."""
        return all(tensor.data_ptr() % self.align == 0 for tensor in tensors)

    def prepare(self, index: int) -> None:
        """Load it on a device."""
        with self._loading:
            if index not in self._loaded:
                try:
                    module = self._load(index)
                    self._loaded[index] = [
                        (module.function(name, "P" * pointers), grid, block)
                        for name, pointers, grid, block in self.variant.tiling.launches
                    ]
                except (RuntimeError, OSError) as error:
                    raise KernelsUnavailable(str(error)) from None

    def __call__(self, first: Tensor, second: Tensor, third: Tensor | None, out: Tensor) -> None:
        """Compute, on torch's current stream."""
        index = out.device.index or 0
        if index not in self._loaded:
            self.prepare(index)
        (function, grid, block), *merge = self._loaded[index]
        operands = [first.data_ptr(), second.data_ptr()]
        if self.variant.key.direction is Direction.FORWARD:
            operands.append(0 if third is None else third.data_ptr())
        # Freed while it is still in use on the stream, and given out again only to what comes later on it.
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=out.device) if self.scratch_bytes else out
        function(grid, block, *operands, scratch.data_ptr())
        for function, grid, block in merge:
            function(grid, block, out.data_ptr(), scratch.data_ptr())


def load_cubin(variant: CudaVariant, code: bytes, index: int) -> CudaKernel:
    """Load a variant's machine code on a device."""
    kernel = CudaKernel(variant, lambda device: driver(DRIVER).load(code, device))
    kernel.prepare(index)
    return kernel
