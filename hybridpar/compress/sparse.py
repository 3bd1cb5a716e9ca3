"""Messages of selected values with their indices.

A message is [values][indices]. Everybody receives those of all workers, so bytes grow with their number K:
(K - 1) m for messages of m bytes, where the sum of all N elements takes 8 N (K - 1) / K. Where m is more than 8 N / K,
as with many workers or while little is left out, the same values are sent among zeros in one sum instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridpar.compress.codec import Collective, Round, TensorSpec
from hybridpar.compress.memory import Scratch
from hybridpar.compress.packing import aligned

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
