"""Codec `topk`: the largest elements of each worker with their places, and error feedback.

Top-k sparsification with error feedback, as in Aji, Heafield, "Sparse Communication for Distributed Gradient Descent",
EMNLP 2017, and Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018: of v = g + r each worker sends the
k elements of largest magnitude with their places. Workers choose different ones, so messages are gathered, not added
(`hybridpar.compress.sparse`). |v - C(v)|**2 <= (1 - k / N) |v|**2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS, NO_RESIDUAL, WORKER, Coder, LargeTensorCodec, Residual, TensorSpec
from hybridpar.compress.sparse import Picks, largest
from hybridpar.errors import UsageError


@CODECS.register("topk", "top-k: the largest elements of each worker with their places, error feedback")
@dataclass(frozen=True)
class TopK(LargeTensorCodec):
    """The largest elements of each parameter.

    Attributes:
        rate: Share of a parameter's elements that is sent.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    rate: float = 0.01
    least: int = 1000
    name = "topk"
    biased = True
    feedback = True
    castable = True

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise UsageError(f"rate={self.rate:g}", "It is a share, above 0 and at most 1.", "Use 0.01.")
        super().__post_init__()

    def bind(self, spec: TensorSpec) -> LargestCoder:
        return LargestCoder(spec, self.rate)


class LargestCoder(Coder):
    """Sends the largest elements of v.

    Args:
        spec: The parameter.
        rate: Share of its elements.
    """

    def __init__(self, spec: TensorSpec, rate: float) -> None:
        self._picks = Picks.of(spec, rate)
        super().__init__(spec, [self._picks.round])
        self.residuals = {WORKER: spec.count}
        self._values = torch.empty(0)

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        super().begin(gradient, residuals)
        self._values = self._residual.take(gradient, 0)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        places = largest(self._values, self._picks.picked, self._scratch)
        values = self._values.index_select(0, places)
        sent = self._picks.write(values, places, parts[0])
        if self._residual.keeps:
            self._values.index_copy_(0, places, values - sent)

    def finish(self, out: Tensor) -> None:
        self._picks.read(self._received, out, self.spec.divisor)
