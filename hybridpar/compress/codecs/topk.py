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
from hybridpar.compress.sparse import Picks, largest
from hybridpar.spec import AT_MOST_1


@CODECS.register("topk", "top-k: the largest elements of each worker with their places, error feedback")
@dataclass(frozen=True)
class TopK(LargeTensorCodec):
    """The largest elements of each parameter.

    Attributes:
        rate: Share of a parameter's elements that is sent.
        scope: Of what they are the largest: `layer` or `bucket`, see above.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    rate: Annotated[float, AT_MOST_1] = 0.01
    scope: Literal["layer", "bucket"] = "layer"
    least: int = 1000
    name = "topk"
    biased = True
    feedback = True
    castable = True

    def bind(self, spec: TensorSpec) -> LargestCoder:
        if self.scope == "bucket":
            return LargestOfBucketCoder(spec, Picks.of(spec, self.rate, reach=1 << 31))
        return LargestCoder(spec, Picks.of(spec, self.rate))


class LargestCoder(Coder):
    """Sends the largest elements of v."""

    def __init__(self, spec: TensorSpec, picks: Picks) -> None:
        super().__init__(spec, [picks.round])
        self._picks = picks
        self.residuals = {WORKER: range(spec.count)}
        self._values = torch.empty(0)

    def begin(self, gradient: Tensor) -> None:
        self._values = self.memory[WORKER].take(gradient)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        indices = largest(self._values, self._picks.picked, self._scratch)
        values = self._values.index_select(0, indices)
        self._leave(indices, values - self._picks.write(values, indices, parts[0]))

    def finish(self, out: Tensor) -> None:
        self._picks.read(self._received, out, self.spec.divisor)

    def _leave(self, indices: Tensor, left: Tensor) -> None:
        if self.memory[WORKER].keeps:
            self._values.index_copy_(0, indices, left)


class LargestOfBucketCoder(LargestCoder):
    """Sends the elements of v that are largest among those of all coders that write with it.

    Those whose elements travel among zeros, as that takes no more bytes, choose for themselves.
    """

    def __init__(self, spec: TensorSpec, picks: Picks) -> None:
        super().__init__(spec, picks)
        self._bucket: _Bucket | None = None
        self._part = slice(0)

    @classmethod
    def write_together(cls, coders: Sequence[Self], index: int, parts: Sequence[Sequence[Tensor]]) -> None:
        together = []
        for coder, mine in zip(coders, parts, strict=True):
            if coder._picks.dense:
                coder.write(index, mine)
            else:
                together.append((coder, mine[0]))
        if not together:
            return
        members = [coder for coder, _ in together]
        bucket = _Bucket(members)
        v = torch.cat([coder._values for coder in members])
        indices = largest(v, sum(coder._picks.picked for coder in members), members[0]._scratch)
        values, sent, end, stop = v.index_select(0, indices), [], 0, 0
        for coder, out in together:  # a message has any elements, not those of its coder alone
            room = slice(stop, stop := stop + coder._picks.picked)
            sent.append(coder._picks.write(values[room], indices[room], out))
            coder._bucket, coder._part = bucket, slice(end, end := end + coder.spec.count)
        v.index_copy_(0, indices, values - torch.cat(sent))
        for coder in members:
            if coder.memory[WORKER].keeps:
                coder._values.copy_(v[coder._part])

    def finish(self, out: Tensor) -> None:
        if self._bucket is None:
            super().finish(out)
        else:
            out.copy_(self._bucket.result[self._part])


class _Bucket:
    """The coders that wrote together in a step."""

    def __init__(self, coders: Sequence[LargestOfBucketCoder]) -> None:
        self._coders = coders

    @cached_property
    def result(self) -> Tensor:
        """What came of all of them, 1-D."""
        spec = self._coders[0].spec
        out = torch.zeros(sum(coder.spec.count for coder in self._coders), dtype=torch.float32, device=spec.device)
        for messages in zip(*(coder._received for coder in self._coders), strict=True):  # by rank
            for coder, message in zip(self._coders, messages, strict=True):
                coder._picks.add_to(message, out, spec.divisor)
        return out
