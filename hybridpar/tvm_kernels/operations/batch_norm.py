"""BatchNorm with the activation behind it, forward and backward together: one kernel, so it is timed and not searched.

What its time depends on is the number of rows (pixels of all images), of channels, the activation and the threads. Both
sides run as in training, through autograd and on tensors that take turns, so that none is still in the caches. Torch's
side does the activation in place, as torchvision's networks have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from hybridpar.codegen.build import Session
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built
from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.batch_norm_act import STOCK, fused_batch_norm_act
from hybridpar.tvm_kernels.machine import copy_speed, measure_copies, turns
from hybridpar.tvm_kernels.measure import Bench, Call, Rotation, relative_error
from hybridpar.tvm_kernels.operation import KernelKey, Operation, Pace, Parameters, register_operation
from hybridpar.tvm_kernels.record import Record
from hybridpar.tvm_kernels.shapes import Layout, NormShape

#: The operation's name, and what stands where a convolution has its direction.
NORM_OP: Literal["batch_norm_act"] = "batch_norm_act"

#: Most tensors that take turns.
TURNS = 8

#: Values on which the error is taken.
_CHECKED = 1 << 20

EPS = 1e-5

#: How torch's side activates.
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu_,
    "relu6": lambda z: functional.relu6(z, inplace=True),
    "silu": lambda z: functional.silu(z, inplace=True),
}


def norm_key(
    shape: NormShape, threads: int, device: str, layout: Layout = Layout.CHANNELS_LAST, dtype: str = "float32"
) -> KernelKey:
    """The key of a norm.

    Args:
        shape: Rows, channels, activation.
        threads: Threads that compute it.
        device: Fingerprint of the device.
        layout: Of activations.
        dtype: Of all tensors.

    Returns:
        The key.
    """
    return KernelKey(NORM_OP, shape, layout, threads, device, dtype, NORM_OP)


class NormRecord(Record):
    """One measurement of forward and backward together, against torch's two operations."""

    op: str = NORM_OP
    rows: int = Field(ge=2)
    channels: int = Field(ge=1)
    activation: Literal["none", "relu", "relu6", "silu"]
    layout: Layout = Layout.CHANNELS_LAST

    def what(self) -> tuple[str, Any]:
        """Direction and shape of what was computed."""
        return NORM_OP, NormShape(self.rows, self.channels, self.activation)


