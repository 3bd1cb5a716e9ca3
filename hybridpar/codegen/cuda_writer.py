"""`CudaWriter` writes kernels of TIR for GPUs, statement by statement, as CUDA C that needs no header.

A `CudaWriter` writes kernels of TIR whose arguments are pointers in a given order, so that the generated CUDA C can be
launched by `hybridpar.codegen.cuda_driver` without TVM. Half precision is kept as 16-bit integers in memory and turned
into float32, in which everything is computed, by one instruction each (`PRELUDE`); so NVRTC needs no
cuda_fp16.h, which does not come with it.

This module imports no TVM: it is handed to it by `hybridpar.codegen.build`, in the process that compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybridpar.codegen.tir_writer import BaseWriter

#: What precedes the kernels. Rounding is to nearest even, and denormals and NaN are kept, as in torch's own casts.
PRELUDE = """\
typedef unsigned short ushort;
#ifdef __CUDACC__
__device__ __forceinline__ float hp_from_float16(ushort bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ ushort hp_to_float16(float value) {
  ushort bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ float hp_from_bfloat16(ushort bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ __forceinline__ ushort hp_to_bfloat16(float value) {
  ushort bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif
__device__ __forceinline__ int hp_given(const void* place) { return place != nullptr; }
__device__ __forceinline__ float hp_add_lanes(float value, int other) {
  return value + __shfl_xor_sync(0xFFFFFFFFu, value, other);
}
"""

#: Types of memory, by the name of the dtype.
STORED = {"float32": "float32", "bfloat16": "uint16", "float16": "uint16"}


class CudaWriter(BaseWriter):
    """Writes the statements of CUDA kernels into TIR."""

    def __init__(self, tvm: Any, target: Any) -> None:
        super().__init__(tvm)
        self._target = target

    def kernel(
        self,
        name: str,
        pointers: Mapping[str, str],
        grid: tuple[int, int, int],
        threads: int,
        body: Callable[..., None],
    ) -> Any:
        """Write one kernel."""
        t = self.t
        with self.tvm.script.ir_builder.IRBuilder() as builder:
            with t.prim_func():
                t.func_name(name)
                marks = {"global_symbol": name, "tirx.noalias": True, "target": self._target}
                t.func_attr({**marks, "calling_conv": 2, "tirx.is_global_func": True})  # a kernel, not its host side
                handles = {one: t.arg(one, t.handle(kind, "global")) for one, kind in pointers.items()}
                buffers = {
                    one: t.decl_buffer(((1 << 31) - 1,), kind, data=handles[one]) for one, kind in pointers.items()
                }
                with (
                    t.launch_thread("blockIdx.x", grid[0]) as x,
                    t.launch_thread("blockIdx.y", grid[1]) as y,
                    t.launch_thread("blockIdx.z", grid[2]) as z,
                    t.launch_thread("threadIdx.x", threads) as thread,
                ):
                    body(**buffers, handles=handles, block=(x, y, z), thread=thread)
        return builder.get()

    def shared(self, count: int, dtype: str) -> Any:
        """Allocate memory that the threads of a block share."""
        return self.t.alloc_buffer((count,), dtype, scope="shared")

    def sync(self) -> None:
        """Wait for all threads of the block."""
        self.t.evaluate(self.t.tvm_storage_sync("shared"))

    def lanes(self, unit: Any, lanes: int) -> Any:
        """Indices of the elements of one unit of a buffer."""
        return unit if lanes == 1 else self.t.ramp(unit * lanes, 1, lanes)

    def widened(self, dtype: str, stored: Any) -> Any:
        """A value of memory as float32."""
        return stored if dtype == "float32" else self.call("float32", f"hp_from_{dtype}", stored)

    def narrowed(self, dtype: str, value: Any) -> Any:
        """A float32 as memory has it."""
        return value if dtype == "float32" else self.call("uint16", f"hp_to_{dtype}", value)

    def zero(self, dtype: str, lanes: int = 1) -> Any:
        """Zeros as memory has them."""
        none = self.t.float32(0) if dtype == "float32" else self.t.uint16(0)
        return none if lanes == 1 else self.t.broadcast(none, lanes)

    def given(self, handle: Any) -> Any:
        """Whether a pointer is not null."""
        return self.call("int32", "hp_given", handle) != 0

    def add_lanes(self, value: Any, other: int) -> Any:
        """Add the value of another lane of the warp; all lanes take part."""
        return self.call("float32", "hp_add_lanes", value, other)

    def both(self, *conditions: Any) -> Any:
        """The conjunction of conditions; those that are True while compiling are left out."""
        result: Any = True
        for one in conditions:
            if one is not True:
                result = one if result is True else self.t.And(result, one)
        return result


def source_of(tvm: Any, functions: Mapping[str, Any], target: Any) -> str:
    """The CUDA C of some kernels."""
    passes = tvm.tirx.transform
    device = tvm.tirx.compilation_pipeline.PIPELINE_MAP["s_tir"]()[2]
    own = [passes.FlattenBuffer(), passes.StmtSimplify(), device()]
    module = tvm.ir.transform.Sequential(own)(tvm.IRModule(dict(functions)))
    text: str = tvm.get_global_func("target.build.cuda")(module, target).inspect_source("cuda")
    # TVM's own beginning includes headers of the toolkit, which NVRTC alone does not have. Vectors have 16 bytes at
    # most, so nothing in shared memory needs more than that.
    text = text[text.index('extern "C"') :].replace("__shared__ alignas(64)", "__shared__ __align__(16)")
    return PRELUDE + text
