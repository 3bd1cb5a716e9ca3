"""Packs values of fewer than 8 bits into bytes and words.

Three layouts:

* **bits**: 8 truth values per byte, the first in the most significant bit.
* **pairs**: 4 values of 2 bits per byte, the first in the most significant bits; 10 is minus, 11 is plus, 00 is
  nothing. The layout of MXNet's 2-bit gradient compression, padded to words of 32 bits.
* **fields**: values of w bits, so many as fit into a word of 8, 32 or 64 bits. Of W words, word j holds values j,
  j + W, ..., so that packing is a shift of a contiguous slice. Words can be added, by any collective, as long as
  no field outgrows its w bits: then nothing carries into the next.
* **planes**: fields that nobody adds, 8 in w bytes, so that no bit is left over; a word is a byte of each of w planes.

Bits and pairs use numpy on a CPU, which has both as vectorised operations; elsewhere torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridpar.compress.codec import CHUNK, Scratch
from hybridpar.errors import UsageError

#: Messages begin at multiples of this, so that they can be looked at as any type.
ALIGN = 8

#: Whole numbers below this are exact in float32.
_EXACT = 1 << 24

#: Words with the bits that may be used in them. The sign bit of a signed word stays free, so that no sum overflows.
_WORDS = ((torch.uint8, 8), (torch.int32, 31), (torch.int64, 63))


def aligned(size: int) -> int:
    """A number of bytes, rounded up to where the next message may begin."""
    return -(-size // ALIGN) * ALIGN


def bits_size(count: int) -> int:
    """Bytes of so many truth values."""
    return -(-count // 8)


def level_and_bits(message: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Parts of the message of a level, one element, and bits."""
    return message[:4].view(torch.float32), message[ALIGN : ALIGN + bits_size(count)]


def pack_bits(bits: Tensor, out: Tensor) -> None:
    """Pack truth values, the first into the most significant bit of the first byte."""
    _expect(out, bits_size(bits.numel()))
    if bits.device.type == "cpu":
        out.copy_(torch.from_numpy(np.packbits(bits.numpy())))
        return
    padded = torch.zeros(out.numel() * 8, dtype=torch.uint8, device=bits.device)
    padded[: bits.numel()] = bits
    out.copy_((padded.view(-1, 8) << _shifts(bits.device)).sum(1, dtype=torch.uint8))


