"""Codec `qsgd_mn_ts`: QSGD-MaxNorm with two grids, the finer one for elements that are small on all workers.

QSGD-MaxNorm with two scales: Vineeth S, "Unbiased Single-scale and Multi-scale Quantizers for Distributed
Optimization", arXiv 2109.12497. There are two grids of s_lo = 2**bits - 1 and s_hi = 2**high - 1 steps from zero to the
agreed scale w. An element that is small on all workers uses the finer one:

    m_i = and over workers of [s_hi |g_i| <= s_lo w]        q_i = floor(s_i g_i / w + u_i), s_i = s_hi if m_i else s_lo

Either way |q_i| <= s_lo, so codes are no longer than those of the coarse grid alone, and one more bit per element goes
into agreeing on m. Whether an element is small is asked before it is rounded: asked after, as the author's code does,
elements just above the limit would use the finer grid when they happen to be rounded down, which is a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hybridpar.compress.agreed import BITS, GridsCoder, check_grids, steps_of
from hybridpar.compress.codec import CODECS, LargeTensorCodec, TensorSpec
from hybridpar.spec import AT_LEAST_1


@CODECS.register("qsgd_mn_ts", "QSGD-MaxNorm with two scales: a finer grid for what is small on all workers")
@dataclass(frozen=True)
class QsgdTwoScale(LargeTensorCodec):
    """Stochastic rounding on two grids that all workers share.

    Attributes:
        bits: The coarse grid has 2**bits - 1 steps from zero to the largest element.
        high: The fine one has 2**high - 1.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    bits: Annotated[int, BITS] = 4
    high: Annotated[int, BITS] = 8
    least: Annotated[int, AT_LEAST_1] = 1000
    kernels = ("cpu", "cuda")
    biased = False

    def __post_init__(self) -> None:
        check_grids(self.name, (self.bits, self.high))

    def bind(self, spec: TensorSpec) -> GridsCoder:
        return GridsCoder(spec, steps_of((self.bits, self.high)))
