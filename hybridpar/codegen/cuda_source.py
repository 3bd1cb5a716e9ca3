"""Makes CUDA C that needs no header of functions that TVM scheduled, to be compiled by NVRTC and launched without TVM.

Half precision is 16-bit integers in memory; one instruction turns it into float32 or back (`PRELUDE`). So NVRTC needs
no cuda_fp16.h, which is not beside it. Kernels take pointers alone, in the order of their names.

This module imports no TVM: it is handed to it by `hybridpar.codegen.build`, in the process that compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What precedes the kernels. Rounding is to nearest even, and denormals and NaN are kept, as in torch's own casts.
PRELUDE = """\
typedef unsigned short ushort;
typedef unsigned int uint;
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
template <typename Value>
__device__ __forceinline__ Value hp_or_zero(const Value* values, int index) {
  return values == nullptr ? Value(0) : values[index];
}
"""

#: `calling_conv` of what runs on a GPU.
_KERNEL = 2


def source_of(tvm: Any, functions: Mapping[str, Any], target: Any) -> str:
    """The CUDA C of scheduled functions: a kernel `NAME_kernel`, and `NAME_kernel_1` for what runs after it."""
    lower, _, finish = tvm.tirx.get_tir_pipeline("s_tir")
    # Loops are unrolled by NVRTC, which takes less time than reading what TVM would write out.
    config = {"tirx.UnrollLoop": {"explicit_unroll": False}, "tirx.disable_cse_tir": True}
    with tvm.transform.PassContext(config=config):
        named = {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
        module = lower(tvm.tirx.transform.BindTarget(target)(tvm.IRModule(named)))
        kernels = {
            name: function
            for name, function in module.functions.items()
            if int(function.attrs.get("calling_conv", 0)) == _KERNEL
        }
        module = finish()(tvm.IRModule(kernels))
    text: str = tvm.get_global_func("target.build.cuda")(module, target).inspect_source("cuda")
    # TVM's own beginning includes headers of the toolkit, which NVRTC alone does not have. Vectors have 16 bytes at
    # most, so nothing in shared memory needs more than that.
    text = text[text.index('extern "C"') :].replace("__shared__ alignas(64)", "__shared__ __align__(16)")
    return PRELUDE + text
