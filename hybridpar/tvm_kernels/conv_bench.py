"""Data of one depthwise convolution, on the CPU or a GPU, on which kernels are checked and timed against torch.

Sets of tensors take turns, so that none is in a cache when it is used again, and results are written where none was
lately.

A kernel is compared with what runs where it does not: torch's own convolution in the same layout.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.tvm_kernels.measure import Call, Timing, time_pairs
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMATS = {Layout.CHANNELS_LAST: torch.channels_last, Layout.CONTIGUOUS: torch.contiguous_format}

#: Bytes that sets of tensors which take turns come to: more than the part of a last cache that one process has, as a
#: rule, and little memory. Most such sets.
COLD, _MOST_TURNS = 128 << 20, 64

#: Which of image, gradient and weights a direction reads, and which its result is like.
_ORDER = {Direction.FORWARD: (0, 2, 1), Direction.INPUT_GRADIENT: (1, 2, 0), Direction.WEIGHT_GRADIENT: (0, 1, 2)}

_Result = TypeVar("_Result")


def turns(size: int) -> int:
    """How many sets of tensors must take turns for none to be in a cache when it is used again.

    In a training step all other layers run between two calls of one, so its operands have to come from memory. What
    is timed again and again on one set of small tensors finds them in the caches.
    """
    return max(1, min(_MOST_TURNS, math.ceil(COLD / size)))


class _Rotation:
    """Sets of tensors that take turns; what was computed on one is kept until its next turn."""

    def __init__(self, sets: int) -> None:
        self._indices = itertools.cycle(range(sets))
        self._results: list[object] = [None] * sets

    def compute(self, call: Callable[[int], _Result]) -> _Result:
        """Compute on the next set."""
        index = next(self._indices)
        self._results[index] = None  # the next one may be written where this one was
        self._results[index] = result = call(index)
        return result


class ConvBench:
    """Data of one convolution and direction.

    Attributes:
        key: What is computed.
        device: The GPU; None for the CPU.
    """

    def __init__(self, key: KernelKey, seed: int = 0, device: torch.device | None = None) -> None:
        self.key, self.device, shape = key, device, key.shape
        draw = torch.Generator().manual_seed(seed)
        image = (shape.batch, shape.channels, shape.height, shape.width)
        sizes = (image, (*image[:2], shape.out_height, shape.out_width), (shape.channels, 1, *shape.kernel))
        # What both sides and the reference see is rounded to the dtype first.
        self._image, self._gradient, self._weight = (
            torch.randn(size, generator=draw).to(DTYPES[key.dtype]) for size in sizes
        )
        self._sets = turns(self._image.nbytes + self._gradient.nbytes)
        self._rotation = _Rotation(self._sets)
        self._operands = self.operands(key.layout)
        first, second, like = _ORDER[key.direction]
        #: What a kernel reads, and a tensor like its result, for each turn.
        self.arguments = [(tensors[first], tensors[second], tensors[like]) for tensors in self._operands]

    def operands(self, layout: Layout) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Image, gradient and weights on the device, for each turn."""
        device, form = self.device or "cpu", FORMATS[layout]
        x, gradient = (tensor.to(device).contiguous(memory_format=form) for tensor in (self._image, self._gradient))
        reads = self.key.direction is not Direction.INPUT_GRADIENT, self.key.direction is not Direction.FORWARD
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
        return lambda: rotation.compute(lambda index: calls[index]())

    def run(self, kernel: Any) -> Tensor:
        """Call a kernel as a caller would, and allocate its result."""

        def call(index: int) -> Tensor:
            first, second, like = self.arguments[index]
            out = torch.empty_like(like)
            kernel(first, second, None, out)
            return out

        return self._rotation.compute(call)

    def compare(self, kernel: Any, seconds: float, least: int = 3) -> Timing:
        """Time a kernel and what runs where it does not in pairs, after one call of each that does not count."""
        self.run(kernel), self.instead()
        return time_pairs(lambda: self.run(kernel), self.instead, seconds, least, self.key.threads, self.device)

    def error(self, kernel: Any) -> float:
        """Largest difference of a kernel's result from float64, relative to the largest value."""
        return self.error_of(self.run(kernel))

    @functools.cached_property
    def stock_error(self) -> float:
        """The same of torch's result."""
        return self.error_of(_result(self.key.direction, self.instead()))

    def error_of(self, out: Tensor) -> float:
        """The same of any result."""
        difference = (out[self._checked].cpu().double() - self.reference).abs().max()
        largest = float(self.reference.abs().max())
        error = float(difference) / (largest or 1.0)
        return error if error == error else math.inf

    @property
    def _checked(self) -> list[int] | slice:
        """What of a result is compared: all of a weight gradient; of images on the CPU three."""
        if self.key.direction is Direction.WEIGHT_GRADIENT or self.device is not None:
            return slice(None)
        last = self.key.shape.batch - 1
        return sorted({0, last // 2, last})

    @functools.cached_property
    def reference(self) -> Tensor:
        """What is compared, in float64."""
        image, gradient = self._image[self._checked], self._gradient[self._checked]
        return reference(self.key.shape, self.key.direction, image, gradient, self._weight)

    @functools.cached_property
    def instead(self) -> Call:
        """What runs where the kernel does not: torch's call in the layout of the images."""
        return self.in_turn([stock_call(self.key.shape, self.key.direction, *tensors) for tensors in self._operands])


def stock_call(
    shape: ConvShape, direction: Direction, x: Tensor, gradient: Tensor, weight: Tensor
) -> Callable[[], object]:
    """Torch's call of one direction, on tensors in the layout that it is to run in."""
    sizes = (shape.stride, shape.padding, shape.dilation)
    if direction is Direction.FORWARD:
        return lambda: F.conv2d(x, weight, None, *sizes, shape.channels)
    backward = torch.ops.aten.convolution_backward.default
    wanted = [direction is Direction.INPUT_GRADIENT, direction is Direction.WEIGHT_GRADIENT, False]
    return lambda: backward(gradient, x, weight, None, *sizes, False, [0, 0], shape.channels, wanted)


def reference(shape: ConvShape, direction: Direction, image: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """One direction of a depthwise convolution, without bias, by torch in float64."""
    return _result(direction, stock_call(shape, direction, image.double(), gradient.double(), weight.double())())


def _result(direction: Direction, returned: Any) -> Tensor:
    """The tensor of a direction in what `stock_call` returns."""
    result: Tensor = returned if direction is Direction.FORWARD else returned[[*Direction].index(direction) - 1]
    return result
