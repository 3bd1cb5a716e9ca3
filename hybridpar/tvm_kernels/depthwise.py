"""Depthwise convolutions on the CPU, in float32 and channels_last, and on GPUs, with sums in float32."""

from __future__ import annotations

from typing import Any

import torch

from hybridpar.codegen.build import Session
from hybridpar.codegen.compile_pool import Built
from hybridpar.codegen.cuda_driver import driver
from hybridpar.codegen.nvrtc import CONTRACTED, DRIVER, cubin
from hybridpar.tvm_kernels import cuda_kernel, cuda_space, space
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.cuda_kernel import CudaKernel, CudaVariant
from hybridpar.tvm_kernels.kernel import Variant, load_image
from hybridpar.tvm_kernels.machine import gpu_of, this_machine
from hybridpar.tvm_kernels.operation import KernelKey, Operation, Pace, Parameters
from hybridpar.tvm_kernels.schedules import cuda
from hybridpar.tvm_kernels.shapes import Direction, Layout


class OnCpu(Operation):
    """Kernels that TVM compiles for this CPU, for images in channels_last."""

    pace = Pace(glance=0.12, longest=1.5, pairs=5)

    def without_kernels(self, key: KernelKey) -> str:
        """Why there are no kernels for a layout or convolution."""
        if key.layout is not Layout.CHANNELS_LAST:
            return "there are kernels for channels_last alone"
        return space.outside(key.shape, key.direction) or ""

    def reject(self, key: KernelKey, parameters: Parameters) -> str | None:
        """Why parameters make no kernel, or None."""
        return space.reject(key.shape, key.direction, key.layout, parameters)

    def space(self, key: KernelKey) -> list[dict[str, int]]:
        """Candidates for this CPU."""
        if self.without_kernels(key):
            return []
        return list(space.candidates(key.shape, key.direction, key.threads, this_machine()))

    def default(self, key: KernelKey) -> Parameters:
        """What is good on many CPUs."""
        if key.direction is Direction.WEIGHT_GRADIENT:
            return {"lanes": 16, "tap_rows": key.shape.kernel[0], "tile_columns": 4, "strip": 4, "sweep": 1}
        return {"lanes": 16, "tile_rows": 1, "tile_columns": 4, "strip": 4, "unroll": 1, "sweep": 1}

    def variant(self, key: KernelKey, parameters: Parameters) -> Variant:
        """A candidate as something to compile."""
        return Variant(key.shape, key.direction, parameters)

    def load(self, key: KernelKey, parameters: Parameters, built: Built, session: Session | None) -> Any:
        """A `TunedKernel`."""
        return load_image(self.variant(key, parameters), built, session, key.threads)

    def bench(self, key: KernelKey, seed: int) -> ConvBench:
        """Random images, weights and gradients."""
        return ConvBench(key.shape, key.direction, key.layout, key.threads, seed)

    def weight(self, key: KernelKey) -> float:
        """What is read and written, by each thread."""
        return float(key.shape.least_bytes) / key.threads


class OnGpu(Operation):
    """Kernels in CUDA C that TVM writes and NVRTC compiles."""

    pace = Pace(glance=0.05, longest=0.5, pairs=9)

    def without_kernels(self, key: KernelKey) -> str:
        """Why there are no kernels for a convolution or type."""
        return cuda_space.outside(key.shape, key.direction, key.dtype) or ""

    def reject(self, key: KernelKey, parameters: Parameters) -> str | None:
        """Why parameters make no kernel, or None."""
        outside = cuda_space.outside(key.shape, key.direction, key.dtype)
        return outside or cuda.reject(key.shape, key.direction, key.layout, key.dtype, parameters)

    def space(self, key: KernelKey) -> list[dict[str, int]]:
        """Candidates that keep an SM busy."""
        gpu = gpu_of(key.device)
        return list(cuda_space.candidates(key.shape, key.direction, key.layout, key.dtype, gpu))

    def default(self, key: KernelKey) -> Parameters:
        """What was the best most often."""
        return cuda.default(key.shape, key.direction, key.layout)

    def variant(self, key: KernelKey, parameters: Parameters) -> CudaVariant:
        """A candidate as something to compile."""
        return CudaVariant(key.shape, key.direction, key.layout, key.dtype, parameters)

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
        return float(key.shape.least_bytes * cuda.ITEM[key.dtype])


def _current() -> int:
    return torch.cuda.current_device()


#: By whether the device is a GPU.
OPERATIONS: dict[bool, Operation] = {False: OnCpu(), True: OnGpu()}
