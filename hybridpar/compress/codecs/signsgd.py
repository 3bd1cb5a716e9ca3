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

import torch
from torch import Tensor

from hybridpar.compress.codec import CHUNK, CODECS, Coder, Collective, LargeTensorCodec, Round, TensorSpec
from hybridpar.compress.packing import ALIGN, aligned, at_least, bits_size, level_and_bits, pack_bits, unpack_bits
from hybridpar.compress.quantised import cut_stripes
from hybridpar.errors import check_choice

_LEVELS = ("mean", "one")


@CODECS.register("signsgd", "signSGD: workers vote on each element's sign, one bit both ways")
@dataclass(frozen=True)
class SignSgd(LargeTensorCodec):
    """The sign that most workers have.

    Attributes:
        level: What the sign is multiplied with, see above: `mean` or `one`.
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    level: str = "mean"
    least: int = 1000
    name = "signsgd"
    biased = True
    at_once = True
    # A worker that was outvoted has not sent what it voted for, and does not know what it has sent instead.
    takes_feedback = False

    def __post_init__(self) -> None:
        check_choice("level", self.level, _LEVELS, "It says how large a step is.")
        super().__post_init__()

    def bind(self, spec: TensorSpec) -> MajorityCoder:
        return MajorityCoder(spec, self.level == "one")


class MajorityCoder(Coder):
    """Votes on signs, stripe by stripe. A message is [level][bits]."""

    def __init__(self, spec: TensorSpec, plain: bool) -> None:
        self._plain = plain
        self._stripes = cut_stripes(spec.count, 8, spec.workers)
        sizes = tuple(aligned(ALIGN + bits_size(stop - start)) for start, stop in self._stripes)
        super().__init__(spec, [Round(Collective.SHARD, torch.uint8, sizes)])

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        for (start, stop), out in zip(self._stripes, parts, strict=True):
            values = self._gradient[start:stop]
            level, packed = level_and_bits(out, values.numel())
            sums = []
            for first, last in _chunks(values.numel()):
                chunk = values[first:last]
                bits = self._scratch.take("bits", chunk.numel(), torch.bool)
                at_least(chunk, 0.0, bits)
                pack_bits(bits, packed[first // 8 : first // 8 + bits_size(chunk.numel())])
                sums.append(torch.abs(chunk, out=self._scratch.take("half", chunk.numel())).sum(dtype=torch.float64))
            if sums:
                mean = torch.stack(sums).sum() / values.numel()
                level.copy_(torch.where(mean > 0, 1.0, mean) + 0 * mean if self._plain else mean)

    def merge(self, index: int, received: Sequence[Tensor], out: Tensor) -> None:
        start, stop = self._stripes[self.spec.rank]
        count = stop - start
        level, packed = level_and_bits(out, count)
        levels = torch.cat([level_and_bits(message, count)[0] for message in received])
        level.copy_(levels.max() if self._plain else levels.mean())
        for first, last in _chunks(count):
            votes = self._scratch.take("half", last - first).zero_()
            for message in received:
                mine = level_and_bits(message, count)[1][first // 8 : first // 8 + bits_size(last - first)]
                votes.add_(unpack_bits(mine, last - first))
            bits = self._scratch.take("bits", last - first, torch.bool)
            at_least(votes, len(received) / 2, bits)
            pack_bits(bits, packed[first // 8 : first // 8 + bits_size(last - first)])

    def finish(self, out: Tensor) -> None:
        for (start, stop), message in zip(self._stripes, self._received, strict=True):
            level, packed = level_and_bits(message, stop - start)
            step = level * (self.spec.workers / self.spec.divisor)
            for first, last in _chunks(stop - start):
                bits = unpack_bits(packed[first // 8 : first // 8 + bits_size(last - first)], last - first)
                signs = self._scratch.take("half", last - first).copy_(bits).mul_(2).sub_(1)
                torch.mul(signs, step, out=out[start + first : start + last])


def _chunks(count: int) -> list[tuple[int, int]]:
    return [(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]
