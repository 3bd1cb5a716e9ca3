"""Why: most elements are far below the largest one, and on its grid they would be rounded to a few coarse values.

QSGD-MaxNorm with two scales: Vineeth S, "Unbiased Single-scale and Multi-scale Quantizers for Distributed
Optimization", arXiv 2109.12497. There are two grids of s_lo = 2**bits - 1 and s_hi = 2**high - 1 steps from zero to the
agreed scale w. An element that is small on all workers uses the finer one:

    m_i = and over workers of [s_hi |g_i| <= s_lo w]        q_i = floor(s_i g_i / w + u_i), s_i = s_hi if m_i else s_lo

Either way |q_i| <= s_lo, so codes are no longer than those of the coarse grid alone, and one more bit per element goes
into agreeing on m. Whether an element is small is asked before it is rounded: asked after, as the author's code does,
elements just above the limit would use the finer grid when they happen to be rounded down, which is a bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS, Codec, Meeting, Round, TensorSpec
from hybridpar.compress.codecs.qsgd_mn import scale_of
from hybridpar.compress.noise import Noise, NoisyCoder
from hybridpar.compress.packing import Fields, bits_size, pack_bits, unpack_bits
from hybridpar.compress.residual import NO_RESIDUAL, Residual
from hybridpar.compress.scratch import CHUNK
from hybridpar.errors import UsageError


@CODECS.register("qsgd_mn_ts", "QSGD-MaxNorm with two scales: a finer grid for what is small on all workers")
@dataclass(frozen=True)
class QsgdTwoScale(Codec):
    """Stochastic rounding on two grids that all workers share.

    Attributes:
        bits: The coarse grid has 2**bits - 1 steps from zero to the largest element.
        high: The fine one has 2**high - 1.
        least: Parameters with fewer elements travel in full precision; so do vectors.
    """

    bits: int = 4
    high: int = 8
    least: int = 1000
    name = "qsgd_mn_ts"
    biased = False
    stateful = True

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise UsageError(f"bits={self.bits}", "Codes have 1 to 8 bits.", "Use 4; for 16 bits there is bf16.")
        if not self.bits < self.high <= 16:
            raise UsageError(
                f"high={self.high} with bits={self.bits}", "The finer grid has more bits, at most 16.", "Use 8."
            )
        if self.least < 1:
            raise UsageError(f"least={self.least}", "It is a number of elements.", "Use 1 or more.")

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it is a matrix or more, and large enough."""
        return len(shape) > 1 and math.prod(shape) >= self.least

    def bind(self, spec: TensorSpec) -> TwoScale:
        """See `Codec`."""
        return TwoScale(spec, 2**self.bits - 1, 2**self.high - 1)


class TwoScale(NoisyCoder):
    """Agrees on a scale, then on which elements are small, then adds codes.

    Args:
        spec: The parameter.
        coarse: Steps of the coarse grid from zero to the scale.
        fine: Steps of the fine grid.
    """

    def __init__(self, spec: TensorSpec, coarse: int, fine: int) -> None:
        super().__init__(spec)
        self._noise = Noise(spec)
        self._coarse, self._fine = coarse, fine
        self._fields = Fields.summable(spec.count, 2 * coarse, spec.workers)
        self._rounds = (
            Round(Meeting.MAX, torch.float32, (1,)),
            Round(Meeting.AND, torch.uint8, (bits_size(spec.count),)),
            Round(Meeting.SUM, self._fields.word, (self._fields.words,)),
        )
        self._gradient = self._scale = self._divisor = self._small = self._words = torch.empty(0)

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The scale, the small ones, the codes."""
        return self._rounds

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        """See `Coder`."""
        self._gradient = gradient
        self._noise.begin()

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        """See `Coder`."""
        (out,) = parts
        if index == 0:
            out.copy_(scale_of(self._gradient))
        elif index == 1:
            self._say_which_are_small(out)
        else:
            self._noise.draw(self._fields.words, self._scratch)
            small = self._mask()

            def code(start: int, stop: int, into: Tensor) -> None:
                torch.div(self._gradient[start:stop], self._divisor, out=into)
                into.mul_(self._steps(small[start:stop])).add_(self._noise.take(stop - start))
                into.floor_().clamp_(max=self._coarse).add_(self._coarse)

            self._fields.pack(out, code, self._scratch)

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        """See `Coder`."""
        if index == 0:
            self._scale = parts[0]
            # Dividing first makes the largest value exactly 1, and a denormal scale harmless.
            self._divisor = torch.where(self._scale > 0, self._scale, 1.0)
        elif index == 1:
            self._small = parts[0]
        else:
            self._words = parts[0]

    def finish(self, out: Tensor) -> None:
        """See `Coder`."""
        small = self._mask()

        def put(start: int, stop: int, sums: Tensor) -> None:
            sums.sub_(self.spec.workers * self._coarse).div_(self._steps(small[start:stop])).div_(self.spec.divisor)
            torch.mul(sums, self._scale, out=out[start:stop])

        self._fields.unpack(self._words, put, self._scratch)

    def _say_which_are_small(self, out: Tensor) -> None:
        for start in range(0, self.spec.count, CHUNK):
            values = self._gradient[start : start + CHUNK]
            position = torch.div(values, self._divisor, out=self._scratch.take("position", values.numel()))
            small = self._scratch.take("small", values.numel(), torch.bool)
            torch.le(position.mul_(self._fine).abs_(), self._coarse, out=small)
            pack_bits(small, out[start // 8 : start // 8 + bits_size(values.numel())])

    def _mask(self) -> Tensor:
        """Which elements are small on all workers, bool."""
        mask = self._scratch.take("mask", self.spec.count, torch.bool)
        for start in range(0, self.spec.count, CHUNK):
            chunk = mask[start : start + CHUNK]
            packed = self._small[start // 8 : start // 8 + bits_size(chunk.numel())]
            chunk.copy_(unpack_bits(packed, chunk.numel()))
        return mask

    def _steps(self, small: Tensor) -> Tensor:
        """Steps of the grid that each element uses, float32."""
        steps = self._scratch.take("steps", small.numel())
        return steps.copy_(small).mul_(self._fine - self._coarse).add_(self._coarse)
