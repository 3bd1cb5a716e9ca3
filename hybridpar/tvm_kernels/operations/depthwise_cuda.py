"""Depthwise convolutions on a GPU, in float32, bfloat16 and float16, with sums in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hybridpar.codegen.build import Session
from hybridpar.codegen.compile_pool import Built
from hybridpar.codegen.cuda_driver import driver
from hybridpar.codegen.nvrtc import CONTRACTED, DRIVER, cubin
from hybridpar.tvm_kernels import cuda_kernel
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.cuda_kernel import CudaKernel, CudaVariant
from hybridpar.tvm_kernels.cuda_space import candidates, outside
from hybridpar.tvm_kernels.machine import gpu_of
from hybridpar.tvm_kernels.operation import KernelKey, Operation, Pace, Parameters, register_operation
from hybridpar.tvm_kernels.operations.depthwise import CONV_LIMITS, Depthwise
from hybridpar.tvm_kernels.schedules.cuda import ITEM, default, reject
from hybridpar.tvm_kernels.shapes import ConvShape, Direction


@register_operation
class DepthwiseCuda(Operation):
    """Kernels in CUDA C that TVM writes and NVRTC compiles."""

    name = Depthwise.name
    target = "cuda"
    shape = ConvShape
    limits: ClassVar[Mapping[str, float]] = CONV_LIMITS
    own_versions: ClassVar[Mapping[str, str]] = Depthwise.own_versions
    required = False
    pace = Pace(glance=0.05, longest=0.5, reserved=0.15, pairs=9)

    def without_kernels(self, key: KernelKey) -> str:
        """Why there are no kernels for a convolution or type."""
        return outside(key.shape, Direction(key.direction), key.dtype) or ""

    def reject(self, key: KernelKey, parameters: Parameters) -> str | None:
        """Why parameters make no kernel, or None."""
        return reject(key.shape, Direction(key.direction), key.layout, key.dtype, parameters)

    def space(self, key: KernelKey) -> list[dict[str, int]]:
        """Candidates that keep an SM busy."""
        return list(candidates(key.shape, Direction(key.direction), key.layout, key.dtype, gpu_of(key.device)))

    def default(self, key: KernelKey) -> Parameters:
        """What was the best most often."""
        return default(key.shape, Direction(key.direction), key.layout)

    def variant(self, key: KernelKey, parameters: Parameters) -> CudaVariant:
        """A candidate as something to compile."""
        return CudaVariant(key.shape, Direction(key.direction), key.layout, key.dtype, parameters)

    def load(self, key: KernelKey, parameters: Parameters, built: Built, session: Session | None) -> Any:
        """A `CudaKernel`, on the current device. What a search compiles is not cached, and must not spill registers."""
        variant, architecture = self.variant(key, parameters), key.device.rpartition(" ")[2]
        if session is not None:
            return cuda_kernel.load_cubin(variant, cuda_kernel.compile_unspilled(built.image, architecture), _current())
        kernel = CudaKernel(
            variant, lambda at: driver(DRIVER).load(cubin("depthwise", built.image, architecture, CONTRACTED), at)
        )
        kernel.prepare(_current())
        return kernel

    def bench(self, key: KernelKey, seed: int) -> ConvBench:
        """Random images, weights and gradients on the current device."""
        what = key.shape, key.direction, key.layout
        return ConvBench(*what, 1, seed, key.dtype, torch.device("cuda", _current()))

    def weight(self, key: KernelKey) -> float:
        """What is read and written."""
        return float(key.shape.least_bytes * ITEM[key.dtype])


def _current() -> int:
    return torch.cuda.current_device()
