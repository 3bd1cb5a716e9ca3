"""CPU kernels of `onebit`, `twobit` and `qsgd_mn`: values to codes and back, each in as few passes as there can be.

What is encoded may be v = g + factor * r, of a gradient and what is left from before. v is not written in between but
made again, so that memory is read at v's two parts and written once. Large tensors are written past the caches: else
each line would first be read.

* `onebit` reads a group twice, the second time from the cache, for its signs, their means and what is left.
* `twobit` takes two passes, as the threshold depends on all values: the first finds mean and largest magnitude, the
  second writes codes and what is left. Sums run over `SUMMED` values in float32 and on from there in float64.
* `qsgd_mn` rounds, packs and unpacks in one pass each. Of W words, word j holds values j, j + W, ...: a block of words
  is filled by one run through the values of each field, and stays in the cache meanwhile. The arithmetic of a value is
  that of the torch code, operation by operation, except that a product and a sum may be rounded once instead of twice
  when encoding.
"""

from __future__ import annotations

from typing import Any

from hybridpar.codegen import LANES
from hybridpar.codegen.tir_script import (
    T,
    cast,
    fence,
    floats,
    kernels,
    like,
    magnitude_bits,
    past_caches,
    put,
    total,
    w,
)
from hybridpar.codegen.tir_writer import INFINITE

#: Values whose sum is made in float32; a multiple of `LANES`.
SUMMED = 1024

#: Words that stay in the cache while all their fields are filled or read; a chunk is a multiple of it.
BLOCK = 512

_WORDS = {"uint8": 8, "int32": 32, "int64": 64}

NAN = T.reinterpret("float32", T.int32(0x7FC00000))


def define(_: Any) -> dict[str, Any]:
    """The functions of this file by name."""
    functions = {"qsgd_scale": qsgd_scale.specialize()}
    for name, encode, decode in (("onebit", onebit_encode, onebit_decode), ("twobit", twobit_encode, twobit_decode)):
        functions[f"{name}_encode"] = encode.specialize(keeps=False)
        functions[f"{name}_encode_keep"] = encode.specialize(keeps=True)
        functions[f"{name}_decode"] = decode.specialize(add=False)
        functions[f"{name}_add"] = decode.specialize(add=True)
    for dtype, bits in _WORDS.items():
        functions[f"qsgd_encode_{bits}"] = qsgd_encode.specialize(dtype=dtype)
        functions[f"qsgd_decode_{bits}"] = qsgd_decode.specialize(dtype=dtype, add=False)
        functions[f"qsgd_add_{bits}"] = qsgd_decode.specialize(dtype=dtype, add=True)
    return kernels(**functions)


def v(g: Any, r: Any, factor: Any, i: Any, keeps: bool) -> Any:
    """A value, or a vector of them, with what is left from before."""
    return g[i] + factor * r[i] if keeps else g[i]


