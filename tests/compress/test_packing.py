"""Tests packing of bits and fields into bytes, with and without NumPy.

One wrong bit is a wrong gradient that no error reports.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridpar.compress.memory import Scratch
from hybridpar.compress.packing import Fields, bits_size, pack_bits, unpack_bits

CPU = torch.device("cpu")


def test_bits_without_numpy_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.rand(1003) < 0.5
    expected = torch.from_numpy(np.packbits(bits.numpy()))
    # A tensor subclass that says it is elsewhere takes the way of other devices.
    elsewhere = bits.as_subclass(_Elsewhere)
    out = torch.empty(bits_size(1003), dtype=torch.uint8)
    pack_bits(elsewhere, out)
    assert torch.equal(out, expected)
    assert torch.equal(unpack_bits(out.as_subclass(_Elsewhere), 1003).as_subclass(Tensor), bits)


class _Elsewhere(Tensor):
    @property
    def device(self) -> _Device:  # type: ignore[override]
        return _Device()


class _Device(str):
    """Means the CPU to torch and something else to those who ask."""

    def __new__(cls) -> _Device:
        return super().__new__(cls, "cpu")

    type = "elsewhere"


def packed(fields: Fields, codes: Tensor) -> Tensor:
    words = torch.empty(fields.bytes // fields.word.itemsize, dtype=fields.word)

    def code(start: int, stop: int, into: Tensor) -> None:
        into.copy_(codes[start:stop])

    fields.pack(words, code, Scratch(CPU))
    return words


def unpacked(fields: Fields, words: Tensor) -> Tensor:
    out = torch.full((fields.count,), -1.0)

    def use(start: int, stop: int, values: Tensor) -> None:
        out[start:stop] = values

    fields.unpack(words, use, Scratch(CPU))
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 300), st.integers(1, 9))
def test_sums_do_not_carry_into_the_next_field(count: int, largest: int, workers: int) -> None:
    fields = Fields.summable(count, largest, workers)
    codes = torch.randint(0, largest + 1, (workers, count), generator=torch.Generator().manual_seed(count))
    codes[:, ::2] = largest  # the most that can come
    words = torch.zeros(fields.words, dtype=fields.word)
    for row in codes:
        words += packed(fields, row)
    assert (words >= 0).all(), "a signed word overflowed"
    assert torch.equal(unpacked(fields, words).long(), codes.sum(0))
