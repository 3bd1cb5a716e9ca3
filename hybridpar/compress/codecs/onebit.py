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

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import CODECS, Codec, Coder, Residual, Scratch, TensorSpec
from hybridpar.compress.packing import at_least, bits_size, count_ones, pack_bits, select, unpack_bits
from hybridpar.compress.quantised import Messages, Quantiser, check_meet, put, quantised_coder
from hybridpar.compress.received import Received, SignGroups, Signs
from hybridpar.errors import check

#: Elements that torch works on at a time, 2 MB of float32: of its twenty calls for a chunk each costs more than what
#: lies in a core's own cache saves over what lies in the shared one.
_CHUNK = 1 << 19


@CODECS.register("onebit", "1-bit SGD: signs and two means per group, error feedback, sharded exchange")
@dataclass(frozen=True)
class OneBit(Codec):
    """Signs, and two reconstruction values per group: the values of one output unit or convolution filter.

    Attributes:
        least: A parameter whose groups have fewer values is sent in full precision, and so are vectors.
        meet: `shard`: stripes are added and encoded again by their owners, as in the paper. `gather`: everybody sends
            to everybody, and nothing is encoded twice. `auto`: what sends fewer bytes, and for two workers, where both
            send as many, `gather`.
    """

    least: int = 32
    meet: str = "auto"
    name = "onebit"
    biased = True
    at_once = True
    feedback = True
    kernels = ("cpu", "cuda")

    def __post_init__(self) -> None:
        check(self.least >= 1, f"least={self.least}", "It is a number of values.", "Use 1 or more.")
        check_meet(self.meet)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether there are groups, long enough to pay for their levels."""
        return len(shape) > 1 and math.prod(shape) > 0 and math.prod(shape[1:]) >= self.least

    def bind(self, spec: TensorSpec) -> Coder:
        return quantised_coder(spec, RowSigns(spec.shape), self.meet)


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

    def received(self, plain: Received, messages: Messages) -> Received:
        return Signs(plain, [SignGroups(start, stop - start, self._length, parts) for start, stop, parts in messages])

    def encode(self, values: Tensor, residual: Residual, out: Tensor, scratch: Scratch) -> None:
        groups, length = values.shape
        lower, upper, packed = _parts(out, groups)
        if kernels.onebit_encode(values, residual, lower, upper, packed, scratch):
            return
        for first, last in _chunks(groups, length):
            size = (last - first) * length
            v = residual.take(values[first:last], first * length)
            bits = scratch.take("bits", size, torch.bool).view(v.shape)
            half = scratch.take("half", size).view(v.shape)
            a0, a1 = lower[first:last], upper[first:last]
            at_least(v, 0.0, bits)
            start = first * length // 8
            own = packed[start : start + bits_size(size)]
            pack_bits(bits.view(-1), own)
            ones = count_ones(bits, own)
            torch.sum(torch.clamp(v, max=0, out=half), 1, out=a0)
            torch.sum(torch.clamp(v, min=0, out=half), 1, out=a1)
            a0.div_((length - ones).clamp_(min=1))
            a1.div_(ones.clamp_(min=1))
            if residual.keeps:
                select(bits, a1.unsqueeze(1), a0.unsqueeze(1), half)
                v.sub_(half)

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        groups, length = out.shape
        lower, upper, packed = _parts(message, groups)
        if kernels.onebit_read(lower, upper, packed, out, divisor, add=add):
            return
        a0, a1 = (lower / divisor).unsqueeze(1), (upper / divisor).unsqueeze(1)
        for first, last in _chunks(groups, length):
            bits = _bits(packed, first, last, length)
            decoded = scratch.take("half", bits.numel()).view(bits.shape)
            select(bits, a1[first:last], a0[first:last], decoded)
            put(decoded, out[first:last], add=add)


def _parts(message: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lower levels, upper levels and packed bits of a message."""
    levels = message[: 8 * groups].view(torch.float32)
    return levels[:groups], levels[groups:], message[8 * groups :]


def _bits(packed: Tensor, first: int, last: int, length: int) -> Tensor:
    """The bits of some groups, one group per row."""
    count = (last - first) * length
    start = first * length // 8
    return unpack_bits(packed[start : start + bits_size(count)], count).view(-1, length)


def _chunks(groups: int, length: int) -> Iterator[tuple[int, int]]:
    """Ranges of groups that fit in a shared cache, each beginning at a whole byte of bits."""
    whole = 8 // math.gcd(length, 8)
    step = max(_CHUNK // length // whole, 1) * whole
    for first in range(0, groups, step):
        yield first, min(first + step, groups)