class NormBench(Bench):
    """One norm's data, and the two ways to compute a training step's forward and backward of it.

    Args:
        shape: Of the norm.
        threads: Of torch.
        seed: Of the data.
    """

    def __init__(self, shape: NormShape, threads: int = 1, seed: int = 0) -> None:
        self.shape, self.threads, self.seed = shape, threads, seed
        draw = torch.Generator().manual_seed(seed)
        sets = turns(shape.bytes, TURNS)
        x, gradient = images(shape, draw), images(shape, draw)
        # The same values at other places: drawing them takes longer than what is measured.
        self._inputs = [x.clone().requires_grad_() for _ in range(sets)]
        self._gradients = [gradient.clone() for _ in range(sets)]
        self._rotation = Rotation(sets)
        self._weight = torch.ones(shape.channels, requires_grad=True)
        self._bias = torch.zeros(shape.channels, requires_grad=True)
        self._running = torch.zeros(shape.channels), torch.ones(shape.channels)

    def run(self, kernel: Any) -> None:
        """Forward and backward by the kernels."""
        self._step(lambda x: kernel(x, self._weight, self._bias, *self._running, True, 0.1, EPS, self.shape.act))

    @property
    def instead(self) -> Call:
        """Forward and backward by torch."""
        return self._stock

    def _stock(self) -> None:
        given = *self._running, self._weight, self._bias, True, 0.1, EPS
        self._step(lambda x: IN_PLACE[self.shape.act](functional.batch_norm(x, *given)))

    def _step(self, forward: Callable[[Tensor], Tensor]) -> None:
        def call(place: int) -> None:
            x = self._inputs[place]
            torch.autograd.grad(forward(x), (x, self._weight, self._bias), self._gradients[place])

        self._rotation.compute(call)

    def errors(self, kernel: Any) -> tuple[float, float]:
        """The largest error of result and gradients against float64, each relative to its largest value."""
        draw, shape = torch.Generator().manual_seed(self.seed), self.shape
        part = NormShape(min(shape.rows, max(2, _CHECKED // shape.channels)), shape.channels, shape.act)
        x, gradient = images(part, draw), images(part, draw)
        weight, bias = torch.rand(shape.channels, generator=draw) + 0.5, torch.randn(shape.channels, generator=draw)

        def stock(x: Tensor, weight: Tensor, bias: Tensor, *_: Any) -> Tensor:
            return STOCK[shape.act](functional.batch_norm(x, None, None, weight, bias, True, 0.0, EPS))

        def results(compute: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
            own = [one.to(dtype).requires_grad_() for one in (x, weight, bias)]
            y = compute(*own, None, None, True, 0.0, EPS, shape.act)
            return [y.detach(), *torch.autograd.grad(y, own, gradient.to(dtype))]

        true = results(stock, torch.float64)
        own, torchs = (max(map(relative_error, results(one, torch.float32), true)) for one in (kernel, stock))
        return own, torchs


@register_operation
class BatchNormAct(Operation):
    """The kernels of `norm_kernels`, which do all shapes."""

    name = NORM_OP
    shape = NormShape
    limits: ClassVar[Mapping[str, float]] = {NORM_OP: 1e-5}
    record = NormRecord
    own_versions: ClassVar[Mapping[str, str]] = {"norms": "2"}
    pace = Pace(1, 0, glance=0.0, finalists=1, reserved=1.0, pairs=7, benches=1)
    least_seconds = 0.0
    longest = 1.5
    order = 0
    share = 0.25

    def without_kernels(self, key: KernelKey) -> str:
        """Why there are no kernels for a key."""
        for own, only in ((key.layout, Layout.CHANNELS_LAST), (key.dtype, "float32")):
            if own != only:
                return f"there are kernels for {only} alone"
        return ""

    def reject(self, key: KernelKey, parameters: Parameters) -> str | None:
        """Why parameters make no kernel: there are none."""
        return self.without_kernels(key) or ("a norm has no parameters" if parameters else None)

    def space(self, key: KernelKey, parts: Sequence[Parameters]) -> list[tuple[dict[str, int], float]]:
        """The one candidate."""
        return [] if self.without_kernels(key) else [({}, 0.0)]

    def load(self, key: KernelKey, parameters: Parameters, built: Built, session: Session | None) -> Any:
        """What computes it.

        Raises:
            KernelsUnavailable: The kernel cannot be built or loaded here.
        """
        if not norm_kernels.table():
            raise KernelsUnavailable("see the log for why; HYBRIDPAR_KERNELS must not be off")
        return fused_batch_norm_act

    def bench(self, key: KernelKey, seed: int, parts: Sequence[Any]) -> NormBench:
        """Random images and gradients."""
        return NormBench(key.shape, key.threads, seed)

    def measure_speed(self, builder: Builder) -> Any:
        """The speed of copies."""
        return measure_copies()

    def floor_ms(self, key: KernelKey, speed: Any) -> float | None:
        """Time of the least passes over memory."""
        return norm_floor_ms(key.shape, speed, key.threads)

    def weight(self, key: KernelKey) -> float:
        """Bytes of its input."""
        return float(key.shape.bytes)


def norm_floor_ms(shape: NormShape, copies: Sequence[tuple[int, float]], threads: int = 1) -> float:
    """Time of the least passes over memory at the speed of copies, taken as one thread's per thread.

    Forward reads the input twice, for the moments and to write the result: three passes over two tensors. Backward
    reads the input and a gradient twice, for two sums and to write the other gradient: five passes over three.

    Args:
        shape: Of the norm.
        copies: Speed of copies by bytes touched, as `machine.measure_copies` gives it: what is small stays in a cache.
        threads: That share the work.

    Returns:
        Milliseconds of forward and backward together.
    """
    forward = 3 * shape.bytes / copy_speed(copies, 2 * shape.bytes)
    backward = 5 * shape.bytes / copy_speed(copies, 3 * shape.bytes)
    return 1e3 * (forward + backward) / threads


def images(shape: NormShape, draw: torch.Generator | None = None) -> Tensor:
    """One random image of as many pixels as a norm has rows, channels last.

    Args:
        shape: Of the norm.
        draw: Where its values come from; None for torch's own generator.

    Returns:
        (1, C, H, W).
    """
    height = next(one for one in range(math.isqrt(shape.rows), 0, -1) if shape.rows % one == 0)
    sizes = (1, shape.channels, height, shape.rows // height)
    return torch.randn(sizes, generator=draw).contiguous(memory_format=torch.channels_last)
