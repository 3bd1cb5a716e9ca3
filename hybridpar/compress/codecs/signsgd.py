"""Codec `signsgd`: a majority vote on the sign of each element.

signSGD with majority vote: Bernstein, Zhao, Azizzadenesheli, Anandkumar, "signSGD with Majority Vote is Communication
Efficient and Fault Tolerant", ICLR 2019. Every worker sends the signs of its gradient; the owner of a stripe counts and
sends the sign that most have. 0 counts as plus, and so does a tie.

The paper steps by the bare sign, with a learning rate of its own. Here `level=mean` multiplies it with the mean over
the workers of their stripe's mean |g|, so that learning rates, and parameters that are sent in full, keep their
meaning; `level=one` is the paper's. A stripe that is zero on all workers stays zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybridpar.compress.codec import CODECS, LargeTensorCodec, TensorSpec
from hybridpar.compress.memory import Memory, Scratch
from hybridpar.compress.packing import ALIGN, bits_size, pack_bits, slices, unpack_bits
from hybridpar.compress.quantised import QuantisedCoder, Quantiser, put


@CODECS.register("signsgd", "signSGD: workers vote on each element's sign, one bit both ways")
@dataclass(frozen=True, kw_only=True)
class SignSgd(LargeTensorCodec):
    """The sign that most workers have.

    Attributes:
        level: What the sign is multiplied with: the `mean` magnitude over stripe and workers; or `one`, the paper's.
    """

    level: Literal["mean", "one"] = "mean"
    at_once = True
    # A worker that was outvoted has not sent what it voted for, and does not know what it has sent instead.
    takes_feedback = False

    def coder(self, spec: TensorSpec) -> MajorityCoder:
        return MajorityCoder(spec, SignQuantiser(self.level == "one", spec.workers), "shard")


class SignQuantiser(Quantiser):
    """A stripe as [level][bits]."""

    unit = 8

    def __init__(self, plain: bool, workers: int) -> None:
        self.plain, self._workers = plain, workers

    def size(self, shape: Sequence[int]) -> int:
        """Level and bits."""
        return ALIGN + bits_size(shape[0])

    def encode(self, values: Tensor, memory: Memory, out: Tensor, scratch: Scratch) -> None:
        level, bits = parts_of(out)
        out[:ALIGN].zero_()
        sums = [values[part].abs().sum(dtype=torch.float64) for part in slices(values.numel())]
        mean = torch.stack(sums).sum() / values.numel()
        level.copy_(torch.where(mean > 0, 1.0, mean) + 0 * mean if self.plain else mean)
        for part in slices(values.numel()):
            pack_bits(values[part] >= 0, bits[bytes_of(part)])

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        """What arrives is already the mean."""
        level, bits = parts_of(message)
        for part in slices(out.numel()):
            count = part.stop - part.start
            signs = scratch.take("signs", count).copy_(unpack_bits(bits[bytes_of(part)], count)).mul_(2).sub_(1)
            put(signs.mul_(level * (self._workers / divisor)), out[part], add=add)


def parts_of(message: Tensor) -> tuple[Tensor, Tensor]:
    """What signs are multiplied with, a single element, and the bits that say which values are not negative."""
    return message[:4].view(torch.float32), message[ALIGN:]


def bytes_of(part: slice) -> slice:
    """Where the bits of a range of values are."""
    return slice(part.start // 8, bits_size(part.stop))


class MajorityCoder(QuantisedCoder):
    """Votes on signs, stripe by stripe."""

    quantiser: SignQuantiser

    def merge(self, index: int, received: Sequence[Tensor], out: Tensor) -> None:
        size = self._sizes[self.spec.rank]
        out.zero_()
        if not size:
            return
        levels = torch.cat([parts_of(message)[0] for message in received])
        level, bits = parts_of(out[:size])
        level.copy_(levels.max() if self.quantiser.plain else levels.mean())
        for part in slices(len(self._total)):
            count = part.stop - part.start
            votes = self.scratch.take("votes", count).fill_(-len(received) / 2)
            for message in received:
                votes.add_(unpack_bits(parts_of(message)[1][bytes_of(part)], count))
            pack_bits(votes >= 0, bits[bytes_of(part)])
