"""Codec `terngrad`: gradients as three values on a scale that all workers share, whose sum over K workers is exact.

TernGrad: Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
Learning", NeurIPS 2017. With w = max over workers and elements of |g_i|, agreed first (scaler sharing):

    t_i = sign(g_i) with probability |g_i| / w, else 0        mean gradient = w / K * sum over workers of t_i

Workers send 2 bits per element to the owner of a stripe. It sends the sum, a whole number from -K to K, in as many bits
as that takes: nothing is rounded again. Drawing adds no bias. Before it a layer's gradient is clipped to `clip` times
its root mean square, as in the paper, which makes w smaller and the result less noisy, but biased; `clip=0` is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.compress.codec import CHUNK, CODECS, Collective, LargeTensorCodec, Round, TensorSpec
from hybridpar.compress.packing import Fields, aligned, pack_pairs, pair_table, pairs_size, unpack_pairs
from hybridpar.compress.quantised import cut_stripes
from hybridpar.compress.scaled import ScaledCoder
from hybridpar.errors import UsageError

#: Codes of 2 bits that fill a word; chunks begin at multiples of it.
_UNIT = 16


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

    clip: float = 2.5
    least: int = 1000
    name = "terngrad"
    stateful = True
    takes_feedback = False

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Clipping is a bias, drawing is none."""
        return self.clip > 0

    def __post_init__(self) -> None:
        if self.clip and not 1 <= self.clip < math.inf:
            raise UsageError(f"clip={self.clip:g}", "Below 1 all elements could be clipped.", "Use 2.5, or 0 for none.")
        super().__post_init__()

    def bind(self, spec: TensorSpec) -> TernaryCoder:
        return TernaryCoder(spec, self.clip)


class TernaryCoder(ScaledCoder):
    """Agrees on a scale, then adds codes at the owners of stripes."""

    def __init__(self, spec: TensorSpec, clip: float) -> None:
        self._stripes = cut_stripes(spec.count, _UNIT, spec.workers)
        self._sums = [Fields.dense(stop - start, 2 * spec.workers) for start, stop in self._stripes]
        codes = tuple(aligned(pairs_size(stop - start)) for start, stop in self._stripes)
        merged = tuple(aligned(fields.bytes) for fields in self._sums)
        super().__init__(spec, [Round(Collective.SHARD, torch.uint8, codes, merged)])
        self._clip = clip
        self._table = pair_table(spec.device)

    def _write_codes(self, index: int, parts: Sequence[Tensor]) -> None:
        self._noise.draw(self.spec.count, self._scratch)
        for (start, stop), out in zip(self._stripes, parts, strict=True):
            for first in range(start, stop, CHUNK):
                values = self._values[first : min(first + CHUNK, stop)]
                at = (first - start) // 4
                self._encode(values, out[at : at + pairs_size(values.numel())])

    def merge(self, index: int, received: Sequence[Tensor], out: Tensor) -> None:
        fields = self._sums[self.spec.rank]

        def total(start: int, stop: int, into: Tensor) -> None:
            into.fill_(self.spec.workers)
            whole = start // _UNIT * _UNIT
            for message in received:
                codes = unpack_pairs(message[whole // 4 :], stop - whole, self._table, self._scratch)
                into.add_(codes[start - whole :])

        fields.pack(out[: fields.bytes].view(fields.word), total, self._scratch)

    def finish(self, out: Tensor) -> None:
        for (begin, end), fields, message in zip(self._stripes, self._sums, self._received, strict=True):
            stripe = out[begin:end]

            def put(start: int, stop: int, sums: Tensor, stripe: Tensor = stripe) -> None:
                sums.sub_(self.spec.workers).div_(self.spec.divisor)
                torch.mul(sums, self._scale, out=stripe[start:stop])

            fields.unpack(message[: fields.bytes].view(fields.word), put, self._scratch)

    def _write_scale(self, out: Tensor) -> None:
        """The largest magnitude after clipping; infinite where a value is not finite."""
        super()._write_scale(out)
        if self._clip:
            square = torch.linalg.vector_norm(self._values, dtype=torch.float64).square() / self.spec.count
            limit = (self._clip * square.sqrt()).to(out.dtype)
            out.copy_(torch.where(out.isfinite(), torch.minimum(out, limit), out))

    def _encode(self, values: Tensor, out: Tensor) -> None:
        """Draw codes and pack them. A clipped value is at least as large as the scale, and is sent for certain."""
        count = values.numel()
        magnitudes = torch.div(values, self._divisor, out=self._scratch.take("half", count)).abs_()
        sent = self._scratch.take("sent", count, torch.bool)
        positive = self._scratch.take("positive", count, torch.bool)
        torch.gt(magnitudes, self._noise.take(count), out=sent)
        torch.gt(values, 0.0, out=positive)
        pack_pairs(sent, positive.logical_and_(sent), out, self._scratch)
