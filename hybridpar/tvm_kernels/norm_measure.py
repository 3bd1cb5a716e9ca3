"""Why: whether a fused norm is faster than torch is measured as it runs in training: both ways through autograd, cold.

Both sides run by turns (`measure.time_pairs`), forward and backward, on tensors that take turns so that none is still
in the caches, as in a network whose other layers have been there meanwhile. Torch's side does the activation in place,
as torchvision's networks have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional

from hybridpar.errors import UsageError
from hybridpar.tvm_kernels.batch_norm_act import STOCK, batch_norm_then, fusable
from hybridpar.tvm_kernels.machine import copy_speed
from hybridpar.tvm_kernels.measure import Timing, relative_error, steady_timing, time_pairs, torch_threads
from hybridpar.tvm_kernels.norm_records import NORM_OP, NormKey, NormShape
from hybridpar.tvm_kernels.record import require_right

#: Pairs of a measurement, at least.
_LEAST = 7

#: Bytes of input over which tensors take turns, and at most so many tensors.
_COLD, _TURNS = 64 << 20, 8

#: Values on which the error is taken.
_CHECKED = 1 << 20

_EPS = 1e-5

#: How torch's side activates.
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu_,
    "relu6": lambda z: functional.relu6(z, inplace=True),
    "silu": lambda z: functional.silu(z, inplace=True),
}


@dataclass(frozen=True)
class NormTime:
    """A measurement of forward and backward together.

    Attributes:
        ms: Of the kernels; torch's median over the median of the paired ratios, so that it is below torch's exactly
            where the kernels won most pairs.
        stock_ms: Of torch, its median.
        floor_ms: See `norm_floor_ms`; None where no copies were timed.
        error: The largest error of the result and the three gradients against float64, each relative to its largest
            value.
        stock_error: The same of torch in float32.
        noise: How far repeated measurements lie apart, see `measure.steady_timing`.
    """

    ms: float
    stock_ms: float
    floor_ms: float | None
    error: float
    stock_error: float | None = None
    noise: float = 0.0


class NormBench:
    """One norm's data, and the two ways to compute a training step's forward and backward of it.

    Args:
        shape: Of the norm.
        seed: Of the data.
    """

    def __init__(self, shape: NormShape, seed: int = 0) -> None:
        self.shape = shape
        draw = torch.Generator().manual_seed(seed)
        turns = max(2, min(_TURNS, math.ceil(_COLD / shape.bytes)))
        x, gradient = images(shape, draw), images(shape, draw)
        # The same values at other places: drawing them takes longer than what is measured.
        self._inputs = [x.clone().requires_grad_() for _ in range(turns)]
        self._gradients = [gradient.clone() for _ in range(turns)]
        self._turn = count()
        self._weight = torch.ones(shape.channels, requires_grad=True)
        self._bias = torch.zeros(shape.channels, requires_grad=True)
        self._running = torch.zeros(shape.channels), torch.ones(shape.channels)

    def fused(self) -> None:
        """By the kernels."""
        x, gradient = self._next()
        y = batch_norm_then(x, self._weight, self._bias, *self._running, True, 0.1, _EPS, self.shape.act)
        torch.autograd.grad(y, (x, self._weight, self._bias), gradient)

    def stock(self) -> None:
        """By torch."""
        x, gradient = self._next()
        z = functional.batch_norm(x, *self._running, self._weight, self._bias, True, 0.1, _EPS)
        torch.autograd.grad(IN_PLACE[self.shape.act](z), (x, self._weight, self._bias), gradient)

    def _next(self) -> tuple[Tensor, Tensor]:
        own = next(self._turn) % len(self._inputs)
        return self._inputs[own], self._gradients[own]

    def compare(self, seconds: float, threads: int, least: int = _LEAST) -> Timing:
        """Time the kernels against torch, after one call of each that does not count.

        Args:
            seconds: For all pairs but the least number of them.
            threads: Of torch, which are set meanwhile.
            least: Pairs to take in any case.
        """
        with torch_threads(threads):
            self.fused()
            self.stock()
            return time_pairs(self.fused, self.stock, seconds, least, threads)


def measure_norm(
    shape: NormShape,
    threads: int,
    seconds: float = 1.0,
    seed: int = 0,
    copies: Sequence[tuple[int, float]] | None = None,
) -> NormTime:
    """Time the kernels against torch, forward and backward of one training step.

    Args:
        shape: Of the norm, of at least two rows.
        threads: Of torch, on both sides.
        seconds: After which no further pair is begun, but for the least number of them.
        seed: Of the data.
        copies: Speed of copies, as `machine.measure_copies` gives it.

    Raises:
        UsageError: Kernels cannot be had here, or there are not two rows.
        WrongKernelError: The kernels' result or gradients are wrong.
    """
    if not fusable(images(shape), None, None, None, None, True):
        raise UsageError(
            f"no kernel can norm {shape.rows} rows of {shape.channels} channels here",
            "There must be two values per channel, and kernels.",
            "See the log for why there are none; HYBRIDPAR_KERNELS must not be off.",
        )
    error, stock_error = norm_errors(shape, seed)
    require_right(f"{NORM_OP} {shape.text}", error, NORM_OP, stock_error)
    bench = NormBench(shape, seed)
    timing = steady_timing(lambda: bench.compare(seconds / 2, threads))
    floor = None if copies is None else norm_floor_ms(shape, copies, threads)
    ms = timing.stock_ms / timing.speedup
    return NormTime(ms, timing.stock_ms, floor, error, stock_error, timing.noise)


def norm_floor_ms(shape: NormShape, copies: Sequence[tuple[int, float]], threads: int = 1) -> float:
    """Time of the least passes over memory at the speed of copies, taken as one thread's per thread.

    Forward reads the input twice, for the moments and to write the result: three passes over two tensors. Backward
    reads the input and a gradient twice, for two sums and to write the other gradient: five passes over three.

    Args:
        shape: Of the norm.
        copies: Speed of copies by bytes touched: what is small is at home in some cache.
        threads: That share the work.
    """
    forward = 3 * shape.bytes / copy_speed(copies, 2 * shape.bytes)
    backward = 5 * shape.bytes / copy_speed(copies, 3 * shape.bytes)
    return 1e3 * (forward + backward) / threads


def measure_norm_saving(keys: Mapping[NormKey, int], pairs: int = 5) -> float:
    """Milliseconds that fused norms take less than torch, forward and backward, added over some norms.

    Args:
        keys: Norms that run fused, and how often each one runs.
        pairs: Pairs of each, after one that does not count.
    """
    saved = 0.0
    for key, often in keys.items():
        timing = NormBench(key.shape).compare(0.0, key.threads, pairs)
        saved += often * (timing.stock_ms - timing.ms)
    return saved


def norm_errors(shape: NormShape, seed: int = 0) -> tuple[float, float]:
    """The largest error of result and gradients against float64, relative to the largest value of each.

    Args:
        shape: Of the norm; of many rows only a part is computed.
        seed: Of the data.

    Returns:
        That of the kernels and that of torch in float32; infinite where there is a NaN.
    """
    draw = torch.Generator().manual_seed(seed)
    part = NormShape(min(shape.rows, max(2, _CHECKED // shape.channels)), shape.channels, shape.act)
    x, gradient = images(part, draw), images(part, draw)
    weight, bias = torch.rand(shape.channels, generator=draw) + 0.5, torch.randn(shape.channels, generator=draw)

    def results(dtype: torch.dtype, stock: bool) -> list[Tensor]:
        own = [one.to(dtype).requires_grad_() for one in (x, weight, bias)]
        if stock:
            y = STOCK[shape.act](functional.batch_norm(own[0], None, None, own[1], own[2], True, 0.0, _EPS))
        else:
            y = batch_norm_then(own[0], own[1], own[2], None, None, True, 0.0, _EPS, shape.act)
        return [y.detach(), *torch.autograd.grad(y, own, gradient.to(dtype))]

    true = results(torch.float64, stock=True)
    own, stock = (max(map(relative_error, results(torch.float32, stock=one), true)) for one in (False, True))
    return own, stock


def images(shape: NormShape, draw: torch.Generator | None = None) -> Tensor:
    """One random image of as many pixels as a norm has rows, channels last."""
    height = next(one for one in range(math.isqrt(shape.rows), 0, -1) if shape.rows % one == 0)
    sizes = (1, shape.channels, height, shape.rows // height)
    return torch.randn(sizes, generator=draw).contiguous(memory_format=torch.channels_last)
