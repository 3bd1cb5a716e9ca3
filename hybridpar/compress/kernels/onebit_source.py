"""CPU kernels of `onebit` for groups that are rows: signs, means and residual in one pass over memory.

A group is read twice, the second time from the cache. v is not written in between but made again, so that memory is
read at v's two parts and written once. Large tensors are written past the caches: else each line would first be read.
"""

from __future__ import annotations

from typing import Any

from hybridpar.codegen import LANES
from hybridpar.codegen.tir_script import T, fence, floats, kernels, magnitude_bits, past_caches, put, total, w
from hybridpar.codegen.tir_writer import INFINITE


def define(_: Any) -> dict[str, Any]:
    """The functions of this file by name."""
    return kernels(
        onebit_encode=encode.specialize(keeps=False),
        onebit_encode_keep=encode.specialize(keeps=True),
        onebit_decode=decode.specialize(add=False),
        onebit_add=decode.specialize(add=True),
    )


def v(g: Any, r: Any, factor: Any, i: Any, keeps: bool) -> Any:
    """A value, or a vector of them, with what is left from before."""
    return g[i] + factor * r[i] if keeps else g[i]


@T.jit
def encode(
    values: T.int64, residual: T.int64, pending: T.int64, lower: T.int64, upper: T.int64, bits: T.int64,
    groups: T.int64, length: T.int64, stream: T.int64, factor: T.float32, keeps: T.constexpr,
):  # fmt: skip
    """Encode groups, and write v - C(v) where a residual is kept; `stream` says that this goes past the caches."""
    g, r, left, a0s, a1s = floats(values, residual, pending, lower, upper)
    packed = w.view(bits, "uint8")
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
            past: T.let = past_caches(stream, pending + start * 4)
            for block in range(length // LANES):
                i: T.let = start + block * LANES
                value: T.let = v(g, r, factor, w.at(i), keeps)
                put(left, i, value - T.Select(value >= 0, w.lanes(a1), w.lanes(a0)), past)
            for i in range(tail, end):
                value: T.let = v(g, r, factor, i, keeps)
                left[i] = value - T.Select(value >= 0, a1, a0)
    # Bits that fill no 16 are a byte or two, with zeros behind them.
    count: T.let = groups * length
    rest: T.let = new << T.cast(16 - count % 16, "int32")
    if count % 16 > 0:
        packed[count // 16 * 2] = T.cast(rest >> 8, "uint8")
    if count % 16 > 8:
        packed[count // 16 * 2 + 1] = T.cast(rest & 255, "uint8")
    fence(stream)


@T.jit
def decode(
    lower: T.int64, upper: T.int64, bits: T.int64, out: T.int64, groups: T.int64, length: T.int64, stream: T.int64,
    add: T.constexpr,
):  # fmt: skip
    """Set `out` to the levels that bits choose, or add these to it."""
    a0s, a1s, result = floats(lower, upper, out)
    packed = w.view(bits, "uint8")
    for row in range(groups):
        start: T.let = row * length
        a0: T.let = a0s[row]
        a1: T.let = a1s[row]
        past: T.let = past_caches(stream, out + start * 4)
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
    fence(stream)
