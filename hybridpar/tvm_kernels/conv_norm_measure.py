"""Why: what a convolution pays for sums, and the norm behind it gains by them, shows only where both run together.

Both sides run by turns (`measure.time_pairs`): the forward of the convolution and of the norm with its activation, on
inputs that take turns so that none is still in the caches. The backward is the same on both sides, and is left out. A
convolution whose result is read once more at once does better to leave it in the caches than one whose result is not,
so the kernel that was found for it is tried with its results in the caches and past them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from hybridpar.codegen.build import Session
from hybridpar.codegen.compile_pool import Builder
from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.conv_norm_records import CONV_NORM_OP, ConvNormKey, ConvNormShape
from hybridpar.tvm_kernels.kernel import MomentsVariant, TunedKernel, Variant, load_image
from hybridpar.tvm_kernels.measure import Bench, Timing, steady_timing, time_pairs, torch_threads
from hybridpar.tvm_kernels.moments import moments_in
from hybridpar.tvm_kernels.record import require_right
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.space import reject

#: Pairs of a measurement, at least.
_LEAST = 7

#: Bytes of input over which tensors take turns, and at most so many tensors.
_COLD, _TURNS = 64 << 20, 8

#: Seconds to choose a kernel by.
_GLANCE = 0.15

_EPS = 1e-5


@dataclass(frozen=True)
class ConvNormTime:
    """A measurement of the forward of a convolution and the norm behind it.

    Attributes:
        parameters: Of the convolution that leaves its moments.
        ms: Of both together; that apart over the median of the paired ratios.
        apart_ms: Of both apart, its median.
        error: Of the moments.
        stock_error: Of the moments that torch finds in float32.
        noise: How far repeated measurements lie apart, see `measure.steady_timing`.
    """

    parameters: Mapping[str, int]
    ms: float
    apart_ms: float
    error: float
    stock_error: float | None = None
    noise: float = 0.0


class ConvNormBench:
    """Data of a convolution and the norm behind it, and the two ways to compute the forward of both.

    Args:
        shape: The two.
        seed: Of the data.
    """

    def __init__(self, shape: ConvNormShape, seed: int = 0) -> None:
        one = shape.convolution
        self.shape = shape
        draw = torch.Generator().manual_seed(seed)
        image = torch.randn((one.batch, one.channels, one.height, one.width), generator=draw)
        turns = max(2, min(_TURNS, math.ceil(_COLD / (4 * image.numel()))))
        # The same values at other places: drawing them takes longer than what is measured.
        self._inputs = [image.clone(memory_format=torch.channels_last) for _ in range(turns)]
        self._turn = count()
        self._weight = torch.randn((one.channels, 1, *one.kernel), generator=draw)
        sizes = (one.batch, one.channels, one.out_height, one.out_width)
        self._like = torch.empty(sizes, memory_format=torch.channels_last)
        self._parameters = torch.ones(one.channels), torch.zeros(one.channels)
        self._running = torch.zeros(one.channels), torch.ones(one.channels)

    def apart(self, kernel: TunedKernel) -> Tensor:
        """With a norm that finds the moments itself."""
        y = torch.empty_like(self._like)
        kernel(self._next(), self._weight, None, y)
        return self._normed(y, None)

    def together(self, kernel: TunedKernel) -> Tensor:
        """With a convolution that leaves its moments."""
        return self._normed(*self.summed(kernel))

    def summed(self, kernel: TunedKernel) -> tuple[Tensor, Tensor]:
        """The convolution's result and moments."""
        y = torch.empty_like(self._like)
        return y, moments_in(kernel.run(self._next(), self._weight, None, y), y.shape[1])

    def _normed(self, y: Tensor, moments: Tensor | None) -> Tensor:
        given = (y, *self._parameters, self._running, True, 0.1, _EPS, self.shape.act)
        return norm_kernels.forward(*given, moments)[0]

    def _next(self) -> Tensor:
        return self._inputs[next(self._turn) % len(self._inputs)]

    def compare(self, summing: TunedKernel, alone: TunedKernel, seconds: float, least: int = _LEAST) -> Timing:
        """Time both together against both apart, after one call of each that does not count.

        Args:
            summing: The kernel that leaves moments.
            alone: The kernel of the convolution alone.
            seconds: For all pairs but the least number of them.
            least: Pairs to take in any case.
        """
        with torch_threads(alone.threads):
            self.together(summing)
            self.apart(alone)
            return time_pairs(lambda: self.together(summing), lambda: self.apart(alone), seconds, least, alone.threads)

    def errors(self, kernel: TunedKernel) -> tuple[float, float]:
        """The largest error of the kernel's moments and of torch's, see `moments_error`."""
        with torch_threads(kernel.threads):
            y, moments = self.summed(kernel)
        variance, mean = torch.var_mean(y, (0, 2, 3), correction=0)
        return moments_error(y, moments), moments_error(y, torch.stack([mean, variance]))


