"""Codec `twobit`: minus, nothing or plus for each value, by a threshold.

The coding of MXNet's 2-bit gradient compression (apache/mxnet, PR 8662), with v = g + r and a threshold t:

    v >= t: send plus, decoded as t      v <= -t: send minus, decoded as -t      else: send nothing, decoded as 0

so what is not sent is v - C(v), which is error feedback. MXNet's t is fixed by the user. With t > max |v| nothing is
sent at all, and a gradient of 1e-3 takes 500 steps to reach 0.5. By default t follows v instead:

    t = min(factor * mean |v|, cap * max |v|)

With `factor` 1.1 to 1.5 that is close to the least squared error for normal and for Laplace distributed values. The cap
means that something is always sent, and it stops what a larger factor would start: a threshold that grows with the
residual that it causes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import CODECS, LargeTensorCodec, TensorSpec
from hybridpar.compress.memory import Memory, Scratch
from hybridpar.compress.packing import bits_size, magnitude, pack_bits, slices, unpack_bits
from hybridpar.compress.quantised import Compiled, Meet, QuantisedCoder, Quantiser, put
from hybridpar.spec import AT_MOST_1, POSITIVE

#: Bytes before the codes of a stripe: the level.
_HEAD = 4


@CODECS.register("twobit", "2-bit thresholds as in MXNet, fixed or adapted, error feedback, sharded exchange")
@dataclass(frozen=True, kw_only=True)
class TwoBit(Compiled, LargeTensorCodec):
    """Minus, nothing or plus.

    Attributes:
        threshold: What a value must reach, or `auto`. MXNet's default is 0.5 for gradients summed over the local
            batch; for averages, as here, that is 0.5 / batch size.
        factor: With `threshold=auto` it is so many times the mean magnitude;
        cap: but at most this part of the largest.
        meet: As that of `onebit`.
    """

    threshold: Annotated[float | None, POSITIVE] = None
    factor: Annotated[float, POSITIVE] = 1.5
    cap: Annotated[float, AT_MOST_1] = 0.5
    meet: Meet = "auto"
    at_once = True
    feedback: bool = True

    def coder(self, spec: TensorSpec) -> QuantisedCoder:
        return QuantisedCoder(spec, TernaryQuantiser(self.threshold, self.factor, self.cap), self.meet)


class TernaryQuantiser(Quantiser):
    """A stripe as [level][codes]: 10 is minus, 11 is plus, 00 is nothing, padded to words of 32 bits.

    The threshold is `fixed`, or min(factor * mean magnitude, cap * largest magnitude).
    """

    #: What fills a word.
    unit = 16

    def __init__(self, fixed: float | None = None, factor: float = 1.5, cap: float = 0.5) -> None:
        self._fixed, self._factor, self._cap = fixed or 0.0, factor, cap

    def size(self, shape: Sequence[int]) -> int:
        """Level and codes."""
        return _HEAD + -(-shape[0] // self.unit) * 4

    def encode(self, values: Tensor, memory: Memory, out: Tensor, scratch: Scratch) -> None:
        """Where a value is not finite the level is NaN, and so is all that is decoded."""
        level, codes = out[:_HEAD].view(torch.float32), out[_HEAD:]
        numbers = self._fixed, self._factor, self._cap
        if kernels.twobit_encode(values, memory, numbers, level, codes, scratch):
            return
        v = memory.take(values)
        mean = torch.stack([v[part].abs().sum() for part in slices(v.numel())]).sum() / v.numel()
        largest = magnitude(v)
        threshold = torch.minimum(self._factor * mean, self._cap * largest)
        if self._fixed:
            threshold.fill_(self._fixed)
        level.copy_(threshold).masked_fill_(~largest.isfinite(), torch.nan)
        codes[-4:].zero_()  # the last word may not be full
        for part in slices(v.numel()):
            positive = v[part] >= threshold
            sent = (v[part] <= -threshold).logical_or_(positive)
            pairs = torch.stack((sent, positive), 1).view(-1)
            pack_bits(pairs, codes[part.start // 4 :][: bits_size(pairs.numel())])
            if memory.keeps:
                v[part].sub_(_signs(sent, positive).mul_(level))

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        level, codes = message[:_HEAD].view(torch.float32) / divisor, message[_HEAD:]
        if kernels.twobit_read(level, codes, out, add=add):
            return
        for part in slices(out.numel()):
            bits = 2 * (part.stop - part.start)
            pairs = unpack_bits(codes[part.start // 4 :][: bits_size(bits)], bits).view(-1, 2)
            sent, positive = pairs.unbind(1)
            put(_signs(sent, positive).mul_(level), out[part], add=add)


def _signs(sent: Tensor, positive: Tensor) -> Tensor:
    """Plus, nothing or minus 1: 2 - 1, 0 - 0 or 0 - 1."""
    return positive.float().mul_(2).sub_(sent.float())
