"""CPU kernels of `powersgd`: passes over a matrix with few rows of factors, each of which reads memory once.

BLAS multiplies a large matrix with one row as fast as memory allows, but with two to four rows at half of that or less,
and cannot make the matrix on the way. Factors lie as rows: `p` has as many numbers per row as the matrix has rows, `q`
as many as it has columns. Some rows of the matrix are worked on at a time, so that numbers of factors are read once for
all of them. The columns are a multiple of `LANES`. In what follows, k counts rows of factors and n rows of the matrix.
"""

from __future__ import annotations

from typing import Any

from hybridpar.codegen import LANES
from hybridpar.codegen.tir_script import T, fence, floats, in_groups, kernels, muladd, past_caches, put, total, w

#: Rows of factors that there are kernels for; with more of them BLAS is fast enough.
RANKS = (1, 2, 3, 4)

#: Rows of the matrix that are worked on at a time; where a single matrix is read, and none written, twice as many.
ROWS = 4


def define(_: Any) -> dict[str, Any]:
    """The functions of this file by name."""
    passes = {"left": left, "right": right, "product": product}
    functions = {}
    for rank in RANKS:
        functions |= {f"powersgd_{name}{rank}": script.specialize(rank=rank) for name, script in passes.items()}
    return kernels(**functions)


@T.jit
def left(
    values: T.int64, residual: T.int64, owed_p: T.int64, owed_q: T.int64, pending: T.int64, q: T.int64, p: T.int64,
    rows: T.int64, columns: T.int64, factor: T.float32, rank: T.constexpr,
):  # fmt: skip
    """Set pending = values + factor * (residual - owed_p^T owed_q), and p = q pending^T."""
    g, r, ps, qs, result, numbers, products = floats(values, residual, owed_p, owed_q, pending, q, p)
    past: T.let = past_caches(rows * columns, pending)

    @T.inline
    def some(first, count):
        owed = T.alloc_local((rank, count), "float32")
        sums = T.alloc_local((rank, count), "float32x16")
        v = T.alloc_local((count,), "float32x16")
        for k in T.unroll(rank):
            for n in T.unroll(count):
                owed[k, n] = -ps[k * rows + first + n]
                sums[k, n] = w.zeros()
        for block in range(columns // LANES):
            column: T.let = block * LANES
            for n in T.unroll(count):
                v[n] = r[w.at((first + n) * columns + column)]
            for k in T.unroll(rank):
                wide: T.let = qs[w.at(k * columns + column)]
                for n in T.unroll(count):
                    v[n] = muladd(owed[k, n], wide, v[n])
            for n in T.unroll(count):
                v[n] = muladd(factor, v[n], g[w.at((first + n) * columns + column)])
            for n in T.unroll(count):
                put(result, (first + n) * columns + column, v[n], past)
            for k in T.unroll(rank):
                wide: T.let = numbers[w.at(k * columns + column)]
                for n in T.unroll(count):
                    sums[k, n] = muladd(wide, v[n], sums[k, n])
        for k in T.unroll(rank):
            for n in T.unroll(count):
                products[k * rows + first + n] = total(sums[k, n])

    in_groups(rows, ROWS, some)
    fence(rows * columns)


@T.jit
def right(matrix: T.int64, p: T.int64, q: T.int64, rows: T.int64, columns: T.int64, rank: T.constexpr):
    """Set q = p matrix."""
    values, ps, result = floats(matrix, p, q)
    for i in range(rank * columns):
        result[i] = T.float32(0)

    @T.inline
    def some(first, count):
        numbers = T.alloc_local((rank, count), "float32")
        v = T.alloc_local((count,), "float32x16")
        for k in T.unroll(rank):
            for n in T.unroll(count):
                numbers[k, n] = ps[k * rows + first + n]
        for block in range(columns // LANES):
            column: T.let = block * LANES
            for n in T.unroll(count):
                v[n] = values[w.at((first + n) * columns + column)]
            for k in T.unroll(rank):
                sums = result[w.at(k * columns + column)]
                for n in T.unroll(count):
                    sums = muladd(numbers[k, n], v[n], sums)
                result[w.at(k * columns + column)] = sums

    in_groups(rows, 2 * ROWS, some)


@T.jit
def product(out: T.int64, p: T.int64, q: T.int64, rows: T.int64, columns: T.int64, scale: T.float32, rank: T.constexpr):
    """Set out = scale * p^T q."""
    result, ps, qs = floats(out, p, q)
    past: T.let = past_caches(rows * columns, out)

    @T.inline
    def some(first, count):
        numbers = T.alloc_local((rank, count), "float32")
        wide = T.alloc_local((rank,), "float32x16")
        for k in T.unroll(rank):
            for n in T.unroll(count):
                numbers[k, n] = ps[k * rows + first + n]
        for block in range(columns // LANES):
            column: T.let = block * LANES
            for k in T.unroll(rank):
                wide[k] = qs[w.at(k * columns + column)]
            for n in T.unroll(count):
                value = wide[0] * numbers[0, n]
                for k in T.unroll(1, rank):
                    value = muladd(numbers[k, n], wide[k], value)
                put(result, (first + n) * columns + column, value * scale, past)

    in_groups(rows, ROWS, some)
    fence(rows * columns)
