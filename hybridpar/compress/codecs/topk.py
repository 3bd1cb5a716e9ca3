"""Codec `topk`: the largest elements of each worker with their places, and error feedback.

Top-k sparsification with error feedback, as in Aji, Heafield, "Sparse Communication for Distributed Gradient Descent",
EMNLP 2017, and Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018: of v = g + r each worker sends the
k elements of largest magnitude with their places. Workers choose different ones, so messages are gathered, not added
(`hybridpar.compress.sparse`). |v - C(v)|**2 <= (1 - k / N) |v|**2.

With `scope=bucket` the k elements are the largest of all layers of a bucket, so that a layer with large gradients sends
more of them than one with small ones: GlobalTopK of Vineeth S, "Quantization for Distributed Optimization", arXiv
2109.12497, where the bucket is the model. A message then has room for the share of its own layer, which is filled with
elements of any layers, so that bytes do not depend on gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS, NO_RESIDUAL, WORKER, Coder, LargeTensorCodec, Residual, TensorSpec
from hybridpar.compress.sparse import Picks, check_rate, largest
from hybridpar.errors import check_choice

_SCOPES = ("layer", "bucket")


@CODECS.register("topk", "top-k: the largest elements of each worker with their places, error feedback")
@dataclass(frozen=True)
class TopK(LargeTensorCodec):
    """The largest elements of each parameter.

    Attributes:
        rate: Share of a parameter's elements that is sent.
        scope: Of what they are the largest: `layer` or `bucket`, see above.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    rate: float = 0.01
    scope: str = "layer"
    least: int = 1000
    name = "topk"
    biased = True
    feedback = True
    castable = True

    def __post_init__(self) -> None:
        check_rate(self.rate, 0.01)
        check_choice("scope", self.scope, _SCOPES, "It says of what elements are largest.")
        super().__post_init__()

    def bind(self, spec: TensorSpec) -> LargestCoder:
        if self.scope == "bucket":
            return LargestOfBucketCoder(spec, Picks.of(spec, self.rate, reach=1 << 31))
        return LargestCoder(spec, Picks.of(spec, self.rate))


class LargestCoder(Coder):
    """Sends the largest elements of v."""

    def __init__(self, spec: TensorSpec, picks: Picks) -> None:
        self._picks = picks
        super().__init__(spec, [picks.round])
        self.residuals = {WORKER: spec.count}
        self._values = torch.empty(0)

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        super().begin(gradient, residuals)
        self._values = self._residual.take(gradient, 0)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        places = largest(self._values, self._picks.picked, self._scratch)
        values = self._values.index_select(0, places)
        self._leave(places, values, self._picks.write(values, places, parts[0]))

    def finish(self, out: Tensor) -> None:
        self._picks.read(self._received, out, self.spec.divisor)

    def _leave(self, places: Tensor, values: Tensor, sent: Tensor) -> None:
        if self._residual.keeps:
            self._values.index_copy_(0, places, values - sent)


class LargestOfBucketCoder(LargestCoder):
    """Sends the elements of v that are largest among those of all coders that write with it.

    Those whose elements travel among zeros, as that takes no more bytes, choose for themselves.
    """

    def __init__(self, spec: TensorSpec, picks: Picks) -> None:
        super().__init__(spec, picks)
        self._team, self._start = _Team(()), 0

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        self.write_together([self], index, [parts])

    @classmethod
    def write_together(cls, coders: Sequence[Self], index: int, parts: Sequence[Sequence[Tensor]]) -> None:
        written = list(zip(coders, parts, strict=True))
        for coder, own in written:
            if coder._picks.dense:
                LargestCoder.write(coder, index, own)
        written = [(coder, own) for coder, own in written if not coder._picks.dense]
        if not written:
            return
        first, team = written[0][0], _Team([coder for coder, _ in written])
        ends = list(accumulate(coder.spec.count for coder, _ in written))
        every = torch.cat([coder._values for coder, _ in written], out=first._scratch.take("bucket", ends[-1]))
        places = largest(every, sum(coder._picks.picked for coder, _ in written), first._scratch)
        values, sent, taken = every.index_select(0, places), torch.empty_like(places, dtype=torch.float32), 0
        for coder, (out,) in written:  # any elements, not those of the coder alone
            room = slice(taken, taken := taken + coder._picks.picked)
            sent[room] = coder._picks.write(values[room], places[room], out)
        limits = torch.searchsorted(places, torch.tensor([0, *ends], device=places.device)).tolist()
        for (coder, _), end, mine in zip(written, ends, map(slice, limits, limits[1:]), strict=False):
            coder._team, coder._start = team, end - coder.spec.count
            coder._leave(places[mine] - coder._start, values[mine], sent[mine])

    def finish(self, out: Tensor) -> None:
        if self._picks.dense:
            super().finish(out)
            return
        out.zero_()
        limits = torch.tensor([self._start, self._start + self.spec.count], device=out.device)
        for values, places in self._team.received:
            start, stop = torch.searchsorted(places, limits).tolist()
            out.index_add_(0, places[start:stop] - self._start, values[start:stop] / self.spec.divisor)


class _Team:
    """Coders that wrote together in a step."""

    def __init__(self, coders: Sequence[LargestOfBucketCoder]) -> None:
        self._coders = coders

    @cached_property
    def received(self) -> list[tuple[Tensor, Tensor]]:
        """Values, float32, and their places in the bucket, ascending, of each worker by rank."""
        found = []
        for messages in zip(*(coder._received for coder in self._coders), strict=True):
            pairs = [coder._picks.parts(one) for coder, one in zip(self._coders, messages, strict=True)]
            found.append((torch.cat([one.float() for one, _ in pairs]), torch.cat([one.long() for _, one in pairs])))
        return found
