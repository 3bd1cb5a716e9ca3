"""Depthwise convolutions on the CPU, in three directions: forward, and the gradients of input and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hybridpar.codegen.build import Session
from hybridpar.codegen.compile_pool import Built
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.kernel import Variant, load_image
from hybridpar.tvm_kernels.machine import this_machine
from hybridpar.tvm_kernels.operation import KernelKey, Operation, Parameters, register_operation
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.space import candidates, outside, reject

#: Sums over taps, and over whole images.
CONV_LIMITS: Mapping[str, float] = {
    Direction.FORWARD: 1e-5,
    Direction.INPUT_GRADIENT: 1e-5,
    Direction.WEIGHT_GRADIENT: 1e-4,
}


@register_operation
class Depthwise(Operation):
    """Kernels that TVM compiles for this CPU, for images in channels_last."""

    name = "depthwise_conv2d"
    shape = ConvShape
    limits: ClassVar[Mapping[str, float]] = CONV_LIMITS
    own_versions: ClassVar[Mapping[str, str]] = {"schedules": "2"}

    def without_kernels(self, key: KernelKey) -> str:
        """Why there are no kernels for a layout or convolution."""
        if key.layout is not Layout.CHANNELS_LAST:
            return "there are kernels for channels_last alone"
        return outside(key.shape, Direction(key.direction)) or ""

    def reject(self, key: KernelKey, parameters: Parameters) -> str | None:
        """Why parameters make no kernel, or None."""
        return reject(key.shape, Direction(key.direction), key.layout, parameters)

    def space(self, key: KernelKey) -> list[dict[str, int]]:
        """Candidates for this CPU."""
        if self.without_kernels(key):
            return []
        return list(candidates(key.shape, Direction(key.direction), key.threads, this_machine()))

    def default(self, key: KernelKey) -> Parameters:
        """What is good on many CPUs."""
        if key.direction == Direction.WEIGHT_GRADIENT:
            return {"lanes": 16, "tap_rows": key.shape.kernel[0], "tile_columns": 4, "strip": 4, "sweep": 1}
        return {"lanes": 16, "tile_rows": 1, "tile_columns": 4, "strip": 4, "unroll": 1, "sweep": 1}

    def variant(self, key: KernelKey, parameters: Parameters) -> Variant:
        """A candidate as something to compile."""
        return Variant(key.shape, Direction(key.direction), parameters)

    def load(self, key: KernelKey, parameters: Parameters, built: Built, session: Session | None) -> Any:
        """A `TunedKernel`."""
        return load_image(self.variant(key, parameters), built, session, key.threads)

    def bench(self, key: KernelKey, seed: int) -> ConvBench:
        """Random images, weights and gradients."""
        return ConvBench(key.shape, key.direction, key.layout, key.threads, seed)

    def weight(self, key: KernelKey) -> float:
        """What is read and written, by each thread."""
        return float(key.shape.least_bytes) / key.threads
