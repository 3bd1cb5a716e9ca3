"""CPU kernels of `twobit`: two passes, as the threshold depends on all values.

The first pass finds mean and largest magnitude, of v that is made on the way; the second makes v again, and writes
codes and what is not sent. Sums run over `BLOCK` values in float32 and on from there in float64.
"""

from __future__ import annotations

from typing import Any

from hybridpar.codegen import LANES
from hybridpar.codegen.tir_script import T, fence, floats, kernels, magnitude_bits, past_caches, put, total, w
from hybridpar.codegen.tir_writer import INFINITE

#: Values whose sum is made in float32; a multiple of `LANES`.
BLOCK = 1024

NAN = T.reinterpret("float32", T.int32(0x7FC00000))


def define(_: Any) -> dict[str, Any]:
    """The functions of this file by name."""
    return kernels(
        twobit_encode=encode.specialize(keeps=False),
        twobit_encode_keep=encode.specialize(keeps=True),
        twobit_decode=decode.specialize(add=False),
        twobit_add=decode.specialize(add=True),
    )


def v(g: Any, r: Any, factor: Any, i: Any, keeps: bool) -> Any:
    """A value, or a vector of them, with what is left from before."""
    return g[i] + factor * r[i] if keeps else g[i]


def choose(plus: Any, minus: Any, *choices: Any) -> Any:
    """The first choice where plus holds, the second where minus does, else the third; of vectors as of numbers."""
    high, low, none = (w.lanes(choice) if plus.ty.dtype.lanes > 1 else choice for choice in choices)
    return T.Select(plus, high, T.Select(minus, low, none))


@T.jit
def encode(
    values: T.int64, residual: T.int64, pending: T.int64, level: T.int64, codes: T.int64, count: T.int64,
    stream: T.int64, fixed: T.float32, factor_of_mean: T.float32, cap: T.float32, factor: T.float32,
    keeps: T.constexpr,
):  # fmt: skip
    """Encode values. The threshold is `fixed`, or where that is 0 min(factor_of_mean * mean, cap * largest)."""
    g, r, left, levels = floats(values, residual, pending, level)
    packed = w.view(codes, "uint8")
    tail: T.let = count // LANES * LANES
    tops = w.lanes(0)
    magnitudes = T.float64(0)
    for block in range((tail + BLOCK - 1) // BLOCK):
        begin: T.let = block * BLOCK
        sums = w.zeros()
        for step in range(T.min(BLOCK, tail - begin) // LANES):
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

    past: T.let = past_caches(stream, pending)
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
    fence(stream)


@T.jit
def decode(level: T.int64, codes: T.int64, out: T.int64, count: T.int64, stream: T.int64, add: T.constexpr):
    """Set `out` to plus, nothing or minus the level, or add that to it."""
    levels, result = floats(level, out)
    packed = w.view(codes, "uint8")
    unit: T.let = levels[0]
    nothing: T.let = T.Select(
        magnitude_bits(unit) < INFINITE, T.float32(0), NAN
    )  # all that is decoded is NaN, or nothing
    past: T.let = past_caches(stream, out)
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
    fence(stream)
