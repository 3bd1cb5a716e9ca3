"""Codec `onebit`: the sign of each value and two levels per group, as in 1-bit SGD.

1-bit SGD: Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs", Interspeech 2014. For a group of values v_i, with b_i = [v_i >= 0]:

    a1 = mean of v_i with b_i = 1        a0 = mean of v_i with b_i = 0        C(v)_i = a1 if b_i else a0

For the threshold 0 no other two values have a smaller squared error. The mean of no values is 0, so zeros arrive as
zeros. Per group 64 bits of levels are sent beside the bits: groups of n values shrink by 32 / (1 + 64 / n).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import CHUNK, CODECS, Codec, Coder, TensorSpec
from hybridpar.compress.memory import Memory, Scratch
from hybridpar.compress.packing import bits_size, pack_bits, select, slices, unpack_bits
from hybridpar.compress.quantised import Compiled, Meet, QuantisedCoder, Quantiser, put
from hybridpar.compress.received import Messages, Received, Signs
from hybridpar.spec import AT_LEAST_1


@CODECS.register("onebit", "1-bit SGD: signs and two means per group, error feedback, sharded exchange")
@dataclass(frozen=True, kw_only=True)
class OneBit(Compiled, Codec):
    """Signs, and two reconstruction values per group: the values of one output unit or convolution filter.

    Attributes:
        least: A parameter whose groups have fewer values is sent in full precision, and so are vectors.
        meet: `shard`: stripes are added and encoded again by their owners, as in the paper. `gather`: everybody sends
            to everybody, and nothing is encoded twice. `auto`: what sends fewer bytes, and for two workers, where both
            send as many, `gather`.
    """

    least: Annotated[int, AT_LEAST_1] = 32
    meet: Meet = "auto"
    at_once = True
    feedback: bool = True

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether there are groups, long enough to pay for their levels."""
        return len(shape) > 1 and math.prod(shape) > 0 and math.prod(shape[1:]) >= self.least

    def coder(self, spec: TensorSpec) -> QuantisedCoder:
        return QuantisedCoder(spec, RowSigns(spec.shape), self.meet)


class RowSigns(Quantiser):
    """A stripe of groups, each what belongs to an index of the first dimension, as [a0 of each][a1 of each][bits]."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._rows, self._length = shape[0], math.prod(shape[1:])

    def view(self, flat: Tensor) -> Tensor:
        """One group per row."""
        return flat.view(self._rows, -1)

    def size(self, shape: Sequence[int]) -> int:
        """Two levels per group, one bit per value."""
        groups, length = shape
        return 8 * groups + bits_size(groups * length)

    def received(self, coder: Coder, messages: Messages) -> Received:
        return Signs(coder, self._length, messages)

    def encode(self, values: Tensor, memory: Memory, out: Tensor, scratch: Scratch) -> None:
        groups = len(values)
        levels, packed = out[: 8 * groups].view(torch.float32), out[8 * groups :]
        lower, upper = levels[:groups], levels[groups:]
        if kernels.onebit_encode(values, memory, lower, upper, packed):
            return
        for rows, part in _chunks(values.shape):
            v = memory.take(values[rows], rows.start * values.shape[1])
            bits = v >= 0
            pack_bits(bits, packed[part])
            ones = bits.count_nonzero(1)
            torch.div(v.clamp(max=0).sum(1), (v.shape[1] - ones).clamp_(min=1), out=lower[rows])
            torch.div(v.clamp(min=0).sum(1), ones.clamp_(min=1), out=upper[rows])
            if memory.keeps:
                v.sub_(select(bits, upper[rows].unsqueeze(1), lower[rows].unsqueeze(1)))

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        lower, upper, packed = _parts(message, len(out), divisor)
        if kernels.onebit_read(lower, upper, packed, out, add=add):
            return
        lower, upper = lower.unsqueeze(1), upper.unsqueeze(1)
        for rows, part in _chunks(out.shape):
            bits = unpack_bits(packed[part], out[rows].numel()).view(out[rows].shape)
            put(select(bits, upper[rows], lower[rows]), out[rows], add=add)


def _parts(message: Tensor, groups: int, divisor: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Lower levels and upper levels, divided, and packed bits of a message."""
    levels = message[: 8 * groups].view(torch.float32)
    levels = levels if divisor == 1 else levels / divisor
    return levels[:groups], levels[groups:], message[8 * groups :]


def _chunks(shape: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Ranges of groups, and the bytes in which their bits are."""
    groups, length = shape
    for rows in slices(groups, max(CHUNK // length // 8, 1) * 8):
        yield rows, slice(rows.start * length // 8, bits_size(rows.stop * length))
