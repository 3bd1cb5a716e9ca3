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

from dataclasses import dataclass
from typing import Annotated

from hybridpar.compress.agreed import BITS, GridsCoder, check_grids, steps_of
from hybridpar.compress.codec import CODECS, LargeTensorCodec, TensorSpec
from hybridpar.spec import AT_LEAST_1


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

    levels: tuple[Annotated[int, BITS], ...] = (4, 6, 8)
    least: Annotated[int, AT_LEAST_1] = 1000
    kernels = ("cpu", "cuda")
    biased = False

    def __post_init__(self) -> None:
        check_grids(self.name, self.levels)

    def bind(self, spec: TensorSpec) -> GridsCoder:
        return GridsCoder(spec, steps_of(self.levels))