def moments_error(y: Tensor, moments: Tensor) -> float:
    """The largest error of a mean in standard deviations, and of a variance in variances; infinite for NaN.

    Args:
        y: (N, C, H, W).
        moments: (2, C), of y.
    """
    variance, mean = torch.var_mean(y.double(), (0, 2, 3), correction=0)
    variance = variance.clamp(min=1e-30)
    errors = torch.stack([(moments[0] - mean).abs() / variance.sqrt(), (moments[1] - variance).abs() / variance])
    error = float(errors.max())
    return error if error == error else math.inf


def summing_candidates(shape: ConvShape, alone: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The kernel that was found for a convolution alone, with results written to the caches and past them.

    Args:
        shape: The convolution.
        alone: That kernel's parameters.
    """
    for stream in (0, 1):
        own = {**alone, "stream": stream}
        if reject(shape, Direction.FORWARD, Layout.CHANNELS_LAST, own) is None:
            yield own


def measure_conv_norm(
    key: ConvNormKey, alone: Mapping[str, int], builder: Builder, seconds: float = 1.0, seed: int = 0
) -> ConvNormTime:
    """Time a convolution that leaves its moments and a norm that takes them against both apart.

    Args:
        key: The two, and where.
        alone: Parameters of the convolution's own kernel.
        builder: Builds kernels.
        seconds: For timing, but for the least number of pairs; building comes on top of it.
        seed: Of the data.

    Raises:
        WrongKernelError: A kernel's result or its moments are wrong.
        KernelsUnavailable: A kernel cannot be built.
    """
    shape, session = key.shape.convolution, Session()
    tiles = list(summing_candidates(shape, alone))
    place = shape, Direction.FORWARD, Layout.CHANNELS_LAST
    variants = [Variant(*place, alone), *(MomentsVariant(*place, one) for one in tiles)]
    kernels = []
    for variant, built in [(one, builder.submit(one.request())) for one in variants]:
        kernel = load_image(variant, built.result().names, built.result().image, session)
        kernels.append(TunedKernel(kernel.phases, kernel.scratch_bytes, 4, key.threads, variant.align_out))
    own, *summing = kernels
    check = Bench(*place, key.threads, seed)
    benches = [ConvNormBench(key.shape, seed + one) for one in (0, 1)]
    errors = [_checked(check, benches[0], one) for one in summing]
    glances = [benches[0].compare(one, own, _GLANCE, 3).speedup for one in summing]
    best = max(range(len(summing)), key=glances.__getitem__)

    # Some are fast on one set of tensors alone, by where these lie in memory; what counts is the worse of two.
    def compare() -> Timing:
        timings = [bench.compare(summing[best], own, seconds / 4) for bench in benches]
        return min(timings, key=lambda one: one.speedup)

    timing = steady_timing(compare)
    ms = timing.stock_ms / timing.speedup
    return ConvNormTime(tiles[best], ms, timing.stock_ms, *errors[best], timing.noise)


def _checked(check: Bench, bench: ConvNormBench, kernel: TunedKernel) -> tuple[float, float]:
    """The errors of a kernel's moments and of torch's.

    Raises:
        WrongKernelError: They, or its result, are wrong.
    """
    require_right(bench.shape.text, check.error(kernel), check.direction, check.stock_error)
    moments, stock = bench.errors(kernel)
    require_right(f"the moments of {bench.shape.text}", moments, CONV_NORM_OP, stock)
    return moments, stock


def measure_conv_norm_saving(pairs: Sequence[tuple[ConvNormShape, TunedKernel, TunedKernel]], least: int = 5) -> float:
    """Milliseconds that pairs take less together than apart, added up.

    Args:
        pairs: The two, the kernel that leaves moments, and that of the convolution alone.
        least: Pairs of calls of each, after one that does not count.
    """
    saved = 0.0
    for shape, summing, alone in pairs:
        timing = ConvNormBench(shape).compare(summing, alone, 0.0, least)
        saved += timing.stock_ms - timing.ms
    return saved
