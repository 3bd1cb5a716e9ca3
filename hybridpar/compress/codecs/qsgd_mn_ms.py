"""Codec `qsgd_mn_ms`: QSGD-MaxNorm with several grids, finer ones for elements that are small on all workers.

QSGD-MaxNorm with several scales: Vineeth S, "Unbiased Single-scale and Multi-scale Quantizers for Distributed
Optimization", arXiv 2109.12497. Grid l has s_l = 2**b_l - 1 steps from zero to the agreed scale w, with b_0 < b_1 < ...
An element uses the finest grid on which all workers' values are at most s_0 steps from zero:

    m_i = min over workers of max {l: s_l |g_i| <= s_0 w}        q_i = floor(s g_i / w + u_i), s of grid m_i

Codes are no longer than those of the coarsest grid. As s_l grows with l, m_i is a row of ones and then zeros, one bit
per finer grid; the minimum over the workers is their bitwise and. Whether an element is small is asked before it is
rounded, for the reason that `qsgd_mn_ts` gives, which is the case of two grids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import CHUNK, CODECS, WORKER, Collective, LargeTensorCodec, Round, TensorSpec
from hybridpar.compress.packing import Fields, bits_size, pack_bits, unpack_bits
from hybridpar.compress.scaled import ScaledCoder
from hybridpar.errors import UsageError


@CODECS.register(
    "qsgd_mn_ms", "QSGD-MaxNorm with several scales: the smaller an element everywhere, the finer its grid"
)
@dataclass(frozen=True)
class QsgdMultiScale(LargeTensorCodec):
    """Stochastic rounding on several grids that all workers share.

    Attributes:
        levels: Bits of the grids, coarsest first: `4/6/8` are 15, 63 and 255 steps from zero to the largest element.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    levels: str = "4/6/8"
    least: int = 1000
    name = "qsgd_mn_ms"
    biased = False
    stateful = True

    def __post_init__(self) -> None:
        read_levels(self.levels)
        super().__post_init__()

    def bind(self, spec: TensorSpec) -> GridsCoder:
        return GridsCoder(spec, read_levels(self.levels))


def read_levels(text: str) -> tuple[int, ...]:
    """Steps of the grids that a text such as `4/8` names by their bits, coarsest first."""
    try:
        bits = [int(part) for part in text.split("/")]
    except ValueError:
        bits = []
    ascending = all(left < right for left, right in pairwise(bits))
    if not bits or not 1 <= bits[0] <= 8 or bits[-1] > 16 or not ascending or text != "/".join(map(str, bits)):
        raise UsageError(
            f"levels={text}", "Bits of grids, from coarse to fine: the first 1 to 8, the last up to 16.", "Use 4/8."
        )
    return tuple(2**width - 1 for width in bits)


class GridsCoder(ScaledCoder):
    """Agrees on a scale, then on a grid for each element, then adds codes.

    It has no error feedback of its own; where it is given a residual to keep it leaves v - C(v) there.
    """

    def __init__(self, spec: TensorSpec, steps: Sequence[int], rounding: str = "random") -> None:
        self._coarse, self._finer = steps[0], tuple(steps[1:])
        self._gains = [right - left for left, right in pairwise(steps)]
        self._fields = Fields.summable(spec.count, 2 * self._coarse, spec.workers)
        self._plane = bits_size(spec.count)
        agree = (Round(Collective.AND, torch.uint8, (len(self._finer) * self._plane,)),) if self._finer else ()
        super().__init__(spec, (*agree, Round(Collective.SUM, self._fields.word, (self._fields.words,))), rounding)
        self.residuals = {WORKER: spec.count}
        self._planes = torch.empty(0)

    def _write_codes(self, index: int, parts: Sequence[Tensor]) -> None:
        (out,) = parts
        if index == len(self._rounds) - 1:
            self._noise.draw(self._fields.words, self._scratch)
            if not self._by_kernel(out):
                self._fields.pack(out, self._code, self._scratch)
        else:
            self._say_what_is_small(out)

    def _read_codes(self, index: int, parts: Sequence[Tensor]) -> None:
        super()._read_codes(index, parts)
        if index < len(self._rounds) - 1:
            self._planes = parts[0]

    def finish(self, out: Tensor) -> None:
        zero, unit = self.spec.workers * self._coarse, self.spec.divisor * self._coarse
        given = self._received[0], self._scale, self._fields, zero, unit, out, self._scratch
        if not self._finer and kernels.qsgd_read(*given, add=False):
            return

        def put(start: int, stop: int, sums: Tensor) -> None:
            sums.sub_(zero).div_(self._steps(start, stop).mul_(self.spec.divisor))
            torch.mul(sums, self._scale, out=out[start:stop])

        self._fields.unpack(self._received[0], put, self._scratch)

    def _by_kernel(self, out: Tensor) -> bool:
        """Write codes in one pass, on one grid, where nothing is kept."""
        if self._finer or self._residual.keeps or not self._noise.random:
            return False
        given = self._values, self._scale, self._noise, self._coarse, self._fields, out, self._scratch
        return kernels.qsgd_encode(*given)

    def _code(self, start: int, stop: int, into: Tensor) -> None:
        values, steps = self._values[start:stop], self._steps(start, stop)
        torch.div(values, self._divisor, out=into)
        self._noise.round_(into.mul_(steps))
        into.clamp_(max=self._coarse)
        if self._residual.keeps:
            sent = torch.div(into, steps, out=self._scratch.take("position", stop - start))
            values.sub_(sent.mul_(self._scale))
        into.add_(self._coarse)

    def _say_what_is_small(self, out: Tensor) -> None:
        for start in range(0, self.spec.count, CHUNK):
            values = self._values[start : start + CHUNK]
            count, at = values.numel(), start // 8
            for grid, steps in enumerate(self._finer):
                position = torch.div(values, self._divisor, out=self._scratch.take("position", count))
                small = self._scratch.take("small", count, torch.bool)
                torch.le(position.mul_(steps).abs_(), self._coarse, out=small)
                pack_bits(small, self._of_grid(out, grid)[at : at + bits_size(count)])

    def _steps(self, start: int, stop: int) -> Tensor:
        """Steps of the grid that each element of a range uses, float32."""
        steps = self._scratch.take("steps", stop - start).fill_(self._coarse)
        whole = start // 8 * 8
        for grid, gain in enumerate(self._gains):
            packed = self._of_grid(self._planes, grid)[whole // 8 : bits_size(stop)]
            steps.add_(unpack_bits(packed, stop - whole)[start - whole :], alpha=gain)
        return steps

    def _of_grid(self, planes: Tensor, grid: int) -> Tensor:
        return planes[grid * self._plane : (grid + 1) * self._plane]