@T.jit
def onebit_encode(
    values: T.int64, residual: T.int64, pending: T.int64, lower: T.int64, upper: T.int64, bits: T.int64,
    groups: T.int64, length: T.int64, factor: T.float32, keeps: T.constexpr,
):  # fmt: skip
    """Encode groups, and write v - C(v) where a residual is kept."""
    g, r, left, a0s, a1s = floats(values, residual, pending, lower, upper)
    packed = w.view(bits, "uint8")
    count: T.let = groups * length
    new = T.int32(0)  # bits, the last one lowest
    for row in range(groups):
        start: T.let = row * length
        end: T.let = start + length
        tail: T.let = start + length // LANES * LANES
        below = w.zeros()
        above = w.zeros()
        ones = T.int32(0)
        for block in range(length // LANES):
            i: T.let = start + block * LANES
            value: T.let = v(g, r, factor, w.at(i), keeps)
            signs: T.let = w.call("int32", "hp_bits", value >= 0)
            # Whole 16s are written: where a row begins within 16 bits, they begin with the last ones of the row before.
            new = (new << 16) | signs
            w.call("void", "hp_store16", T.address_of(packed[i // 16 * 2]), new >> T.cast(i % 16, "int32"))
            ones += T.popcount(signs)
            # NaN is not positive, so it reaches the lower level.
            above += T.Select(value >= 0, value, w.zeros())
            below += T.Select(value >= 0, w.zeros(), value)
        low = total(below)
        high = total(above)
        for i in range(tail, end):
            value: T.let = v(g, r, factor, i, keeps)
            sign: T.let = T.cast(value >= 0, "int32")
            new = (new << 1) | sign
            if i % 16 == 15:
                w.call("void", "hp_store16", T.address_of(packed[i // 16 * 2]), new)
            ones += sign
            high += T.Select(value >= 0, value, T.float32(0))
            low += T.Select(value >= 0, T.float32(0), value)
        a0: T.let = low / T.cast(T.max(T.cast(length, "int32") - ones, 1), "float32")
        mean: T.let = high / T.cast(T.max(ones, 1), "float32")
        # A NaN was added to the lower level; both are NaN then. Infinity is of one side only.
        a1: T.let = T.Select(magnitude_bits(a0) > INFINITE, a0, mean)
        a0s[row] = a0
        a1s[row] = a1
        if keeps:
            past: T.let = past_caches(count, pending + start * 4)
            for block in range(length // LANES):
                i: T.let = start + block * LANES
                value: T.let = v(g, r, factor, w.at(i), keeps)
                put(left, i, value - T.Select(value >= 0, w.lanes(a1), w.lanes(a0)), past)
            for i in range(tail, end):
                value: T.let = v(g, r, factor, i, keeps)
                left[i] = value - T.Select(value >= 0, a1, a0)
    # Bits that fill no 16 are a byte or two, with zeros behind them.
    rest: T.let = new << T.cast(16 - count % 16, "int32")
    if count % 16 > 0:
        packed[count // 16 * 2] = T.cast(rest >> 8, "uint8")
    if count % 16 > 8:
        packed[count // 16 * 2 + 1] = T.cast(rest & 255, "uint8")
    fence(count)


@T.jit
def onebit_decode(
    lower: T.int64, upper: T.int64, bits: T.int64, out: T.int64, count: T.int64, length: T.int64, add: T.constexpr
):
    """Set `out` to the levels that bits choose, or add these to it."""
    a0s, a1s, result = floats(lower, upper, out)
    packed = w.view(bits, "uint8")
    groups: T.let = count // T.max(length, 1)
    for row in range(groups):
        start: T.let = row * length
        a0: T.let = a0s[row]
        a1: T.let = a1s[row]
        past: T.let = past_caches(count, out + start * 4)
        # 16 bits are read as 32, so the last ones of all are read one by one.
        blocks: T.let = T.max((length - T.Select(row == groups - 1, LANES, 0)) // LANES, 0)
        for block in range(blocks):
            i: T.let = start + block * LANES
            word: T.let = w.call("int32", "hp_load32", T.address_of(packed[i // 8]))
            signs = T.meta_var(w.call("boolx16", "hp_mask", word >> (16 - T.cast(i % 8, "int32"))))
            value: T.let = T.Select(signs, w.lanes(a1), w.lanes(a0))
            if add:
                result[w.at(i)] += value
            else:
                put(result, i, value, past)
        for i in range(start + blocks * LANES, start + length):
            sign: T.let = (T.cast(packed[i // 8], "int32") >> T.cast(7 - i % 8, "int32")) & 1
            value: T.let = T.Select(sign == 1, a1, a0)
            result[i] = result[i] + value if add else value
    fence(count)


def choose(plus: Any, minus: Any, *choices: Any) -> Any:
    """The first choice where plus holds, the second where minus does, else the third; of vectors as of numbers."""
    high, low, none = (w.lanes(choice) if plus.ty.dtype.lanes > 1 else choice for choice in choices)
    return T.Select(plus, high, T.Select(minus, low, none))


@T.jit
def twobit_encode(
    values: T.int64, residual: T.int64, pending: T.int64, level: T.int64, codes: T.int64, count: T.int64,
    fixed: T.float32, factor_of_mean: T.float32, cap: T.float32, factor: T.float32, keeps: T.constexpr,
):  # fmt: skip
    """Encode values. The threshold is `fixed`, or where that is 0 min(factor_of_mean * mean, cap * largest)."""
    g, r, left, levels = floats(values, residual, pending, level)
    packed = w.view(codes, "uint8")
    tail: T.let = count // LANES * LANES
    tops = w.lanes(0)
    magnitudes = T.float64(0)
    for block in range((tail + SUMMED - 1) // SUMMED):
        begin: T.let = block * SUMMED
        sums = w.zeros()
        for step in range(T.min(SUMMED, tail - begin) // LANES):
            value: T.let = v(g, r, factor, w.at(begin + step * LANES), keeps)
            tops = T.max(tops, magnitude_bits(value))
            sums += T.max(value, -value)
        magnitudes += T.cast(total(sums), "float64")
    top = total(tops, T.max)
    for i in range(tail, count):
        value: T.let = v(g, r, factor, i, keeps)
        top = T.max(top, magnitude_bits(value))
        magnitudes += T.cast(T.max(value, -value), "float64")
    mean: T.let = T.cast(magnitudes / T.cast(count, "float64"), "float32")
    adapted: T.let = T.min(factor_of_mean * mean, cap * T.reinterpret("float32", top))
    least: T.let = T.Select(fixed > T.float32(0), fixed, adapted)
    sent: T.let = T.Select(top < INFINITE, least, NAN)
    levels[0] = sent

    past: T.let = past_caches(count, pending)
    for block in range(count // LANES):
        i: T.let = block * LANES
        value: T.let = v(g, r, factor, w.at(i), keeps)
        plus, minus = T.meta_var(value >= least), T.meta_var(value <= -least)
        pairs = w.call("int32", "hp_pairs", T.Or(plus, minus), plus)
        w.call("void", "hp_store32", T.address_of(packed[i // 4]), pairs)
        if keeps:
            put(left, i, value - choose(plus, minus, T.float32(1), T.float32(-1), T.float32(0)) * sent, past)
    if count > tail:
        word = T.int32(0)
        for i in range(tail, count):
            value: T.let = v(g, r, factor, i, keeps)
            plus, minus = T.meta_var(value >= least), T.meta_var(value <= -least)
            code: T.let = choose(plus, minus, T.int32(3), T.int32(2), T.int32(0))
            word = word | (code << T.cast(30 - 2 * (i - tail), "int32"))
            if keeps:
                left[i] = value - choose(plus, minus, T.float32(1), T.float32(-1), T.float32(0)) * sent
        w.call("void", "hp_store32", T.address_of(packed[tail // 4]), word)
    fence(count)


@T.jit
def twobit_decode(level: T.int64, codes: T.int64, out: T.int64, count: T.int64, add: T.constexpr):
    """Set `out` to plus, nothing or minus the level, or add that to it."""
    levels, result = floats(level, out)
    packed = w.view(codes, "uint8")
    unit: T.let = levels[0]
    nothing: T.let = T.Select(
        magnitude_bits(unit) < INFINITE, T.float32(0), NAN
    )  # all that is decoded is NaN, or nothing
    past: T.let = past_caches(count, out)
    shifts: T.let = 30 - T.ramp(0, 2, LANES)
    for block in range(count // LANES):
        i: T.let = block * LANES
        word: T.let = w.call("int32", "hp_load32", T.address_of(packed[i // 4]))
        code: T.let = (w.lanes(word) >> shifts) & 3
        value: T.let = choose(code == 3, code == 2, unit, -unit, nothing)
        if add:
            result[w.at(i)] += value
        else:
            put(result, i, value, past)
    for i in range(count // LANES * LANES, count):
        code: T.let = (T.cast(packed[i // 4], "int32") >> T.cast(6 - 2 * (i % 4), "int32")) & 3
        value: T.let = choose(code == 3, code == 2, unit, -unit, nothing)
        result[i] = result[i] + value if add else value
    fence(count)


@T.jit
def qsgd_scale(values: T.int64, out: T.int64, count: T.int64):
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
def qsgd_encode(
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
def qsgd_decode(
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
