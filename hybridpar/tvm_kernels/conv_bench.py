"""Data of one depthwise convolution, on the CPU or a GPU, on which kernels are checked and timed against torch.

Sets of tensors take turns, so that none is in a cache when it is used again, and results are written where none was
lately.

On a GPU torch may run as it is and with its own kernels in place of cuDNN's; the fastest of all ways, in both layouts,
is what a kernel is compared with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.tvm_kernels.measure import Bench, Call, Rotation, relative_error, time_pairs
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMATS = {Layout.CHANNELS_LAST: torch.channels_last, Layout.CONTIGUOUS: torch.contiguous_format}

#: Bytes that sets of tensors which take turns come to: more than the part of a last cache that one process has, as a
#: rule, and little memory. Most such sets.
COLD, _MOST_TURNS = 128 << 20, 64
#: Images that a result of the CPU is checked on: the first, the last and one between.
_CHECKED = 3
#: Seconds to find out which of two ways of torch is the faster, on the CPU and on a GPU.
_GLANCE, _DEVICE_GLANCE = 0.2, 0.02


def turns(size: int) -> int:
    """How many sets of tensors must take turns for none to be in a cache when it is used again.

    In a training step all other layers run between two calls of one, so its operands have to come from memory. What
    is timed again and again on one set of small tensors finds them in the caches.
    """
    return max(1, min(_MOST_TURNS, math.ceil(COLD / size)))


class ConvBench(Bench):
    """Data of one convolution and direction."""

    def __init__(
        self,
        shape: ConvShape,
        direction: str,
        layout: Layout,
        threads: int = 1,
        seed: int = 0,
        dtype: str = "float32",
        device: torch.device | None = None,
    ) -> None:
        self.shape, self.direction, self.layout = shape, Direction(direction), layout
        self.threads, self.device = threads, device
        draw = torch.Generator().manual_seed(seed)
        image = (shape.batch, shape.channels, shape.height, shape.width)
        sizes = (image, (*image[:2], shape.out_height, shape.out_width), (shape.channels, 1, *shape.kernel))
        # What both sides and the reference see is rounded to the dtype first.
        self._image, self._gradient, self._weight = (
            torch.randn(one, generator=draw).to(DTYPES[dtype]) for one in sizes
        )
        self._sets = turns(self._image.nbytes + self._gradient.nbytes)
        self._rotation = Rotation(self._sets)
        self._own = self.operands(layout)
        self._arguments = [self._arguments_of(*own) for own in self._own]

    def operands(self, layout: Layout) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Image, gradient and weights on the device, for each turn."""
        device, form = self.device or "cpu", FORMATS[layout]
        x, gradient = (one.to(device).contiguous(memory_format=form) for one in (self._image, self._gradient))
        reads = self.direction is not Direction.INPUT_GRADIENT, self.direction is not Direction.FORWARD
        weight = self._weight.to(device)
        further = [
            (x.clone() if reads[0] else x, gradient.clone() if reads[1] else gradient, weight)
            for _ in range(self._sets - 1)
        ]
        return [(x, gradient, weight), *further]

    def in_turn(self, calls: Sequence[Call]) -> Call:
        """One function that makes the next of some calls each time; all such functions of a bench take
        one turn each.
        """
        # Not of `self`, which keeps such functions: a reference cycle would hold all tensors until the next collection.
        rotation = self._rotation
        return lambda: rotation.compute(lambda place: calls[place]())

    def arguments(self, place: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """What a kernel reads, and a tensor like its result."""
        return self._arguments[place]

    def _arguments_of(self, x: Tensor, gradient: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return {
            Direction.FORWARD: (x, weight, gradient),
            Direction.INPUT_GRADIENT: (gradient, weight, x),
            Direction.WEIGHT_GRADIENT: (x, gradient, weight),
        }[self.direction]

    def run(self, kernel: Any) -> Tensor:
        """Call a kernel as a caller would, and allocate its result."""

        def call(place: int) -> Tensor:
            first, second, like = self.arguments(place)
            out = torch.empty_like(like)
            kernel(first, second, None, out)
            return out

        return self._rotation.compute(call)

    def errors(self, kernel: Any) -> tuple[float, float]:
        """Largest difference from float64 of a kernel's result and of torch's."""
        return self.error(kernel), self.stock_error

    def error(self, kernel: Any) -> float:
        """Largest difference of a kernel's result from float64."""
        return self.error_of(self.run(kernel))

    @functools.cached_property
    def stock_error(self) -> float:
        """The same of torch's result."""
        return self.error_of(_result(self.direction, self.instead()))

    def error_of(self, out: Tensor) -> float:
        """Largest difference of a result from float64."""
        if self.direction is not Direction.WEIGHT_GRADIENT:
            out = out[self._checked_images]
        return relative_error(out.cpu(), self.reference)

    @property
    def _checked_images(self) -> list[int]:
        last = self.shape.batch - 1
        return sorted({0, last // 2, last})[:_CHECKED] if self.device is None else list(range(last + 1))

    @functools.cached_property
    def reference(self) -> Tensor:
        """The result in float64: all of the weight gradient; of the others on the CPU some images."""
        own = slice(None) if self.direction is Direction.WEIGHT_GRADIENT else self._checked_images
        return reference(self.shape, self.direction, self._image[own], self._gradient[own], self._weight)

    @functools.cached_property
    def ways(self) -> dict[str, Call]:
        """Torch's calls in both layouts; on a GPU as it is and with its own kernels."""
        found: dict[str, Call] = {}
        for layout in Layout:
            call = self.instead if layout is self.layout else self._stock_on(self.operands(layout))
            found[f"torch {layout}"] = call
            if self.device is not None:
                found[f"native {layout}"] = functools.partial(_without_cudnn, call)
        return found

    def _stock_on(self, operands: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Call:
        return self.in_turn([stock_call(self.shape, self.direction, *one) for one in operands])

    @functools.cached_property
    def instead(self) -> Call:
        """Torch's call in the layout of the images; nothing is made for it."""
        return self._stock_on(self._own)

    @functools.cached_property
    def stock(self) -> Call:
        """The fastest of torch's calls."""
        best, *others = self.ways.values()
        for other in others:
            best(), other()
            seconds = _GLANCE if self.device is None else _DEVICE_GLANCE
            if time_pairs(best, other, seconds, 3, self.threads, self.device).speedup < 1:
                best = other
        return best


def _without_cudnn(call: Call) -> object:
    with torch.backends.cudnn.flags(enabled=False):
        return call()


def stock_call(
    shape: ConvShape, direction: Direction, x: Tensor, gradient: Tensor, weight: Tensor
) -> Callable[[], object]:
    """Torch's call of one direction, on tensors in the layout that it is to run in."""
    wanted = [direction is one for one in (Direction.INPUT_GRADIENT, Direction.WEIGHT_GRADIENT)]
    if not any(wanted):
        return lambda: F.conv2d(x, weight, None, shape.stride, shape.padding, shape.dilation, shape.channels)
    backward = torch.ops.aten.convolution_backward.default
    sizes = (shape.stride, shape.padding, shape.dilation)
    return lambda: backward(gradient, x, weight, None, *sizes, False, [0, 0], shape.channels, [*wanted, False])


def reference(shape: ConvShape, direction: Direction, image: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """One direction of a depthwise convolution, without bias, by torch in float64."""
    return _result(direction, stock_call(shape, direction, image.double(), gradient.double(), weight.double())())


def _result(direction: Direction, found: Any) -> Tensor:
    """The tensor of a direction in what `stock_call` returns."""
    place = {Direction.INPUT_GRADIENT: 0, Direction.WEIGHT_GRADIENT: 1}
    result: Tensor = found[place[direction]] if direction in place else found
    return result
