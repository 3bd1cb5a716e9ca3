"""Codec `terngrad`: gradients as three values on a scale that all workers share, whose sum over K workers is exact.

TernGrad: Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
Learning", NeurIPS 2017. With w = max over workers and elements of |g_i|, agreed first (scaler sharing):

    t_i = sign(g_i) with probability |g_i| / w, else 0        mean gradient = w / K * sum over workers of t_i

That is `qsgd_mn:bits=1`, whose codes are added in as many bits as their sum takes: nothing is rounded again. Drawing
adds no bias. Before it a layer's gradient is clipped to `clip` times
its root mean square, as in the paper, which makes w smaller and the result less noisy, but biased; `clip=0` is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hybridpar.compress.agreed import GridsCoder
from hybridpar.compress.codec import CODECS, LargeTensorCodec, TensorSpec
from hybridpar.errors import check
from hybridpar.spec import AT_LEAST_0, AT_LEAST_1


@CODECS.register(
    "terngrad",
    "TernGrad: minus, nothing or plus the agreed largest magnitude, drawn; biased by its clipping unless clip=0",
)
@dataclass(frozen=True)
class TernGrad(LargeTensorCodec):
    """Three values, drawn.

    Attributes:
        clip: Elements are made no larger than so many times the root mean square of their layer; 0 for no clipping.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    clip: Annotated[float, AT_LEAST_0] = 2.5
    least: Annotated[int, AT_LEAST_1] = 1000
    kernels = ("cpu", "cuda")
    takes_feedback = False

    def __post_init__(self) -> None:
        # Below 1 all elements could be clipped.
        check(self.clip == 0 or self.clip >= 1, f"terngrad:clip={self.clip:g}", "It must be 0 for none, or at least 1.")

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Clipping is a bias, drawing is none."""
        return self.clip > 0

    def bind(self, spec: TensorSpec) -> TernaryCoder:
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
