"""Rounds values at random, and packs values of fewer than 8 bits into bytes and words.

Two layouts:

* **bits**: 8 truth values per byte, the first in the most significant bit. Two of them are a value of 2 bits, as in
  MXNet's 2-bit gradient compression.
* **fields**: values of w bits, so many as fit into a word of 8, 32 or 64 bits. Of W words, word j holds values j,
  j + W, ..., so that packing is a shift of a contiguous slice. Words can be added, by any collective, as long as
  no field outgrows its w bits: then nothing carries into the next.

Bits use numpy on a CPU, which has that as a vectorised operation; elsewhere torch.

Random numbers are independent between workers and steps: each worker draws from a generator that is seeded anew at
every step by the job's seed, the parameter's name, the rank and the number of steps that counted. So a step that did
not count can be repeated. Drawing takes long, so one chunk is drawn per message and used again, from another offset,
for the next chunk: each value's own noise stays uniform and independent of the value.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridpar.compress.codec import CHUNK, TensorSpec
from hybridpar.compress.memory import Scratch
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


def pack_bits(bits: Tensor, out: Tensor) -> None:
    """Pack truth values, the first into the most significant bit of the first byte."""
    assert out.numel() == bits_size(bits.numel())
    if bits.device.type == "cpu":
        out.copy_(torch.from_numpy(np.packbits(bits.numpy())))
        return
    padded = torch.zeros(out.numel() * 8, dtype=torch.uint8, device=bits.device)
    padded[: bits.numel()] = bits.view(-1)
    out.copy_((padded.view(-1, 8) << _shifts(bits.device)).sum(1, dtype=torch.uint8))


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack_bits`."""
    assert packed.numel() == bits_size(count)
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count)).view(torch.bool)
    return ((packed.unsqueeze(1) >> _shifts(packed.device)) & 1).view(-1)[:count].bool()


def select(bits: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """High where a bit is set, else low: `torch.where` without its branches."""
    first, second = low.view(torch.int32), high.view(torch.int32)
    # A byte of -1 becomes a word of -1; bytes are four times as fast to negate.
    mask = bits.view(torch.int8).neg().to(torch.int32)
    return mask.bitwise_and_(first ^ second).bitwise_xor_(first).view(torch.float32)


def slices(count: int, step: int = CHUNK) -> list[slice]:
    """Cut so many elements into ranges that fit in a cache."""
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def magnitude(values: Tensor) -> Tensor:
    """Largest |value|, 0-d; NaN where one is NaN. A norm would look at one value at a time."""
    low, high = torch.aminmax(values)
    return torch.maximum(high, -low)


@dataclass(frozen=True)
class Fields:
    """How values of some bits lie in words.

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

    @property
    def words(self) -> int:
        """How many words there are."""
        return -(-self.count // self.per_word)

    @property
    def bytes(self) -> int:
        """Bytes of the words."""
        return self.words * self.word.itemsize

    def runs(self) -> Iterator[tuple[int, int]]:
        """For each chunk of words, and each field in them, the range of values there; empty ranges included."""
        for first in range(0, self.words, CHUNK):
            long = min(CHUNK, self.words - first)
            for field in range(self.per_word):
                start = min(field * self.words + first, self.count)
                yield start, min(start + long, self.count)

    def pack(self, out: Tensor, code: Callable[[int, int, Tensor], None], scratch: Scratch) -> None:
        """Fill words; `code` writes the values of a range."""
        assert out.numel() == self.words
        out.zero_()
        for words, shift, start, stop in self._slices(out):
            values = scratch.take("field values", stop - start)
            code(start, stop, values)
            shifted = scratch.take("field words", stop - start, self.word).copy_(values)
            words.bitwise_or_(shifted.bitwise_left_shift_(shift))

    def unpack(self, words: Tensor, use: Callable[[int, int, Tensor], None], scratch: Scratch) -> None:
        """Read words; `use` is given the values of a range, which it may change."""
        assert words.numel() == self.words
        for part, shift, start, stop in self._slices(words):
            shifted = scratch.take("field words", stop - start, self.word)
            torch.bitwise_right_shift(part, shift, out=shifted)
            values = scratch.take("field values", stop - start)
            values.copy_(shifted.bitwise_and_((1 << self.width) - 1))
            use(start, stop, values)

    def _slices(self, words: Tensor) -> Iterator[tuple[Tensor, int, int, int]]:
        """Words, how far a field in them is shifted, and the range of values in it."""
        for number, (start, stop) in enumerate(self.runs()):
            if start < stop:
                chunk, field = divmod(number, self.per_word)
                yield words[chunk * CHUNK :][: stop - start], field * self.width, start, stop


def _shifts(device: torch.device) -> Tensor:
    """Where each bit lies in a byte; made on the device, as a copy from the host would wait for it."""
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


#: Noise is a multiple of 1 / GRAINS, so that adding it to a whole number of up to 255 is exact in float32.
GRAINS = 1 << 16


class Noise:
    """What a worker draws to round the values of a parameter up or down; with the rounding `zero` nothing."""

    def __init__(self, spec: TensorSpec, rounding: str = "random") -> None:
        self._spec = spec
        #: Whether values are rounded at random.
        self.random = rounding == "random"
        self._generator: torch.Generator | None = None  # a coder of which only the bytes are asked draws nothing
        self._offsets = random.Random()
        #: What `draw` drew last.
        self.ring = torch.empty(0)

    def begin(self, step: int) -> None:
        """Start the draws of a step, which follow from its number."""
        seed = self._spec.draw_seed("noise", self._spec.rank, step)
        if self._generator is None:
            self._generator = torch.Generator(device=self._spec.device)
        self._generator.manual_seed(seed)
        self._offsets.seed(seed)

    def draw(self, count: int, scratch: Scratch) -> None:
        """Draw for a message of so many values, into memory that is borrowed until it is written."""
        if not self.random:
            return
        self.ring = scratch.take("noise", min(count, CHUNK) * 5 // 4 + 1)
        # 64 bits at a time are four grains; a draw of a float would cost as much as all of them.
        drawn = scratch.take("drawn", -(-self.ring.numel() // 4), torch.int64)
        grains = drawn.random_(-(1 << 63), None, generator=self._generator).view(torch.int16)
        self.ring.copy_(grains[: self.ring.numel()]).add_(GRAINS // 2).div_(GRAINS)

    def offset(self, count: int) -> int:
        """Where in the ring the noise of so many values begins, at most a chunk; each call draws anew."""
        return self._offsets.randrange(self.ring.numel() - count + 1)

    def round_(self, values: Tensor) -> None:
        """Round at most a chunk of values in place: up or down at random so that the mean stays, or towards zero."""
        if self.random:
            start = self.offset(values.numel())
            values.add_(self.ring[start : start + values.numel()]).floor_()
        else:
            values.trunc_()
