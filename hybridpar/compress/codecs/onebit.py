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
from hybridpar.compress.quantised import Quantiser, check_meet, put, quantised_coder
from hybridpar.errors import check, check_choice

_GROUPS = ("row", "column")


#: Elements that torch works on at a time, 2 MB of float32: of its twenty calls for a chunk each costs more than what
#: lies in a core's own cache saves over what lies in the shared one.
_CHUNK = 1 << 19


@CODECS.register("onebit", "1-bit SGD: signs and two means per group, error feedback, sharded exchange")
@dataclass(frozen=True)
class OneBit(Codec):
    """Signs, and two reconstruction values per group.

    Attributes:
        group: Which values share levels. `row`: those of one output unit or convolution filter, which lie side by
            side in memory. `column`: those that leave one input unit of a matrix, as in the paper; other than
            matrices go by rows.
        least: A parameter whose groups have fewer values is sent in full precision, and so are vectors.
        meet: `shard`: stripes are added and encoded again by their owners, as in the paper. `gather`: everybody sends
            to everybody, and nothing is encoded twice. `auto`: what sends fewer bytes, and for two workers, where both
            send as many, `gather`.
    """

    group: str = "row"
    least: int = 32
    meet: str = "auto"
    name = "onebit"
    biased = True
    at_once = True
    feedback = True
    kernels = ("cpu", "cuda")

    def __post_init__(self) -> None:
        check_choice("group", self.group, _GROUPS, "It says which values share levels.")
        check(self.least >= 1, f"least={self.least}", "It is a number of values.", "Use 1 or more.")
        check_meet(self.meet)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether there are groups, long enough to pay for their levels."""
        return len(shape) > 1 and math.prod(shape) > 0 and self._length(shape) >= self.least

    def bind(self, spec: TensorSpec) -> Coder:
        return quantised_coder(spec, quantiser_of(self, spec.shape), self.meet)

    def by_columns(self, shape: Sequence[int]) -> bool:
        """Whether the groups of a parameter are its columns.

        Args:
            shape: Of the parameter.
        """
        return self.group == "column" and len(shape) == 2

    def _length(self, shape: Sequence[int]) -> int:
        return shape[0] if self.by_columns(shape) else math.prod(shape[1:])


def quantiser_of(codec: OneBit, shape: Sequence[int]) -> Quantiser:
    """How stripes of a parameter that the codec fits become bytes.

    Args:
        codec: The codec.
        shape: Of the parameter.
    """
    return ColumnSigns(shape) if codec.by_columns(shape) else RowSigns(shape)


@dataclass(frozen=True)
class Signs:
    """Groups of a parameter as they were received.

    Attributes:
        first: The first group.
        groups: How many there are.
        length: Values in each.
        messages: Their sum is what the groups stand for; each is [a0 of each][a1 of each][bits].
    """

    first: int
    groups: int
    length: int
    messages: Sequence[Tensor]


class RowSigns(Quantiser):
    """A stripe of groups, each what belongs to an index of the first dimension, as [a0 of each][a1 of each][bits].

    Args:
        shape: Of the parameter.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._rows = shape[0]

    def length(self, count: int) -> int:
        """Values in a group.

        Args:
            count: Of the parameter.
        """
        return count // self._rows

    def view(self, flat: Tensor) -> Tensor:
        """One group per row."""
        return flat.view(self._rows, -1)

    def size(self, shape: Sequence[int]) -> int:
        """Two levels per group, one bit per value."""
        groups, length = shape
        return 8 * groups + bits_size(groups * length)

    def is_finite(self, message: Tensor, shape: Sequence[int]) -> bool:
        """Infinity and NaN reach the levels of their group."""
        return bool(torch.isfinite(message[: 8 * shape[0]].view(torch.float32)).all())

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


class ColumnSigns(Quantiser):
    """A stripe of columns of a matrix, each a group, as [a0 of each][a1 of each][bits].

    Memory is processed in row-major order. Bits and residuals of a stripe have that order, too;
    bits of a row fill whole words of 16.

    Args:
        shape: Of the parameter, two-dimensional.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._rows = shape[0]

    def view(self, flat: Tensor) -> Tensor:
        """One group per row; the rows lie across memory."""
        return flat.view(self._rows, -1).t()

    def lay(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        groups, length = shape
        return flat.view(length, groups).t()

    def size(self, shape: Sequence[int]) -> int:
        """Two levels per group, one bit per value and what fills up its row."""
        groups, length = shape
        return 8 * groups + length * _row_bytes(groups)

    def encode(self, values: Tensor, residual: Residual, out: Tensor, scratch: Scratch) -> None:
        values = values.t()
        length, groups = values.shape
        lower, upper, packed = _parts(out, groups)
        if kernels.onebit_encode_columns(values, residual, lower, upper, packed, scratch):
            return
        lower.zero_()
        upper.zero_()
        ones = scratch.take("ones", groups).zero_()
        for first, last in _row_ranges(length, groups):
            v = residual.take(values[first:last], first * groups)
            bits = self._padded(scratch, last - first, groups)
            torch.ge(v, 0.0, out=bits[:, :groups])
            pack_bits(bits.view(-1), packed[first * _row_bytes(groups) : last * _row_bytes(groups)])
            half = scratch.take("half", v.numel()).view(v.shape)
            lower.add_(torch.clamp(v, max=0, out=half).sum(0))
            upper.add_(torch.clamp(v, min=0, out=half).sum(0))
            ones.add_(bits[:, :groups].sum(0))
        lower.div_((length - ones).clamp_(min=1))
        upper.div_(ones.clamp_(min=1))
        for first, last in _row_ranges(length, groups) if residual.keeps else ():
            v = residual.again(values[first:last], first * groups)
            v.sub_(self._chosen(lower, upper, packed, first, last, scratch))

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        out = out.t()
        lower, upper, packed = self._divided(message, out.shape[1], divisor, scratch)
        if kernels.onebit_read_columns(lower, upper, packed, out, add=add):
            return
        for first, last in _row_ranges(*out.shape):
            put(self._chosen(lower, upper, packed, first, last, scratch), out[first:last], add=add)

    def _divided(self, message: Tensor, groups: int, divisor: int, scratch: Scratch) -> tuple[Tensor, Tensor, Tensor]:
        """As `_parts`, with levels over a divisor."""
        lower, upper, packed = _parts(message, groups)
        if divisor == 1:
            return lower, upper, packed
        levels = scratch.take("levels", 2 * groups).view(2, groups)
        return torch.div(lower, divisor, out=levels[0]), torch.div(upper, divisor, out=levels[1]), packed

    def _chosen(self, lower: Tensor, upper: Tensor, packed: Tensor, first: int, last: int, scratch: Scratch) -> Tensor:
        """The level of each value of some rows."""
        groups, width = lower.numel(), _row_bytes(lower.numel())
        bits = unpack_bits(packed[first * width : last * width], (last - first) * width * 8).view(last - first, -1)
        chosen = scratch.take("half", (last - first) * groups).view(-1, groups)
        select(bits[:, :groups], upper, lower, chosen)
        return chosen

    def _padded(self, scratch: Scratch, rows: int, groups: int) -> Tensor:
        """Memory for the bits of some rows, zero beyond them."""
        bits = scratch.take("bits", rows * _row_bytes(groups) * 8, torch.bool).view(rows, -1)
        bits[:, groups:] = False
        return bits


def _row_bytes(groups: int) -> int:
    """Bytes of the bits of a row that has one of each group."""
    return -(-groups // 16) * 2


def _row_ranges(rows: int, length: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that fit in a shared cache."""
    step = max(_CHUNK // length, 1)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


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
