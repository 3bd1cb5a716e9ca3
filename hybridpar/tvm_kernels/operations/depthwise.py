"""Depthwise convolutions on the CPU, in three directions: forward, and the gradients of input and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hybridpar.codegen.build import Session
from hybridpar.codegen.compile_pool import Builder, Built
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.families import candidates, estimate, reject
from hybridpar.tvm_kernels.kernel import Variant, load_image
from hybridpar.tvm_kernels.machine import Speed, measure_speed, this_machine
from hybridpar.tvm_kernels.operation import KernelKey, Operation, Parameters, register_operation
from hybridpar.tvm_kernels.record import KernelRecord
from hybridpar.tvm_kernels.shapes import ConvShape, Direction

#: What one thread of a common CPU does, in multiply-adds and bytes a second: only proportions count here.
_MULTIPLY_ADDS, _BYTES = 40e9, 12e9

#: Sums over taps, and over whole images.
CONV_LIMITS: Mapping[str, float] = {
    Direction.FORWARD: 1e-5,
    Direction.INPUT_GRADIENT: 1e-5,
    Direction.WEIGHT_GRADIENT: 1e-4,
}


@register_operation
class Depthwise(Operation):
    """Kernels that TVM compiles for this CPU."""

    name = "depthwise_conv2d"
    shape = ConvShape
    limits: ClassVar[Mapping[str, float]] = CONV_LIMITS
    record = KernelRecord
    own_versions: ClassVar[Mapping[str, str]] = {"schedules": "2"}

    def covers(self, key: KernelKey) -> bool:
        """Whether there is any candidate."""
        return next(candidates(*_what(key), key.threads, this_machine()), None) is not None

    def reject(self, key: KernelKey, parameters: Parameters) -> str | None:
        """Why parameters make no kernel, or None."""
        return reject(key.shape, Direction(key.direction), key.layout, parameters)

    def space(self, key: KernelKey, parts: Sequence[Parameters]) -> list[tuple[dict[str, int], float]]:
        """Candidates, each with its cycles."""
        shape, direction, layout, threads, machine = *_what(key), key.threads, this_machine()
        return [
            (one, estimate(shape, direction, one, threads, machine, layout).cycles)
            for one in candidates(shape, direction, layout, threads, machine)
        ]

    def variant(self, key: KernelKey, parameters: Parameters) -> Variant:
        """A candidate as something to compile."""
        return Variant(*_what(key), parameters)

    def load(self, key: KernelKey, parameters: Parameters, built: Built, session: Session | None) -> Any:
        """A `TunedKernel`."""
        return load_image(self.variant(key, parameters), built, session, key.threads)

    def bench(self, key: KernelKey, seed: int, parts: Sequence[Any]) -> ConvBench:
        """Random images, weights and gradients."""
        return ConvBench(*_what(key), key.threads, seed)

    def measure_speed(self, builder: Builder) -> Any:
        """Multiply-adds and bytes a second."""
        return measure_speed(builder)

    def floor_ms(self, key: KernelKey, speed: Speed) -> float | None:
        """What neither arithmetic nor copying the operands once can beat."""
        return speed.floor_ms(key.shape.multiply_adds, key.shape.least_bytes, key.threads)

    def weight(self, key: KernelKey) -> float:
        """A floor in milliseconds, of a common CPU."""
        floors = key.shape.multiply_adds / _MULTIPLY_ADDS, key.shape.least_bytes / _BYTES
        return 1e3 * float(max(floors)) / key.threads


def _what(key: KernelKey) -> tuple[ConvShape, Direction, Any]:
    return key.shape, Direction(key.direction), key.layout
