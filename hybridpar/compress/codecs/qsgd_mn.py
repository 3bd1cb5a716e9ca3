"""Codecs `qsgd_mn`, `qsgd_mn_ts`, `qsgd_mn_ms`, `grandk_mn` and `terngrad`: stochastic rounding to grids with a common
scale.

All begin with a round in which the largest magnitude w of all workers and elements is reduced by maximum. Then codes
are whole numbers on one grid, so that they can be added on the way.

QSGD-MaxNorm: Vineeth S, "Quantization for Distributed Optimization", arXiv 2109.12497; QSGD: Alistarh, Grubic, Li,
Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017. With b bits
and s = 2**b - 1 levels:

    q_i = floor(s g_i / w + u_i), u_i uniform in [0, 1)        mean gradient = w / (s K) * sum over workers of q_i

E[q_i] = s g_i / w, so it is unbiased and needs no error feedback; the variance of a worker's element is at most
(w / s)**2 / 4. Codes are whole numbers from -s to s. There are two ways for them to meet:

* `sum`: w is agreed first, 4 bytes. Codes are sent as q + s in fields so wide that the sum of K of them fits, which is
  log2(2 s K) bits rounded up, packed into words (`hybridpar.compress.packing`). No field ever carries into the next.
* `shard`: each stripe has a scale of its own and fields of b + 1 bits whatever K is; its owner adds in float32 and
  rounds again.

With several scales (Vineeth S, "Unbiased Single-scale and Multi-scale Quantizers for Distributed Optimization", arXiv
2109.12497) grid l has s_l = 2**b_l - 1 steps from zero to w, with b_0 < b_1 < ...; two of them are `qsgd_mn_ts`. An
element uses the finest grid on which all workers' values are at most s_0 steps from zero:

    m_i = min over workers of max {l: s_l |g_i| <= s_0 w}        q_i = floor(s g_i / w + u_i), s of grid m_i

Codes are no longer than those of the coarsest grid. As s_l grows with l, m_i is a row of ones and then zeros, one bit
per finer grid; the minimum over the workers is their bitwise and. Whether an element is small is asked before it is
rounded: asked after, as the author's code does, elements just above the limit would use the finer grid when they
happen to be rounded down, which is a bias.

GlobalRandK-MaxNorm (the first of these papers): all elements of a parameter stand in a queue, in an order drawn from a
seed that workers share. Each step sends the next k of them, rounded to one grid, or to several with `levels=4/8`; when
the queue is empty it is drawn anew. So each element goes exactly once in ceil(N / k) steps. With error feedback the
others wait in the residual, and so does what was rounded off. Elements that do not go are 0 on all workers: had each
its own gradient there instead, as in the author's code, replicas would drift apart. Without error feedback what is sent
is multiplied with N / k, which makes the result unbiased, and noisy.

TernGrad: Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
Learning", NeurIPS 2017: t_i = sign(g_i) with probability |g_i| / w, else 0. That is `qsgd_mn:bits=1`. Before it a
layer's gradient is clipped to `clip` times its root mean square, as in the paper, which makes w smaller and the result
less noisy, but biased; `clip=0` is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import CODECS, Coder, Collective, LargeTensorCodec, Round, TensorSpec
from hybridpar.compress.codecs.qsgd import LevelQuantiser, RoundingCodec, write_scale
from hybridpar.compress.codecs.topk import share
from hybridpar.compress.memory import WORKER
from hybridpar.compress.packing import Fields, Noise, bits_size, magnitude, pack_bits, slices, unpack_bits
from hybridpar.compress.quantised import Compiled, QuantisedCoder, cut_stripes
from hybridpar.errors import check
from hybridpar.spec import AT_LEAST_0, AT_MOST_1, between

#: What bits of grids must be; see `steps_of`.
BITS = between(1, 16)


def steps_of(codec: str, bits: Sequence[int]) -> tuple[int, ...]:
    """Steps from zero to the scale of grids of so many bits that a codec was given, which come coarsest first."""
    ascending = all(left < right for left, right in pairwise(bits))
    what = f"codec {codec!r}: grids of {'/'.join(map(str, bits))} bits"
    check(ascending and bits[0] <= 8, what, "They go from coarse to fine, the first of 8 at most.", "Use 4 and 8 bits.")
    return tuple(2**width - 1 for width in bits)


class GridsCoder(Coder):
    """Agrees on a scale, then on a grid for each element, then adds codes.

    Args:
        spec: The parameter.
        steps: From zero to the scale, of each grid, coarsest first.
        rounding: How values are rounded, see `Noise`.
        count: How many values are sent in a step; as many as the parameter has if it is not given.
    """

    def __init__(self, spec: TensorSpec, steps: Sequence[int], rounding: str = "random", count: int = 0) -> None:
        self._count = count or spec.count
        self._coarse, self._finer = steps[0], tuple(steps[1:])
        self._gains = [right - left for left, right in pairwise(steps)]
        self._fields = Fields.summable(self._count, 2 * self._coarse, spec.workers)
        planes = len(self._finer) * bits_size(self._count)
        agree = [Round(Collective.AND, torch.uint8, (planes,))] if planes else []
        scale = Round(Collective.MAX, torch.float32, (1,))
        super().__init__(spec, [scale, *agree, Round(Collective.SUM, self._fields.word, (self._fields.words,))])
        self.residuals = {WORKER: range(spec.count)}
        self._noise = Noise(spec, rounding)
        self._values = self._scale = self._divisor = self._planes = torch.empty(0)

    def _begin(self) -> None:
        """Take what is to be sent in the step."""
        self._noise.begin(self.steps)
        self._values = self.memory[WORKER].take(self.gradient)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        (out,) = parts
        if index == 0:
            self._begin()
            self._write_scale(out)
        elif index < len(self.rounds) - 1:
            self._write_what_is_small(out)
        else:
            self._noise.draw(self._fields.words, self.scratch)
            by_kernel = self._noise.random and not self.memory[WORKER].keeps and not self._finer
            numbers = self._noise, self._coarse, self._fields, out
            if not (by_kernel and kernels.qsgd_encode(self._values, self._scale, *numbers)):
                self._fields.pack(out, self._code, self.scratch)

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        if index == 0:
            self._scale = parts[0]
            # Dividing first makes the largest value exactly 1, and a denormal scale harmless.
            self._divisor = torch.where(self._scale > 0, self._scale, 1.0)
        elif index < len(self.rounds) - 1:
            self._planes = parts[0].view(len(self._finer), -1)
        else:
            super().read(index, parts)

    def finish(self, out: Tensor) -> None:
        zero, unit = self.spec.workers * self._coarse, self.spec.divisor * self._coarse
        (words,) = self.messages
        if not self._finer and kernels.qsgd_read(words, self._scale, self._fields, zero, unit, out, add=False):
            return

        def use(start: int, stop: int, sums: Tensor) -> None:
            sums.sub_(zero).div_(self._steps(start, stop).mul_(self.spec.divisor))
            torch.mul(sums, self._scale, out=out[start:stop])

        self._fields.unpack(words, use, self.scratch)

    def _write_scale(self, out: Tensor) -> None:
        """Write this worker's scale; infinite where a value is not finite."""
        write_scale(self._values, out)

    def _code(self, start: int, stop: int, into: Tensor) -> None:
        values, steps = self._values[start:stop], self._steps(start, stop)
        torch.div(values, self._divisor, out=into)
        self._noise.round_(into.mul_(steps))
        into.clamp_(max=self._coarse)
        if self.memory[WORKER].keeps:
            values.sub_(torch.div(into, steps).mul_(self._scale))
        into.add_(self._coarse)

    def _write_what_is_small(self, out: Tensor) -> None:
        planes = out.view(len(self._finer), -1)
        for part in slices(self._count):
            ratios = self._values[part] / self._divisor
            for plane, steps in zip(planes, self._finer, strict=True):
                small = (ratios * steps).abs_() <= self._coarse
                pack_bits(small, plane[part.start // 8 : bits_size(part.stop)])

    def _steps(self, start: int, stop: int) -> Tensor:
        """Steps of the grid that each element of a range uses, float32."""
        steps = self.scratch.take("steps", stop - start).fill_(self._coarse)
        first = start // 8 * 8
        for plane, gain in zip(self._planes, self._gains, strict=True):
            bits = unpack_bits(plane[first // 8 : bits_size(stop)], stop - first)
            steps.add_(bits[start - first :], alpha=gain)
        return steps


@CODECS.register("qsgd_mn", "QSGD-MaxNorm: unbiased rounding to 2**bits - 1 levels of one agreed scale")
@dataclass(frozen=True, kw_only=True)
class QsgdMaxNorm(Compiled, RoundingCodec):
    """Stochastic rounding on a grid that all workers share.

    Attributes:
        bits: The grid has 2**bits - 1 steps from zero to the largest element.
        meet: `sum`: one scale is agreed, and fields are so wide that a sum fits; `shard`: each stripe has a scale, and
            its owner adds and rounds again, in fewer bits.
    """

    bits: Annotated[int, between(1, 8)] = 4
    meet: Literal["sum", "shard"] = "sum"

    def coder(self, spec: TensorSpec) -> Coder:
        steps = 2**self.bits - 1
        if self.meet == "sum":
            return GridsCoder(spec, (steps,), self.rounding)
        return QuantisedCoder(spec, LevelQuantiser(steps, Noise(spec, self.rounding)), "shard")


@CODECS.register("qsgd_mn_ts", "QSGD-MaxNorm with two scales: a finer grid for what is small on all workers")
@dataclass(frozen=True, kw_only=True)
class QsgdTwoScale(Compiled, LargeTensorCodec):
    """Stochastic rounding on two grids that all workers share.

    Attributes:
        bits: The coarse grid has 2**bits - 1 steps from zero to the largest element.
        high: The fine one has 2**high - 1.
    """

    bits: Annotated[int, BITS] = 4
    high: Annotated[int, BITS] = 8
    biased = False

    def __post_init__(self) -> None:
        steps_of(self.name, (self.bits, self.high))

    def coder(self, spec: TensorSpec) -> GridsCoder:
        return GridsCoder(spec, steps_of(self.name, (self.bits, self.high)))


@CODECS.register(
    "qsgd_mn_ms", "QSGD-MaxNorm with several scales: the smaller an element everywhere, the finer its grid"
)
@dataclass(frozen=True, kw_only=True)
class QsgdMultiScale(Compiled, LargeTensorCodec):
    """Stochastic rounding on several grids that all workers share.

    Attributes:
        levels: Bits of the grids, coarsest first: `4/6/8` are 15, 63 and 255 steps from zero to the largest element.
    """

    levels: tuple[Annotated[int, BITS], ...] = (4, 6, 8)
    biased = False

    def __post_init__(self) -> None:
        steps_of(self.name, self.levels)

    def coder(self, spec: TensorSpec) -> GridsCoder:
        return GridsCoder(spec, steps_of(self.name, self.levels))


@CODECS.register(
    "terngrad",
    "TernGrad: minus, nothing or plus the agreed largest magnitude, drawn; biased by its clipping unless clip=0",
)
@dataclass(frozen=True, kw_only=True)
class TernGrad(Compiled, LargeTensorCodec):
    """Three values, drawn.

    Attributes:
        clip: Elements are made no larger than so many times the root mean square of their layer; 0 for no clipping.
    """

    clip: Annotated[float, AT_LEAST_0] = 2.5
    takes_feedback = False

    def __post_init__(self) -> None:
        # Below 1 all elements could be clipped.
        check(self.clip == 0 or self.clip >= 1, f"terngrad:clip={self.clip:g}", "It must be 0 for none, or at least 1.")

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Clipping is a bias, drawing is none."""
        return self.clip > 0

    def coder(self, spec: TensorSpec) -> TernaryCoder:
        return TernaryCoder(spec, self.clip)


class TernaryCoder(GridsCoder):
    """A grid with a single step, of a scale that clipping has made smaller."""

    def __init__(self, spec: TensorSpec, clip: float) -> None:
        super().__init__(spec, (1,))
        self._clip = clip

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        """What is larger than the scale is sent as the scale, for certain."""
        super().read(index, parts)
        if index == 0 and self._clip:
            self._values = torch.clamp(self._values, -self._scale, self._scale)

    def _write_scale(self, out: Tensor) -> None:
        """The largest magnitude after clipping; infinite where a value is not finite."""
        super()._write_scale(out)
        if self._clip:
            square = torch.linalg.vector_norm(self._values, dtype=torch.float64).square() / self.spec.count
            limit = (self._clip * square.sqrt()).to(out.dtype)
            out.copy_(torch.where(out.isfinite(), torch.minimum(out, limit), out))


@CODECS.register("grandk_mn", "GlobalRandK-MaxNorm: the next elements of a queue that all workers share, rounded")
@dataclass(frozen=True, kw_only=True)
class GlobalRandomK(Compiled, LargeTensorCodec):
    """Elements in turn, on a grid that all workers share.

    Attributes:
        rate: Share of a parameter's elements that is sent.
        levels: Bits of the grid, or of several grids as in `qsgd_mn_ms`.
    """

    rate: Annotated[float, AT_MOST_1] = 0.01
    levels: tuple[Annotated[int, BITS], ...] = (4,)
    reads_state = True
    feedback: bool = True

    def __post_init__(self) -> None:
        steps_of(self.name, self.levels)

    def coder(self, spec: TensorSpec) -> QueueCoder:
        return QueueCoder(spec, self.rate, steps_of(self.name, self.levels), scaled=not self.feedback)


class QueueCoder(GridsCoder):
    """Sends the next elements of a queue; `scaled` makes their mean over the steps that of the gradients."""

    def __init__(self, spec: TensorSpec, rate: float, steps: Sequence[int], *, scaled: bool) -> None:
        self._scaled = scaled
        turns = math.ceil(spec.count / share(rate, spec.count))
        self._turns = cut_stripes(spec.count, 1, turns)  # the first ones may be longer by an element
        super().__init__(spec, steps, count=math.ceil(spec.count / turns))
        self._queue, self._drawn = torch.empty(0), -1
        self._picked = torch.zeros(self._count, dtype=torch.float32, device=spec.device)
        self._all = torch.empty(0)

    def _begin(self) -> None:
        super()._begin()
        self._all, indices = self._values, self._next()
        self._values = self._picked.zero_()
        picked = self._picked[: indices.numel()]
        torch.index_select(self._all, 0, indices, out=picked)
        # A number that is not finite is seen by all in the step in which it comes, whoever's turn it is: 0 or NaN.
        picked.add_(magnitude(self.gradient) * 0)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        super().write(index, parts)
        if self.memory[WORKER].keeps and index == len(self.rounds) - 1:
            indices = self._next()
            self._all.index_copy_(0, indices, self._picked[: indices.numel()])

    def finish(self, out: Tensor) -> None:
        super().finish(self._picked)
        indices = self._next()
        if self._scaled:
            self._picked.mul_(len(self._turns))
        out.zero_()
        out.index_copy_(0, indices, self._picked[: indices.numel()])

    def _next(self) -> Tensor:
        """Indices of the elements whose turn it is, equal on all workers."""
        queue, turn = divmod(self.steps, len(self._turns))
        if queue != self._drawn:
            draw = torch.Generator().manual_seed(self.spec.draw_seed("queue", queue))
            order = torch.randperm(self.spec.count, generator=draw, dtype=torch.int32, device="cpu")
            self._queue, self._drawn = order.to(self.spec.device), queue
        start, stop = self._turns[turn]
        return self._queue[start:stop].to(torch.int64)
