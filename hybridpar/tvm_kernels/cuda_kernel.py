"""Why: a kernel for a GPU is a source text that TVM wrote, machine code that NVRTC made of it, and a launch.

Source and machine code need no GPU; only loading does. Both are cached (`hybridpar.codegen.cache`), so a process that
finds them starts neither TVM nor NVRTC.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridpar.codegen.build import contents_of, kernel_paths, parted
from hybridpar.codegen.cache import KernelsUnavailable, cache_path, cached
from hybridpar.codegen.compile_pool import Request
from hybridpar.codegen.cuda_driver import CudaFunction, CudaModule, driver
from hybridpar.codegen.nvrtc import CONTRACTED, DRIVER, compiler
from hybridpar.tvm_kernels.families import Parameters
from hybridpar.tvm_kernels.schedules.cuda_tile import Tile
from hybridpar.tvm_kernels.schedules.cuda_weight import MERGE_PARTS, MERGE_THREADS
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

_SCHEDULES = Path(__file__).with_name("schedules")
_IMPORTED = (
    *(_SCHEDULES / name for name in ("geometry.py", "cuda_tile.py", "cuda_load.py")),
    *(Path(__file__).with_name("shapes.py"), Path(__file__).parents[1] / "codegen/cuda_writer.py"),
)

#: What each kernel is launched with: pointers alone.
POINTERS = {"rows": "PPPP", "merge": "PP"}
_PTXAS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores")

Launch = tuple[str, tuple[int, int, int], tuple[int, int, int]]


@dataclass(frozen=True)
class CudaVariant:
    """One way to compute one direction of one shape on a GPU.

    Attributes:
        shape: What is computed.
        direction: Which of the three.
        layout: Of input, output and their gradients; weights are always contiguous (C, 1, KH, KW).
        dtype: Of all tensors: float32, bfloat16 or float16.
        parameters: How; which ones there are is told by `hybridpar.tvm_kernels.cuda_space`.
    """

    shape: ConvShape
    direction: Direction
    layout: Layout
    dtype: str
    parameters: Parameters

    @cached_property
    def tile(self) -> Tile:
        """What a block computes."""
        return Tile(self.shape, self.direction, self.layout, self.dtype, dict(self.parameters))

    @property
    def source(self) -> Path:
        """The schedule's file."""
        return _SCHEDULES / ("cuda_weight.py" if self.tile.weight else "cuda_gather.py")

    @property
    def arguments(self) -> dict[str, Any]:
        """What `define` in the schedule's file takes."""
        told = {"shape": self.shape.text, "direction": str(self.direction), "layout": str(self.layout)}
        return {**told, "dtype": self.dtype, "parameters": dict(sorted(self.parameters.items()))}

    @property
    def request(self) -> Request:
        """What writes its source."""
        return Request((self.source,), self.arguments, target="cuda")

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Kernels in the order in which they run, each with its blocks and threads."""
        tile = self.tile
        rows: Launch = ("rows", tile.grid, (tile.threads, 1, 1))
        if not tile.weight:
            return (rows,)
        merged = -(-self.shape.channels * tile.taps // MERGE_THREADS)
        return (rows, ("merge", (merged, 1, 1), (MERGE_THREADS * MERGE_PARTS, 1, 1)))


@dataclass(frozen=True)
class Compiled:
    """Machine code of one source.

    Attributes:
        code: A cubin.
        registers: Of a thread, the most of its kernels; None where the compiler did not say.
        spilled: Bytes that a thread keeps in memory for want of registers; None where the compiler did not say.
    """

    code: bytes
    registers: int | None
    spilled: int | None


def sources_of(variants: Sequence[CudaVariant], workers: int = 1) -> list[str | KernelsUnavailable]:
    """CUDA C of variants, from the cache; those that are not there yet are written together.

    Returns:
        For each variant its source, or why there is none.
    """
    try:
        paths = [
            kernel_paths("depthwise-cuda", (variant.source, *_IMPORTED), [variant.arguments])[0] for variant in variants
        ]
        contents = contents_of(paths, [variant.request for variant in variants], workers)
    except (KernelsUnavailable, OSError) as error:
        return [KernelsUnavailable(str(error)) for _ in variants]
    return [one if isinstance(one, KernelsUnavailable) else parted(one)[1].decode() for one in contents]


def compile_source(text: str, architecture: str) -> Compiled:
    """Machine code, by the compiler and not from the cache.

    Args:
        text: CUDA C.
        architecture: As in `sm_90`.

    Raises:
        KernelsUnavailable: There is no compiler, or it reports an error.
    """
    _, run = compiler(CONTRACTED)
    with tempfile.TemporaryDirectory(prefix="hybridpar-") as aside:
        code, log = run(text.encode(), architecture, Path(aside))
    registers, spills = ([int(one) for one in found.findall(log)] for found in (_PTXAS, _SPILLS))
    return Compiled(code, max(registers, default=None), max(spills, default=None))


def cubin_of(text: str, architecture: str) -> bytes:
    """Machine code of a source, from the cache if it is there.

    Args:
        text: CUDA C.
        architecture: As in `sm_90`.

    Raises:
        KernelsUnavailable: There is no compiler, or it reports an error, or the cache cannot be used.
    """
    version, run = compiler(CONTRACTED)
    made_from = {
        "source": hashlib.sha256(text.encode()).hexdigest(),
        "options": CONTRACTED,
        "compiler": version,
        "architecture": architecture,
    }
    path = cache_path("depthwise", made_from, ".cubin")
    return cached(path, lambda directory: run(text.encode(), architecture, directory)[0])


class CudaKernel:
    """A variant that is loaded on a device. Calling it puts it on torch's current stream.

    Args:
        variant: What it computes, and how.
        module: Its machine code, loaded.
    """

    def __init__(self, variant: CudaVariant, module: CudaModule) -> None:
        self.variant = variant
        self.scratch_bytes = variant.tile.scratch_bytes
        self._module = module
        self._steps: list[tuple[CudaFunction, tuple[int, int, int], tuple[int, int, int]]] = [
            (module.function(name, POINTERS[name]), grid, block) for name, grid, block in variant.launches
        ]

    def __call__(self, first: int, second: int, third: int, out: int, scratch: int) -> None:
        """Launch.

        Args:
            first: Address of the input, or for the input gradient of the output's gradient.
            second: Address of the weights, or for the weight gradient of the output's gradient.
            third: Address of the bias in the forward direction, or 0; else 0.
            out: Address of what is computed.
            scratch: Address of `scratch_bytes` bytes, which nothing else uses meanwhile on the device.

        Raises:
            CudaError: The driver refuses.
        """
        function, grid, block = self._steps[0]
        if len(self._steps) == 1:
            function(grid, block, first, second, third, out)
            return
        function(grid, block, first, second, third, scratch)
        function, grid, block = self._steps[1]
        function(grid, block, scratch, out)


def load_cubin(variant: CudaVariant, code: bytes, index: int) -> CudaKernel:
    """A variant on a device.

    Args:
        variant: What was compiled.
        code: For the device's architecture.
        index: Of the device, by torch's number.

    Raises:
        CudaError: The driver refuses it.
        OSError: There is no driver.
    """
    return CudaKernel(variant, driver(DRIVER).load(code, index))
