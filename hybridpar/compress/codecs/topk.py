"""Codec `topk`: the largest elements of each worker with their places, and error feedback.

Top-k sparsification with error feedback, as in Aji, Heafield, "Sparse Communication for Distributed Gradient Descent",
EMNLP 2017, and Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018: of v = g + r each worker sends the
k elements of largest magnitude with their places. |v - C(v)|**2 <= (1 - k / N) |v|**2.

A message is [values][indices]. Workers choose different ones, so everybody receives those of all workers, and bytes
grow with their number K: (K - 1) m for messages of m bytes, where the sum of all N elements takes 8 N (K - 1) / K.
Where m is more than 8 N / K, as with many workers or while little is left out, the same values are sent among zeros in
one sum instead.

With `scope=bucket` the k elements are the largest of all layers of a bucket, so that a layer with large gradients sends
more of them than one with small ones: GlobalTopK of Vineeth S, "Quantization for Distributed Optimization", arXiv
2109.12497, where the bucket is the model. A message then has room for the share of its own layer, which is filled with
elements of any layers, so that bytes do not depend on gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, Self

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS, Coder, Collective, LargeTensorCodec, Round, TensorSpec
from hybridpar.compress.memory import WORKER, Scratch
from hybridpar.compress.packing import aligned
from hybridpar.spec import AT_MOST_1

#: A sample is each of so many elements, a prime number, so that it does not follow the shape of a parameter; where
#: there are at most `_SMALL` elements none is taken. So many standard deviations more than is needed are taken of it.
_EVERY, _SMALL, _DEVIATIONS = 127, 1 << 16, 3


class Picks:
    """Some values of a parameter on their way to all workers.

    Args:
        spec: Says in which type values are sent, and how many workers send.
        count: Elements that they are chosen from.
        picked: How many of them are sent.
        reach: Indices that a message may name, where these are more than the elements.
    """

    def __init__(self, spec: TensorSpec, count: int, picked: int, reach: int = 0) -> None:
        #: How many values are sent.
        self.picked = picked
        self._wire = spec.wire
        self._index = torch.int16 if max(count, reach) <= 1 << 15 else torch.int32
        self._start = aligned(picked * spec.wire.itemsize)  # of indices in a message
        size = self._start + aligned(picked * self._index.itemsize)
        #: Whether values are sent among zeros, in float32.
        self.dense = picked == count or spec.workers * size > 8 * count
        #: What is written and received.
        self.round = Round(Collective.GATHER, torch.uint8, (size,))
        if self.dense:
            self.round = Round(Collective.SUM, torch.float32, (count,))

    def write(self, values: Tensor, indices: Tensor, out: Tensor) -> Tensor:
        """Write the message.

        Args:
            values: 1-D float32, `picked` of them.
            indices: Where they belong, all different.
            out: The message.

        Returns:
            The values as others read them, float32.
        """
        if self.dense:
            out.zero_().index_copy_(0, indices, values)
            return values
        sent, where = self.parts(out)
        sent.copy_(values)
        where.copy_(indices)
        return sent.to(torch.float32)

    def read(self, parts: Sequence[Tensor], out: Tensor, divisor: int) -> None:
        """Add up what came, always in the order of ranks, and divide it; elements that no worker sent are 0.

        Args:
            parts: What came of the round: the sum, or each worker's message by rank.
            out: 1-D float32.
            divisor: At least 1.
        """
        if self.dense:
            torch.div(parts[0], divisor, out=out)
            return
        out.zero_()
        for part in parts:
            self.add_to(part, out, divisor)

    def add_to(self, message: Tensor, out: Tensor, divisor: int) -> None:
        """Add a worker's values.

        Args:
            message: What it wrote.
            out: 1-D float32.
            divisor: At least 1.
        """
        values, indices = self.parts(message)
        out.index_add_(0, indices.to(torch.int64), values.to(torch.float32) / divisor)

    def parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Values and indices of a message.

        Args:
            message: 1-D uint8, beginning at a multiple of 8 bytes.
        """
        values = message[: self.picked * self._wire.itemsize].view(self._wire)
        return values, message[self._start :][: self.picked * self._index.itemsize].view(self._index)


def share(rate: float, count: int) -> int:
    """How many of so many elements a share is: rounded up, and at least one."""
    return min(max(-int(-rate * count // 1), 1), count)


def largest(values: Tensor, picked: int, scratch: Scratch) -> Tensor:
    """Indices of the largest magnitudes, ascending; NaN and infinity count as largest.

    A threshold that a sample says few more than `picked` elements reach leaves these few to choose from. Where fewer
    reach it, all are looked at, so the choice is the same as without.
    """
    magnitudes = torch.abs(values, out=scratch.take("magnitudes", values.numel()))
    sample = magnitudes[::_EVERY]
    expected = picked / values.numel() * sample.numel()
    needed = math.ceil(expected + _DEVIATIONS * math.sqrt(expected)) + 1
    if values.numel() > _SMALL and needed <= sample.numel() // 2:
        threshold = sample.topk(needed, sorted=False).values.min()
        below = torch.lt(magnitudes, threshold, out=scratch.take("below", values.numel(), torch.bool))
        candidates = below.logical_not_().nonzero().view(-1)  # NaN is not below
        if candidates.numel() >= picked:
            return candidates[magnitudes[candidates].topk(picked, sorted=False).indices].sort().values
    return magnitudes.topk(picked, sorted=False).indices.sort().values


@CODECS.register("topk", "top-k: the largest elements of each worker with their places, error feedback")
@dataclass(frozen=True, kw_only=True)
class TopK(LargeTensorCodec):
    """The largest elements of each parameter.

    Attributes:
        rate: Share of a parameter's elements that is sent.
        scope: Of what they are the largest: of each `layer`, or of all layers of a `bucket`.
    """

    rate: Annotated[float, AT_MOST_1] = 0.01
    scope: Literal["layer", "bucket"] = "layer"
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
