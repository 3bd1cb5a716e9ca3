"""Why: on a GPU calls return before they are done, so kernels and torch are timed there by the device's own events.

As on the CPU (`measure`): both sides allocate what they return, they are timed in turn, each first in every other pair,
disturbed pairs are dropped, and nothing is timed that was not found correct before, against a sum in float64. Torch may
run as it is and with its own kernels in place of cuDNN's, in both layouts; the fastest of the four is what counts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from hybridpar.tvm_kernels.cuda_kernel import CudaKernel
from hybridpar.tvm_kernels.measure import (
    Timing,
    reference,
    relative_error,
    result_of,
    stock_call,
    summarize_pairs,
)
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: Seconds that calls between two events should take: an event's own time is some microseconds.
_STRETCH = 4e-4


class CudaBench:
    """Data of one convolution and direction on a GPU, on which kernels are checked and timed.

    Args:
        shape: The convolution.
        direction: What is computed.
        layout: Of the images that kernels get.
        dtype: Of all tensors.
        device: The GPU.
        seed: Of the data.
    """

    def __init__(
        self, shape: ConvShape, direction: Direction, layout: Layout, dtype: str, device: torch.device, seed: int = 0
    ) -> None:
        self.shape, self.direction, self.layout, self.dtype, self.device = shape, direction, layout, dtype, device
        draw = torch.Generator().manual_seed(seed)
        image = (shape.batch, shape.channels, shape.height, shape.width)
        out = (*image[:2], shape.out_height, shape.out_width)
        sizes = (image, out, (shape.channels, 1, *shape.kernel))
        # What both sides and the reference see is rounded to the dtype first.
        self._image, self._gradient, self._weight = (
            torch.randn(one, generator=draw).to(DTYPES[dtype]) for one in sizes
        )
        x, gradient = (self._put(one, layout) for one in (self._image, self._gradient))
        weight = self._weight.to(device)
        self._first, self._second, self._like = {
            Direction.FORWARD: (x, weight, gradient),
            Direction.INPUT_GRADIENT: (gradient, weight, x),
            Direction.WEIGHT_GRADIENT: (x, gradient, weight),
        }[direction]

    def _put(self, tensor: Tensor, layout: Layout) -> Tensor:
        form = torch.channels_last if layout is Layout.CHANNELS_LAST else torch.contiguous_format
        return tensor.to(self.device).contiguous(memory_format=form)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a kernel reads first and second, and something of the size and layout of what it computes."""
        return self._first, self._second, self._like

    def run(self, kernel: CudaKernel) -> Tensor:
        """What a kernel computes, with all that a caller has to do."""
        out = torch.empty_like(self._like)
        scratch = torch.empty(kernel.scratch_bytes, dtype=torch.uint8, device=self.device)
        kernel(self._first.data_ptr(), self._second.data_ptr(), 0, out.data_ptr(), scratch.data_ptr())
        return out

    def error(self, kernel: CudaKernel) -> float:
        """Largest difference of a kernel's result from float64, relative to the largest value; infinite for NaN."""
        return relative_error(self.run(kernel).cpu(), self.reference)

    @functools.cached_property
    def stock_error(self) -> float:
        """The same of torch's result."""
        return relative_error(result_of(self.direction, self.ways[f"torch {self.layout}"]()).cpu(), self.reference)

    @functools.cached_property
    def reference(self) -> Tensor:
        """The result in float64."""
        return reference(self.shape, self.direction, self._image, self._gradient, self._weight)

    @functools.cached_property
    def ways(self) -> dict[str, Callable[[], object]]:
        """Torch's calls: as it is and with its own kernels, in both layouts."""
        found: dict[str, Callable[[], object]] = {}
        for layout in Layout:
            operands = (self._put(self._image, layout), self._put(self._gradient, layout), self._weight.to(self.device))
            call = stock_call(self.shape, self.direction, *operands)
            found[f"torch {layout}"] = call
            found[f"native {layout}"] = functools.partial(_without_cudnn, call)
        return found

    @functools.cached_property
    def stock(self) -> Callable[[], object]:
        """The fastest of them."""
        return min(self.ways.values(), key=lambda way: min(self.milliseconds(way, 3) for _ in range(3)))

    def milliseconds(self, call: Callable[[], object], times: int) -> float:
        """Time of one of some calls, by the device's clock."""
        return _milliseconds(call, times, self.device)

    def compare(self, kernel: CudaKernel, seconds: float, least: int = 5) -> Timing:
        """Time a kernel against torch in pairs."""
        return self.compare_calls(lambda: self.run(kernel), self.stock, seconds, least)

    def compare_calls(
        self, own: Callable[[], object], stock: Callable[[], object], seconds: float, least: int = 5
    ) -> Timing:
        """Time two calls in turn."""
        return time_cuda_pairs(own, stock, seconds, least, self.device)


def time_cuda_pairs(
    own: Callable[[], object], stock: Callable[[], object], seconds: float, least: int, device: torch.device
) -> Timing:
    """Time two calls in turn, each first in every other pair, until the time is over and there are enough pairs.

    Args:
        own: One of them.
        stock: What it is compared with.
        seconds: For all of it.
        least: Pairs to take in any case.
        device: That they run on.
    """
    own(), stock()
    slower = max(_milliseconds(own, 2, device), _milliseconds(stock, 2, device))
    times = max(1, min(200, round(_STRETCH / max(1e-3 * slower, 1e-7))))
    end = time.perf_counter() + seconds
    pairs: list[tuple[float, float]] = []
    while len(pairs) < least or (time.perf_counter() < end and len(pairs) < 1000):
        first, second = (own, stock) if len(pairs) % 2 == 0 else (stock, own)
        taken = 1e-3 * _milliseconds(first, times, device), 1e-3 * _milliseconds(second, times, device)
        pairs.append(taken if first is own else taken[::-1])
    return summarize_pairs(pairs)


def _milliseconds(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Time of one of some calls, by the device's clock."""
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / times


def _without_cudnn(call: Callable[[], object]) -> object:
    with torch.backends.cudnn.flags(enabled=False):
        return call()
