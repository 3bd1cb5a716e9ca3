"""Why: a kernel is chosen by its time against torch, so both are timed alternately, in the same way, on the same data.

Both sides allocate what they return, and torch runs in whichever layout is faster for it. What disturbs one call hits
the pair that it is in, so ratios are taken pair by pair, and pairs that were disturbed are dropped. Nothing is timed
that was not found correct before, against a sum in float64.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.machine.process import seconds_waited
from hybridpar.machine.steady import MOST_NOISE, relative_distance, repeat_until_steady
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.spread import run_ranges

#: A pair is dropped where one of its sides took so many times its median.
_OUTLIER = 1.6
#: Images that a forward result or input gradient is checked on: the first, the last and one between.
_CHECKED = 3


@dataclass(frozen=True)
class Timing:
    """What pairs of calls took.

    Attributes:
        ms: Median of the one side.
        stock_ms: Median of the other.
        speedup: Median of the ratios, pair by pair.
        pairs: How many pairs were kept.
        dropped: How many were not.
        best_ms: Least of the one side.
        noise: How far the ratio of the least times of both sides lies from the median of the ratios. Other programs
            only add to times, most to those of many threads, so the two agree where none ran. On several threads at
            least how much longer everything took as these waited for cores, relative.
    """

    ms: float
    stock_ms: float
    speedup: float
    pairs: int
    dropped: int
    best_ms: float
    noise: float = 0.0


def time_pairs(
    own: Callable[[], object], stock: Callable[[], object], seconds: float, least: int = 3, threads: int = 1
) -> Timing:
    """Time two functions in turn, each first in every other pair, until the time is over and there are enough pairs.

    Args:
        own: One of them.
        stock: What it is compared with.
        seconds: For all of it.
        least: Pairs to take in any case.
        threads: That they use. On one thread the time counts that it ran, not the time that others took from it.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    begin, waited = time.perf_counter(), seconds_waited()
    end = begin + seconds
    pairs: list[tuple[float, float]] = []
    while len(pairs) < least or (time.perf_counter() < end and len(pairs) < 1000):
        first, second = (own, stock) if len(pairs) % 2 == 0 else (stock, own)
        start = clock()
        first()
        middle = clock()
        second()
        taken = middle - start, clock() - middle
        pairs.append(taken if first is own else taken[::-1])
    found = summarize_pairs(pairs)
    if threads == 1:
        return found
    worked = (time.perf_counter() - begin) * threads
    waiting = max(0.0, seconds_waited() - waited)
    return replace(found, noise=max(found.noise, waiting / max(worked - waiting, 1e-9)))


def summarize_pairs(pairs: Sequence[tuple[float, float]]) -> Timing:
    """Medians of pairs of seconds, without those that were disturbed."""
    usual = [_OUTLIER * statistics.median(side) for side in zip(*pairs, strict=True)]
    kept = [pair for pair in pairs if all(taken <= most for taken, most in zip(pair, usual, strict=True))] or pairs
    own, stock = ([1e3 * taken for taken in side] for side in zip(*kept, strict=True))
    speedup = statistics.median(right / left for left, right in kept)
    dropped = len(pairs) - len(kept)
    noise = relative_distance(speedup, min(stock) / min(own))
    return Timing(statistics.median(own), statistics.median(stock), speedup, len(kept), dropped, min(own), noise)


def steady_timing(compare: Callable[[], Timing], most: int = 3) -> Timing:
    """Compare with torch until two comparisons agree to `MOST_NOISE`.

    Args:
        compare: Does it once.
        most: Comparisons at most.

    Returns:
        Of the two that agree best the one in which torch was faster, with how far they lie apart in `noise`. Where that
        is above `MOST_NOISE` the machine was busy, and the comparison must not be recorded.
    """
    found, noise = repeat_until_steady(compare, _noise_of, MOST_NOISE, most)
    worse = min(itertools.combinations(found, 2), key=_noise_of)
    return replace(min(worse, key=lambda one: one.speedup), noise=noise)


