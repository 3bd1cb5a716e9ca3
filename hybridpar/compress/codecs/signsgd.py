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
@dataclass(frozen=True)
class SignSgd(LargeTensorCodec):
    """The sign that most workers have.

    Attributes:
        level: What the sign is multiplied with, see above: `mean` or `one`.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    level: Literal["mean", "one"] = "mean"
    least: int = 1000
    name = "signsgd"
    biased = True
    at_once = True
    # A worker that was outvoted has not sent what it voted for, and does not know what it has sent instead.
    takes_feedback = False

    def bind(self, spec: TensorSpec) -> MajorityCoder:
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
        sums = [values[part].abs().sum(dtype=torch.float64) for part in slices(values.numel())]
        mean = torch.stack(sums).sum() / values.numel()
        self.write_level(torch.where(mean > 0, 1.0, mean) + 0 * mean if self.plain else mean, out)
        for part in slices(values.numel()):
            self.write_signs(values[part], part, out)

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        """What arrives is already the mean."""
        level = self.level(message) * (self._workers / divisor)
        for part in slices(out.numel()):
            signs = scratch.take("signs", part.stop - part.start).copy_(self.bits(message, part)).mul_(2).sub_(1)
            put(signs.mul_(level), out[part], add=add)

    def write_level(self, level: Tensor, out: Tensor) -> None:
        """Write what signs are multiplied with."""
        out[:ALIGN].zero_()
        self.level(out).copy_(level)

    def write_signs(self, values: Tensor, part: slice, out: Tensor) -> None:
        """Write the signs of a range of values."""
        pack_bits(values >= 0, out[self._bytes(part)])

    def bits(self, message: Tensor, part: slice) -> Tensor:
        """Which values of a range are not negative."""
        return unpack_bits(message[self._bytes(part)], part.stop - part.start)

    def _bytes(self, part: slice) -> slice:
        return slice(ALIGN + part.start // 8, ALIGN + bits_size(part.stop))

    def level(self, message: Tensor) -> Tensor:
        """What signs are multiplied with, a single element."""
        return message[:4].view(torch.float32)


class MajorityCoder(QuantisedCoder):
    """Votes on signs, stripe by stripe."""

    quantiser: SignQuantiser

    def merge(self, index: int, received: Sequence[Tensor], out: Tensor) -> None:
        size = self._sizes[self.spec.rank]
        if not size:
            return
        levels = torch.cat([self.quantiser.level(message) for message in received])
        self.quantiser.write_level(levels.max() if self.quantiser.plain else levels.mean(), out)
        for part in slices(len(self._total)):
            votes = self._scratch.take("votes", part.stop - part.start).fill_(-len(received) / 2)
            for message in received:
                votes.add_(self.quantiser.bits(message, part))
            self.quantiser.write_signs(votes, part, out)
        out[size:].zero_()
