"""A depthwise convolution that also sums up its result for the BatchNorm behind it, on the CPU; the forward of both.

Together is a kernel that leaves the moments of its result and a norm that takes them; apart are the two kernels that
were found for each alone, which must both have beaten torch. The backward is the same either way, and is left out. A
convolution whose result is read again at once does better to leave it in the caches than one whose result is not, so
the kernel that was found for it is tried with its results in the caches and past them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from hybridpar.codegen.build import Session
from hybridpar.codegen.compile_pool import Built
from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.families import reject
from hybridpar.tvm_kernels.kernel import MomentsVariant, TunedKernel, load_image
from hybridpar.tvm_kernels.machine import turns
from hybridpar.tvm_kernels.measure import Bench, Call, Rotation
from hybridpar.tvm_kernels.moments import moments_in
from hybridpar.tvm_kernels.operation import KernelKey, Operation, Pace, Parameters, register_operation
from hybridpar.tvm_kernels.operations.batch_norm import EPS, TURNS, BatchNormAct, norm_key
from hybridpar.tvm_kernels.operations.depthwise import Depthwise
from hybridpar.tvm_kernels.record import Record, is_right, shape_text
from hybridpar.tvm_kernels.shapes import ConvNormShape, ConvShape, Direction, Layout

#: The operation's name, and what stands where a convolution has its direction.
CONV_NORM_OP: Literal["depthwise_batch_norm_act"] = "depthwise_batch_norm_act"


def conv_norm_key(shape: ConvNormShape, threads: int, device: str) -> KernelKey:
    """The key of a convolution and the norm behind it, float32 in channels_last.

    Args:
        shape: Convolution and activation.
        threads: Threads that compute it.
        device: Fingerprint of the device.

    Returns:
        The key.
    """
    return KernelKey(CONV_NORM_OP, shape, Layout.CHANNELS_LAST, threads, device, op=CONV_NORM_OP)


class ConvNormRecord(Record):
    """One measurement of the forward of both; its error is that of the moments, see `moments_error`."""

    op: str = CONV_NORM_OP
    shape: str = Field(description="of the convolution, as `ConvShape.text` has it")
    activation: Literal["none", "relu", "relu6", "silu"]
    layout: Layout = Layout.CHANNELS_LAST
    parameters: dict[str, int | float | str | bool | None] = Field(description="of the convolution's schedule")
    stock_ms: float | None = Field(gt=0, alias="apart_ms", description="of both kernels apart, one after the other")

    @field_validator("shape")
    @classmethod
    def _is_a_shape(cls, text: str) -> str:
        return shape_text(ConvShape, text)

    def what(self) -> tuple[str, Any]:
        """Direction and shape of what was computed."""
        return CONV_NORM_OP, ConvNormShape(ConvShape.parse(self.shape), self.activation)


class ConvNormBench(Bench):
    """Data of a convolution and the norm behind it.

    Args:
        shape: The two.
        alone: The kernel of the convolution alone.
        seed: Of the data.
    """

    def __init__(self, shape: ConvNormShape, alone: TunedKernel, seed: int = 0) -> None:
        one = shape.convolution
        self.shape, self.alone, self.seed, self.threads = shape, alone, seed, alone.threads
        draw = torch.Generator().manual_seed(seed)
        image = torch.randn((one.batch, one.channels, one.height, one.width), generator=draw)
        sets = turns(4 * image.numel(), TURNS)
        # The same values at other places: drawing them takes longer than what is measured.
        self._inputs = [image.clone(memory_format=torch.channels_last) for _ in range(sets)]
        self._rotation = Rotation(sets)
        self._weight = torch.randn((one.channels, 1, *one.kernel), generator=draw)
        sizes = (one.batch, one.channels, one.out_height, one.out_width)
        self._like = torch.empty(sizes, memory_format=torch.channels_last)
        self._parameters = torch.ones(one.channels), torch.zeros(one.channels)
        self._running = torch.zeros(one.channels), torch.ones(one.channels)

    @property
    def instead(self) -> Call:
        """With a norm that finds the moments itself."""
        return self._apart

    def _apart(self) -> Tensor:
        return self._rotation.compute(lambda place: self._normed(self.convolved(self.alone, place)[0], None))

    def run(self, kernel: TunedKernel) -> Tensor:
        """Forward of both, with a convolution that leaves the moments of its result."""

        def call(place: int) -> Tensor:
            y, scratch = self.convolved(kernel, place)
            return self._normed(y, moments_in(scratch, y.shape[1]))

        return self._rotation.compute(call)

    def convolved(self, kernel: TunedKernel, place: int = 0) -> tuple[Tensor, Tensor | None]:
        """Run a convolution.

        Args:
            kernel: Computes the convolution.
            place: Of its image among those that take turns.

        Returns:
            Its result, (N, C, OH, OW), and its scratch memory; None where it has none.
        """
        y = torch.empty_like(self._like)
        return y, kernel(self._inputs[place], self._weight, None, y)

    def _normed(self, y: Tensor, moments: Tensor | None) -> Tensor:
        given = (y, *self._parameters, *self._running, True, 0.1, EPS, self.shape.act)
        return norm_kernels.forward(*given, moments)[0]

    def errors(self, kernel: TunedKernel) -> tuple[float, float]:
        """Errors of the moments, as `moments_error` defines them."""
        error, stock_error = self._check.errors(kernel)
        if not is_right(error, Direction.FORWARD, "float32", stock_error):
            return math.inf, 0.0
        y, scratch = self.convolved(kernel)
        variance, mean = torch.var_mean(y, (0, 2, 3), correction=0)
        return moments_error(y, moments_in(scratch, y.shape[1])), moments_error(y, torch.stack([mean, variance]))

    @functools.cached_property
    def _check(self) -> ConvBench:
        where = Direction.FORWARD, Layout.CHANNELS_LAST, self.threads, self.seed
        return ConvBench(self.shape.convolution, *where)


def moments_error(y: Tensor, moments: Tensor) -> float:
    """The largest error of a mean in standard deviations, and of a variance in variances; infinite for NaN.

    Args:
        y: (N, C, H, W).
        moments: (2, C), of y.

    Returns:
        The error, without a unit.
    """
    variance, mean = torch.var_mean(y.double(), (0, 2, 3), correction=0)
    variance = variance.clamp(min=1e-30)
    errors = torch.stack([(moments[0] - mean).abs() / variance.sqrt(), (moments[1] - variance).abs() / variance])
    error = float(errors.max())
    return error if error == error else math.inf


@register_operation
class DepthwiseBatchNormAct(Operation):
    """The forward schedule of channels_last that also leaves the moments of its result."""

    name = CONV_NORM_OP
    shape = ConvNormShape
    limits: ClassVar[Mapping[str, float]] = {CONV_NORM_OP: 1e-4}
    record = ConvNormRecord
    own_versions: ClassVar[Mapping[str, str]] = {**Depthwise.own_versions, **BatchNormAct.own_versions, "moments": "1"}
    words = ("together", "apart", "both apart")
    required = False
    pace = Pace(2, 0, glance=0.15, finalists=1, reserved=1.0, pairs=7)
    least_seconds = 0.0
    longest = 1.5
    order = 2
    share = 0.1

    def parts(self, key: KernelKey) -> tuple[KernelKey, ...]:
        """The convolution and the norm."""
        where = key.threads, key.device
        alone = KernelKey(Direction.FORWARD, key.shape.convolution, Layout.CHANNELS_LAST, *where)
        return alone, norm_key(key.shape.norm, *where)

    def reject(self, key: KernelKey, parameters: Parameters) -> str | None:
        """Why parameters make no kernel, or None."""
        return reject(key.shape.convolution, Direction.FORWARD, Layout.CHANNELS_LAST, parameters)

    def space(self, key: KernelKey, parts: Sequence[Parameters]) -> list[tuple[dict[str, int], float]]:
        """The convolution's own kernel, with results written to the caches and past them."""
        both = [({**parts[0], "stream": stream}, float(stream)) for stream in (0, 1)]
        return [(one, cost) for one, cost in both if self.reject(key, one) is None]

    def variant(self, key: KernelKey, parameters: Parameters) -> MomentsVariant:
        """A candidate as something to compile."""
        return MomentsVariant(key.shape.convolution, Direction.FORWARD, Layout.CHANNELS_LAST, parameters)

    def load(self, key: KernelKey, parameters: Parameters, built: Built, session: Session | None) -> Any:
        """A `TunedKernel`."""
        return load_image(self.variant(key, parameters), built, session, key.threads)

    def bench(self, key: KernelKey, seed: int, parts: Sequence[Any]) -> ConvNormBench:
        """Random images and weights, and the convolution's own kernel."""
        return ConvNormBench(key.shape, parts[0], seed)

    def weight(self, key: KernelKey) -> float:
        """Bytes of the norm's input."""
        return float(key.shape.norm.bytes)
