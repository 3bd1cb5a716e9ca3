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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, Self

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS, Coder, LargeTensorCodec, TensorSpec
from hybridpar.compress.memory import WORKER
from hybridpar.compress.sparse import Picks, largest, share
from hybridpar.spec import AT_LEAST_1, AT_MOST_1


@CODECS.register("topk", "top-k: the largest elements of each worker with their places, error feedback")
@dataclass(frozen=True, kw_only=True)
class TopK(LargeTensorCodec):
    """The largest elements of each parameter.

    Attributes:
        rate: Share of a parameter's elements that is sent.
        scope: Of what they are the largest: `layer` or `bucket`, see above.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    rate: Annotated[float, AT_MOST_1] = 0.01
    scope: Literal["layer", "bucket"] = "layer"
    least: Annotated[int, AT_LEAST_1] = 1000
    feedback: bool = True
    castable = True

    def coder(self, spec: TensorSpec) -> LargestCoder:
        picked = share(self.rate, spec.count)
        if self.scope == "bucket":
            return LargestOfBucketCoder(spec, Picks(spec, spec.count, picked, reach=1 << 31))
        return LargestCoder(spec, Picks(spec, spec.count, picked))


class LargestCoder(Coder):
    """Sends the largest elements of v."""

    def __init__(self, spec: TensorSpec, picks: Picks) -> None:
        super().__init__(spec, [picks.round])
        self._picks = picks
        self.residuals = {WORKER: range(spec.count)}
        self._values = torch.empty(0)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        self._values = self.memory[WORKER].take(self.gradient)
        indices = largest(self._values, self._picks.picked, self.scratch)
        values = self._values.index_select(0, indices)
        left = values - self._picks.write(values, indices, parts[0])
        if self.memory[WORKER].keeps:
            self._values.index_copy_(0, indices, left)

    def finish(self, out: Tensor) -> None:
        self._picks.read(self.messages, out, self.spec.divisor)


class LargestOfBucketCoder(LargestCoder):
    """Sends the elements of v that are largest among those of all coders that write with it.

    Those whose elements travel among zeros, as that takes no more bytes, choose for themselves.
    """

    _bucket: _Bucket | None = None

    @classmethod
    def write_together(cls, coders: Sequence[Self], index: int, parts: Sequence[Sequence[Tensor]]) -> None:
        together = []
        for coder, mine in zip(coders, parts, strict=True):
            if coder._picks.dense:
                coder.write(index, mine)
            else:
                coder._values = coder.memory[WORKER].take(coder.gradient)
                together.append((coder, mine[0]))
        if not together:
            return
        bucket = _Bucket([coder for coder, _ in together])
        v = torch.cat([coder._values for coder in bucket.coders])
        room = [coder._picks.picked for coder in bucket.coders]
        indices = largest(v, sum(room), together[0][0].scratch)
        values = v.index_select(0, indices)
        sent = [  # a message has any elements, not those of its coder alone
            coder._picks.write(mine, where, out)
            for (coder, out), mine, where in zip(
                together, torch.split(values, room), torch.split(indices, room), strict=True
            )
        ]
        v.index_copy_(0, indices, values - torch.cat(sent))
        for member, left in zip(bucket.coders, torch.split(v, bucket.counts), strict=True):
            member._bucket = bucket
            if member.memory[WORKER].keeps:
                member._values.copy_(left)

    def finish(self, out: Tensor) -> None:
        if self._bucket is None:
            super().finish(out)
        else:
            out.copy_(self._bucket.results[self])


class _Bucket:
    """The coders that wrote together in a step."""

    def __init__(self, coders: Sequence[LargestOfBucketCoder]) -> None:
        self.coders = coders
        self.counts = [coder.spec.count for coder in coders]

    @cached_property
    def results(self) -> dict[LargestOfBucketCoder, Tensor]:
        """What came of each."""
        spec = self.coders[0].spec
        out = torch.zeros(sum(self.counts), dtype=torch.float32, device=spec.device)
        for messages in zip(*(coder.messages for coder in self.coders), strict=True):  # by rank
            for coder, message in zip(self.coders, messages, strict=True):
                coder._picks.add_to(message, out, spec.divisor)
        return dict(zip(self.coders, torch.split(out, self.counts), strict=True))