def count_ones(bits: Tensor, packed: Tensor) -> Tensor:
    """How many bits of each row are set, float32; from the packed bits where rows are whole words of them."""
    rows, length = bits.shape
    if bits.device.type == "cpu" and length % 64 == 0:
        words = packed.numpy()[: rows * length // 8].reshape(rows, -1)
        if words.ctypes.data % 8 == 0:
            words = words.view(np.uint64)
        return torch.from_numpy(np.bitwise_count(words).sum(1, dtype=np.int32)).to(torch.float32)
    return bits.view(torch.uint8).sum(1, dtype=torch.int32).to(torch.float32)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack_bits`."""
    _expect(packed, bits_size(count))
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count)).view(torch.bool)
    return ((packed.unsqueeze(1) >> _shifts(packed.device)) & 1).view(-1)[:count].bool()


def at_least(values: Tensor, threshold: float, out: Tensor) -> None:
    """Set out = [values >= threshold]; on a CPU by numpy, whose comparison is vectorised."""
    if values.device.type == "cpu":
        np.greater_equal(values.numpy(), threshold, out=out.numpy())
    else:
        torch.ge(values, threshold, out=out)


def magnitude(values: Tensor) -> Tensor:
    """Largest |value|, 0-d; NaN where one is NaN. A norm would look at one value at a time."""
    low, high = torch.aminmax(values)
    return torch.maximum(high, -low)


def select(bits: Tensor, one: Tensor, zero: Tensor, out: Tensor) -> None:
    """Set out = one where a bit is set, else zero: `torch.where` without its branches."""
    first, second = zero.view(torch.int32), one.view(torch.int32)
    # A byte of -1 becomes a word of -1; bytes are four times as fast to negate.
    mask = out.view(torch.int32).copy_(bits.view(torch.int8).neg())
    mask.bitwise_and_(first ^ second).bitwise_xor_(first)


def pairs_size(count: int) -> int:
    """Bytes of so many 2-bit values, in whole words of 32 bits."""
    return -(-count // 16) * 4


def pack_pairs(sent: Tensor, positive: Tensor, out: Tensor, scratch: Scratch) -> None:
    """Pack values that are minus, nothing or plus."""
    _expect(out, pairs_size(sent.numel()))
    both = scratch.take("pairs", 2 * sent.numel(), torch.bool)
    torch.stack((sent, positive), dim=1, out=both.view(-1, 2))
    used = bits_size(both.numel())
    pack_bits(both, out[:used])
    out[used:].zero_()


def pair_table(device: torch.device) -> Tensor:
    """For every byte the 4 values that it holds, -1, 0 or 1, as float32 of shape (256, 4)."""
    bytes_ = torch.arange(256, device=device).unsqueeze(1)
    codes = (bytes_ >> torch.tensor([6, 4, 2, 0], device=device)) & 3
    return torch.tensor([0.0, 0.0, -1.0, 1.0], dtype=torch.float32, device=device)[codes]


def unpack_pairs(packed: Tensor, count: int, table: Tensor, scratch: Scratch) -> Tensor:
    """The inverse of `pack_pairs`."""
    used = -(-count // 4)
    index = scratch.take("pair bytes", used, torch.int32)
    index.copy_(packed[:used])
    values = scratch.take("pair values", 4 * used)
    torch.index_select(table, 0, index, out=values.view(-1, 4))
    return values[:count]


@dataclass(frozen=True)
class Fields:
    """Where values of some bits lie in words.

    Attributes:
        count: How many values there are.
        width: Bits of each.
        word: Type of the words.
        per_word: Values in a word.
    """

    count: int
    width: int
    word: torch.dtype
    per_word: int

    @classmethod
    def of(cls, count: int, width: int) -> Fields:
        """The layout that takes the fewest bytes."""
        if not 1 <= width <= 63:
            raise ValueError(f"fields of {width} bits do not fit into words of 64")
        fitting = [cls(count, width, word, bits // width) for word, bits in _WORDS if bits >= width]
        return min(fitting, key=lambda fields: (fields.bytes, fields.word.itemsize))

    @classmethod
    def summable(cls, count: int, largest: int, workers: int) -> Fields:
        """The layout for values of 0 to `largest` that so many workers may add without a carry."""
        if largest * workers >= _EXACT:
            bits = ((_EXACT - 1) // workers + 2).bit_length() - 2  # of the magnitude: the largest of 2 (2**bits - 1)
            raise UsageError(
                f"codes of 0 to {largest} added up over {workers} workers",
                f"A sum has to stay below {_EXACT}, to be exact in float32.",
                f"Use bits, or the first of levels, of at most {bits}; or qsgd_mn:meet=shard, which adds no codes.",
            )
        return cls.of(count, (largest * workers).bit_length())

    @classmethod
    def dense(cls, count: int, largest: int) -> Fields:
        """The layout of the fewest bytes for values of 0 to `largest` that are not added."""
        width = largest.bit_length()
        return min(cls.of(count, width), Planes(count, width, torch.uint8, 8), key=lambda fields: fields.bytes)

    @property
    def in_words(self) -> Fields | None:
        """The layout itself; of planes that of the 64-bit words whose bytes they are, None where these do not fit."""
        return self

    @property
    def words(self) -> int:
        """How many words there are."""
        return -(-self.count // self.per_word)

    @property
    def bytes(self) -> int:
        """Bytes of the words."""
        return self.words * self.word.itemsize

    def runs(self) -> Iterator[tuple[int, int]]:
        """For each chunk of words, and each place in them, the range of values there; empty ranges included."""
        for first in range(0, self.words, CHUNK):
            long = min(CHUNK, self.words - first)
            for place in range(self.per_word):
                start = min(place * self.words + first, self.count)
                yield start, min(start + long, self.count)

    def pack(self, out: Tensor, code: Callable[[int, int, Tensor], None], scratch: Scratch) -> None:
        """Fill words."""
        _expect(out, self.words)
        for first, words in self._chunks(out):
            words.zero_()
            for place, start, stop in self._slices(first, words.numel()):
                values = scratch.take("field values", stop - start)
                code(start, stop, values)
                shifted = scratch.take("field words", stop - start, self.word)
                shifted.copy_(values)
                words[: stop - start].bitwise_or_(shifted.bitwise_left_shift_(place * self.width))

    def unpack(self, words: Tensor, use: Callable[[int, int, Tensor], None], scratch: Scratch) -> None:
        """Read words."""
        _expect(words, self.words)
        mask = (1 << self.width) - 1
        for first, chunk in self._chunks(words):
            for place, start, stop in self._slices(first, chunk.numel()):
                shifted = scratch.take("field words", stop - start, self.word)
                torch.bitwise_right_shift(chunk[: stop - start], place * self.width, out=shifted)
                values = scratch.take("field values", stop - start)
                values.copy_(shifted.bitwise_and_(mask))
                use(start, stop, values)

    def _chunks(self, words: Tensor) -> Iterator[tuple[int, Tensor]]:
        for first in range(0, self.words, CHUNK):
            yield first, words[first : first + CHUNK]

    def _slices(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """For words from `first` on: each place in them, and the range of values that lies there."""
        for place in range(self.per_word):
            start = place * self.words + first
            stop = min(start + count, self.count)
            if start < stop:
                yield place, start, stop


class Planes(Fields):
    """Values that lie 8 in `width` bytes, some of them in two bytes. They cannot be added."""

    @property
    def in_words(self) -> Fields | None:
        return Fields(self.count, self.width, torch.int64, self.per_word) if self.width <= 8 else None

    @property
    def bytes(self) -> int:
        """Bytes of all planes."""
        return self.words * self.width

    def pack(self, out: Tensor, code: Callable[[int, int, Tensor], None], scratch: Scratch) -> None:
        """`out` has `bytes` elements."""
        _expect(out, self.bytes)
        planes = out.view(self.width, self.words)
        for first, words in self._chunks(planes[0]):
            chunk = planes[:, first : first + words.numel()]
            chunk.zero_()
            for place, start, stop in self._slices(first, words.numel()):
                values, count = scratch.take("field values", stop - start), stop - start
                code(start, stop, values)
                whole = scratch.take("field words", count, torch.int32).copy_(values)
                for plane, shift in self._bytes_of(place):
                    part = scratch.take("field parts", count, torch.int32)
                    _shift_left(whole, shift, part).bitwise_and_(255)
                    chunk[plane, :count].bitwise_or_(part.to(torch.uint8))

    def unpack(self, words: Tensor, use: Callable[[int, int, Tensor], None], scratch: Scratch) -> None:
        """`words` has `bytes` elements."""
        _expect(words, self.bytes)
        planes = words.view(self.width, self.words)
        mask = (1 << self.width) - 1
        for first, row in self._chunks(planes[0]):
            chunk = planes[:, first : first + row.numel()]
            for place, start, stop in self._slices(first, row.numel()):
                count = stop - start
                whole = scratch.take("field words", count, torch.int32).zero_()
                for plane, shift in self._bytes_of(place):
                    part = scratch.take("field parts", count, torch.int32).copy_(chunk[plane, :count])
                    whole.bitwise_or_(_shift_left(part, -shift, part))
                values = scratch.take("field values", count)
                values.copy_(whole.bitwise_and_(mask))
                use(start, stop, values)

    def _bytes_of(self, place: int) -> Iterator[tuple[int, int]]:
        """Planes that hold bits of a place, and how far its values are shifted to the left to fit there."""
        begin = place * self.width
        for plane in range(begin // 8, -(-(begin + self.width) // 8)):
            yield plane, begin - 8 * plane


def _shift_left(values: Tensor, shift: int, out: Tensor) -> Tensor:
    """Shift whole numbers that are not negative, to the right where the shift is."""
    if shift < 0:
        return torch.bitwise_right_shift(values, -shift, out=out)
    return torch.bitwise_left_shift(values, shift, out=out)


def _shifts(device: torch.device) -> Tensor:
    """Where each bit lies in a byte; made on the device, as a copy from the host would wait for it."""
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def _expect(packed: Tensor, size: int) -> None:
    assert packed.numel() == size, f"{packed.numel()} packed elements, where {size} are needed"
