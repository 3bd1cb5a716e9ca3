"""CPU kernels of `qsgd_mn`: rounding, packing and unpacking in one pass each.

Of W words, word j holds values j, j + W, ...: a block of words is filled by one run through the values of each field,
and stays in the cache meanwhile. The arithmetic of a value is that of the torch code, operation by operation, except
that a product and a sum may be rounded once instead of twice when encoding.
"""

from __future__ import annotations

from typing import Any

from hybridpar.codegen import LANES
from hybridpar.codegen.tir_script import T, cast, floats, kernels, like, magnitude_bits, total, w
from hybridpar.codegen.tir_writer import INFINITE

#: Words that stay in the cache while all their fields are filled or read; a chunk is a multiple of it.
BLOCK = 512

_WORDS = {"uint8": 8, "int32": 32, "int64": 64}


def define(_: Any) -> dict[str, Any]:
    """The functions of this file by name."""
    functions = {"qsgd_scale": scale_of.specialize()}
    for dtype, bits in _WORDS.items():
        functions[f"qsgd_encode_{bits}"] = encode.specialize(dtype=dtype)
        functions[f"qsgd_decode_{bits}"] = decode.specialize(dtype=dtype, add=False)
        functions[f"qsgd_add_{bits}"] = decode.specialize(dtype=dtype, add=True)
    return kernels(**functions)


@T.jit
def scale_of(values: T.int64, out: T.int64, count: T.int64):
    """The largest magnitude, infinite where a value is not finite."""
    given, result = w.view(values, "float32"), w.view(out, "int32")
    # Four vectors at a time, so that a maximum need not wait for the one before.
    tops = T.alloc_local((4,), "int32x16")
    for part in T.unroll(4):
        tops[part] = w.lanes(0)
    blocks: T.let = count // (4 * LANES)
    for block in range(blocks):
        for part in T.unroll(4):
            tops[part] = T.max(tops[part], magnitude_bits(given[w.at((block * 4 + part) * LANES)]))
    top = total(T.max(T.max(tops[0], tops[1]), T.max(tops[2], tops[3])), T.max)
    for i in range(blocks * (4 * LANES), count):
        top = T.max(top, magnitude_bits(given[i]))
    result[0] = T.min(top, INFINITE)


@T.jit
def encode(
    values: T.int64, scale: T.int64, words: T.int64, noise: T.int64, offsets: T.int64, count: T.int64,
    word_count: T.int64, width: T.int64, per_word: T.int64, steps: T.int64, chunk: T.int64, dtype: T.constexpr,
):  # fmt: skip
    """Round values to codes. In `noise` each run of up to `chunk` values begins at one of `offsets`."""
    v, scales, ring = floats(values, scale, noise)
    packed, starts = w.view(words, dtype), w.view(offsets, "int64")
    divisor: T.let = T.Select(scales[0] > T.float32(0), scales[0], T.float32(1))
    most: T.let = T.cast(steps, "float32")
    for block in range((word_count + BLOCK - 1) // BLOCK):
        first: T.let = block * BLOCK
        for field in range(per_word):
            start: T.let = field * word_count + first
            drawn: T.let = starts[first // chunk * per_word + field] + first % chunk
            shift: T.let = T.cast(field * width, dtype)
            long: T.let = T.max(T.min(T.min(BLOCK, word_count - first), count - start), 0)

            @T.inline
            def write(word, value, noise):
                position: T.let = v[value] / divisor * most + ring[noise]
                code: T.let = cast(T.min(T.floor(position), most), "int32") + T.cast(steps, "int32")
                before: T.let = T.Select(field == 0, T.cast(0, like(code, dtype)), packed[word])
                packed[word] = before | (cast(code, dtype) << shift)

            for j in range(long // LANES):
                write(w.at(first + j * LANES), w.at(start + j * LANES), w.at(drawn + j * LANES))
            for j in range(long // LANES * LANES, long):
                write(first + j, start + j, drawn + j)


@T.jit
def decode(
    words: T.int64, scale: T.int64, out: T.int64, count: T.int64, word_count: T.int64, width: T.int64,
    per_word: T.int64, zero: T.int64, unit: T.float32, dtype: T.constexpr, add: T.constexpr,
):  # fmt: skip
    """Set `out` to (code - zero) / unit * scale, or add that to it."""
    scales, result = floats(scale, out)
    packed = w.view(words, dtype)
    size: T.let = scales[0]
    mask: T.let = T.cast((T.int64(1) << width) - 1, dtype)
    for block in range((word_count + BLOCK - 1) // BLOCK):
        first: T.let = block * BLOCK
        for field in range(per_word):
            start: T.let = field * word_count + first
            shift: T.let = T.cast(field * width, dtype)
            long: T.let = T.max(T.min(T.min(BLOCK, word_count - first), count - start), 0)

            @T.inline
            def read(word, value):
                code: T.let = cast((packed[word] >> shift) & mask, "int32")
                number: T.let = (cast(code, "float32") - T.cast(zero, "float32")) / unit * size
                result[value] = result[value] + number if add else number

            for j in range(long // LANES):
                read(w.at(first + j * LANES), w.at(start + j * LANES))
            for j in range(long // LANES * LANES, long):
                read(first + j, start + j)