def _noise_of(timings: Sequence[Timing]) -> float:
    return min(
        (
            max(one.noise, other.noise, relative_distance(one.speedup, other.speedup))
            for one, other in itertools.combinations(timings, 2)
        ),
        default=math.inf,
    )


class Runnable(Protocol):
    """What a kernel is, wherever it comes from."""

    @property
    def phases(self) -> Sequence[tuple[Callable[..., Any], int]]:
        """Functions of (first, second, third, out, scratch, begin, end), and how far each counts."""

    @property
    def scratch_bytes(self) -> int:
        """Memory that a call needs."""


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Inside, torch computes on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Bench:
    """Data of one convolution and direction, on which kernels are checked and timed.

    Args:
        shape: The convolution.
        direction: What is computed.
        layout: Of the images that kernels get.
        threads: That a call may use; torch is set to them by `stock_threads`.
        seed: Of the data.
    """

    def __init__(self, shape: ConvShape, direction: Direction, layout: Layout, threads: int = 1, seed: int = 0) -> None:
        self.shape, self.direction, self.layout, self.threads = shape, direction, layout, threads
        draw = torch.Generator().manual_seed(seed)
        image = (shape.batch, shape.channels, shape.height, shape.width)
        self._image = torch.randn(image, generator=draw)
        self._gradient = torch.randn((*image[:2], shape.out_height, shape.out_width), generator=draw)
        self._weight = torch.randn((shape.channels, 1, *shape.kernel), generator=draw)
        own = _laid_out(layout)
        x, gradient = own(self._image), own(self._gradient)
        pairs = {
            Direction.FORWARD: (x, self._weight, gradient),
            Direction.INPUT_GRADIENT: (gradient, self._weight, x),
            Direction.WEIGHT_GRADIENT: (x, gradient, self._weight),
        }
        self._first, self._second, self._like = pairs[direction]
        self._calls: dict[Layout, Callable[[], object]] = {}

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a kernel reads first and second, and something of the size and layout of what it computes."""
        return self._first, self._second, self._like

    def run(self, kernel: Runnable) -> Tensor:
        """What a kernel computes, with all that a caller has to do."""
        out = torch.empty_like(self._like)
        scratch = torch.empty(kernel.scratch_bytes, dtype=torch.uint8)
        places = (self._first.data_ptr(), self._second.data_ptr(), 0, out.data_ptr(), scratch.data_ptr())
        for function, count in kernel.phases:
            if self.threads == 1:
                function(*places, 0, count)
            else:
                run_ranges(functools.partial(function, *places), count, self.threads)
        return out

    def error(self, kernel: Runnable) -> float:
        """Largest difference of a kernel's result from float64, relative to the largest value; infinite for NaN."""
        return self._error_of(self.run(kernel))

    @functools.cached_property
    def stock_error(self) -> float:
        """The same of torch's result."""
        return self._error_of(result_of(self.direction, self.stock_in(self.layout)()))

    def _error_of(self, out: Tensor) -> float:
        if self.direction is not Direction.WEIGHT_GRADIENT:
            out = out[self._checked_images]
        return relative_error(out, self.reference)

    @property
    def _checked_images(self) -> list[int]:
        last = self.shape.batch - 1
        return sorted({0, last // 2, last})[:_CHECKED]

    @functools.cached_property
    def reference(self) -> Tensor:
        """The result in float64: all of the weight gradient, and some images otherwise."""
        return reference(self.shape, self.direction, *self._operands())

    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.direction is Direction.WEIGHT_GRADIENT:
            return self._image, self._gradient, self._weight
        chosen = self._checked_images
        return self._image[chosen], self._gradient[chosen], self._weight

    @functools.cached_property
    def stock_layout(self) -> Layout:
        """The layout in which torch is faster."""
        last, contiguous = (self.stock_in(layout) for layout in (Layout.CHANNELS_LAST, Layout.CONTIGUOUS))
        last(), contiguous()
        faster = time_pairs(last, contiguous, 0.2, threads=self.threads).speedup >= 1
        return Layout.CHANNELS_LAST if faster else Layout.CONTIGUOUS

    @property
    def stock(self) -> Callable[[], object]:
        """Torch's call, in the layout in which it is faster."""
        return self.stock_in(self.stock_layout)

    def stock_in(self, layout: Layout) -> Callable[[], object]:
        """Torch's call in one layout."""
        if layout not in self._calls:
            self._calls[layout] = self._stock_call(layout)
        return self._calls[layout]

    def _stock_call(self, layout: Layout) -> Callable[[], object]:
        put = _laid_out(layout)
        return stock_call(self.shape, self.direction, put(self._image), put(self._gradient), put(self._weight))

    def compare(self, kernel: Runnable, seconds: float, least: int = 3, layout: Layout | None = None) -> Timing:
        """Time a kernel against torch in pairs; the caller has set torch's threads.

        Args:
            kernel: Of this convolution and direction.
            seconds: For all of it.
            least: Pairs to take in any case.
            layout: In which torch runs; None for the one in which it is faster.
        """
        stock = self.stock if layout is None else self.stock_in(layout)
        self.run(kernel), stock()
        return time_pairs(lambda: self.run(kernel), stock, seconds, least, self.threads)


def relative_error(found: Tensor, true: Tensor) -> float:
    """Largest difference, relative to the largest true value; infinite where there is a NaN.

    Args:
        found: Of any dtype.
        true: The same in float64.
    """
    worst, largest = float((found.double() - true).abs().max()), float(true.abs().max())
    error = worst / largest if largest else worst
    return error if error == error else math.inf


def result_of(direction: Direction, found: Any) -> Tensor:
    """The tensor of one direction in what `stock_call` returns."""
    place = {Direction.INPUT_GRADIENT: 0, Direction.WEIGHT_GRADIENT: 1}
    result: Tensor = found[place[direction]] if direction in place else found
    return result


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
    """One direction of a depthwise convolution, without bias, summed tap by tap in float64.

    Args:
        shape: All sizes but those of the batch, which is the tensors'.
        direction: What is wanted; of image, gradient and weight that which it computes is not read.
        image: (N, C, H, W).
        gradient: (N, C, OH, OW), of the output.
        weight: (C, 1, KH, KW).
    """
    (top, left), (down, right) = shape.padding, shape.dilation
    room = F.pad(image.double(), (left, left, top, top))
    if direction is Direction.INPUT_GRADIENT:
        room.zero_()
    sums = torch.zeros(gradient.shape, dtype=torch.float64)
    taps = torch.zeros(weight.shape, dtype=torch.float64)
    wide = gradient.double()
    for row in range(shape.kernel[0]):
        for column in range(shape.kernel[1]):
            below = row * down + (shape.out_height - 1) * shape.stride[0] + 1
            beside = column * right + (shape.out_width - 1) * shape.stride[1] + 1
            part = room[:, :, row * down : below : shape.stride[0], column * right : beside : shape.stride[1]]
            factor = weight[:, 0, row, column].double().view(1, -1, 1, 1)
            if direction is Direction.FORWARD:
                sums.addcmul_(part, factor)
            elif direction is Direction.INPUT_GRADIENT:
                part.addcmul_(wide, factor)
            else:
                taps[:, 0, row, column] = (part * wide).sum((0, 2, 3))
    if direction is Direction.FORWARD:
        return sums
    if direction is Direction.WEIGHT_GRADIENT:
        return taps
    return room[:, :, top : top + shape.height, left : left + shape.width]


def _laid_out(layout: Layout) -> Callable[[Tensor], Tensor]:
    kind = torch.channels_last if layout is Layout.CHANNELS_LAST else torch.contiguous_format
    return lambda tensor: tensor.contiguous(memory_format=kind)
