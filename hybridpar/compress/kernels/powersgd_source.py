"""CPU kernels of `powersgd`: three passes over a matrix with few rows of factors, each of which reads memory once.

BLAS multiplies a large matrix with one row as fast as memory allows, but with two to four rows at half of that or less,
and cannot make the matrix on the way. Factors lie as rows: `p` has as many numbers per row as the matrix has rows, `q`
as many as it has columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridpar.codegen.tir_writer import LANES, Writer

#: Rows of factors that there are kernels for; with more of them BLAS is fast enough.
RANKS = (1, 2, 3, 4)

LEFT = ("values", "kept", "pending", "q", "p", "rows", "columns", "stream")
RIGHT = ("matrix", "p", "q", "rows", "columns")
PRODUCT = ("p", "q", "out", "left", "rows", "columns", "stream")

#: Rows of the matrix that are added to the sums at a time.
ROWS = 4


def define(w: Writer) -> dict[str, Any]:
    """The functions of this file by name.

    Args:
        w: What the functions are written with.
    """
    functions = {}
    for rank in RANKS:
        functions |= {
            f"powersgd_left{rank}": w.function(f"powersgd_left{rank}", LEFT, ("factor",), _left(w, rank)),
            f"powersgd_right{rank}": w.function(f"powersgd_right{rank}", RIGHT, (), _right(w, rank)),
            f"powersgd_product{rank}": w.function(f"powersgd_product{rank}", PRODUCT, ("scale",), _product(w, rank)),
        }
    return functions


def _muladd(w: Writer, x: Any, y: Any, z: Any) -> Any:
    return w.call("float32x16", "hp_muladd", x, y, z)


def _left(w: Writer, rank: int) -> Callable[..., None]:
    t = w.t
    zero = t.int64(0)

    def body(
        values: Any,
        kept: Any,
        pending: Any,
        q: Any,
        p: Any,
        rows: Any,
        columns: Any,
        stream: Any,
        factor: Any,
    ) -> None:
        """pending = values + factor * kept, and p = q pending^T."""
        g, r, v = w.view(values, "float32"), w.view(kept, "float32"), w.view(pending, "float32")
        right, result = w.view(q, "float32"), w.view(p, "float32")
        whole = w.keep(columns // LANES)
        sums, ends = [w.local(LANES) for _ in range(rank)], [w.local(1) for _ in range(rank)]

        def write(past: bool) -> None:
            with t.serial(0, rows) as row:
                start = w.keep(row * columns)
                for one in sums:
                    w.store(one, w.at(zero), w.zeros())
                with t.serial(0, whole) as block:
                    place = w.keep(start + block * LANES)
                    value = w.keep(g[w.at(place)] + w.lanes(factor) * r[w.at(place)])
                    if past:
                        w.stream(v, place, value)
                    else:
                        w.store(v, w.at(place), value)
                    for index, one in enumerate(sums):
                        own = right[w.at(index * columns + block * LANES)]
                        w.store(one, w.at(zero), _muladd(w, own, value, one[w.at(zero)]))
                for one, end in zip(sums, ends, strict=True):
                    w.store(end, zero, w.folded(one, lambda x, y: x + y))
                with t.serial(whole * LANES, columns) as column:
                    value = w.keep(g[start + column] + factor * r[start + column])
                    w.store(v, start + column, value)
                    for index, end in enumerate(ends):
                        w.store(end, zero, end[zero] + right[index * columns + column] * value)
                for index, end in enumerate(ends):
                    w.store(result, index * rows + row, end[zero])

        _past_caches(w, stream, pending, columns, write)

    return body


def _right(w: Writer, rank: int) -> Callable[..., None]:
    t = w.t

    def body(matrix: Any, p: Any, q: Any, rows: Any, columns: Any) -> None:
        """q = p matrix."""
        v, left, result = w.view(matrix, "float32"), w.view(p, "float32"), w.view(q, "float32")
        whole = w.keep(columns // LANES)
        with t.serial(0, rank * columns) as place:
            w.store(result, place, t.float32(0))

        def add(first: Any, count: int) -> None:
            """Add some rows of the matrix, each times its number in every row of p."""
            numbers = [[w.keep(left[index * rows + first + n]) for n in range(count)] for index in range(rank)]
            with t.serial(0, whole) as block:
                values = [w.keep(v[w.at((first + n) * columns + block * LANES)]) for n in range(count)]
                for index, own in enumerate(numbers):
                    place = w.at(index * columns + block * LANES)
                    total = result[place]
                    for number, value in zip(own, values, strict=True):
                        total = w.keep(_muladd(w, w.lanes(number), value, total))
                    w.store(result, place, total)
            with t.serial(whole * LANES, columns) as column:
                for index, own in enumerate(numbers):
                    total = result[index * columns + column]
                    for n, number in enumerate(own):
                        total = total + number * v[(first + n) * columns + column]
                    w.store(result, index * columns + column, total)

        with t.serial(0, rows // ROWS) as some:
            add(w.keep(some * ROWS), ROWS)
        with t.serial(rows // ROWS * ROWS, rows) as row:
            add(row, 1)

    return body


def _product(w: Writer, rank: int) -> Callable[..., None]:
    t = w.t

    def body(p: Any, q: Any, out: Any, left: Any, rows: Any, columns: Any, stream: Any, scale: Any) -> None:
        """out = scale * p^T q, and left -= p^T q."""
        ps, qs = w.view(p, "float32"), w.view(q, "float32")
        result, unsent = w.view(out, "float32"), w.view(left, "float32")
        whole = w.keep(columns // LANES)

        def write(past: bool) -> None:
            with t.serial(0, rows) as row:
                start = w.keep(row * columns)
                numbers = [w.keep(ps[index * rows + row]) for index in range(rank)]
                with t.serial(0, whole) as block:
                    place, total = w.keep(start + block * LANES), None
                    for index, number in enumerate(numbers):
                        own = qs[w.at(index * columns + block * LANES)]
                        wide = w.lanes(number)
                        total = w.keep(own * wide if total is None else _muladd(w, wide, own, total))
                    if past:
                        w.stream(result, place, total * w.lanes(scale))
                    else:
                        w.store(result, w.at(place), total * w.lanes(scale))
                    w.store(unsent, w.at(place), unsent[w.at(place)] - total)
                with t.serial(whole * LANES, columns) as column:
                    total = numbers[0] * qs[column]
                    for index, number in enumerate(numbers[1:], 1):
                        total = total + number * qs[index * columns + column]
                    total = w.keep(total)
                    w.store(result, start + column, total * scale)
                    w.store(unsent, start + column, unsent[start + column] - total)

        _past_caches(w, stream, out, columns, write)

    return body


def _past_caches(w: Writer, stream: Any, address: Any, columns: Any, write: Callable[[bool], None]) -> None:
    """Write past the caches where that is asked for and all rows begin at multiples of 64 bytes."""
    t = w.t

    def past() -> None:
        write(True)
        t.evaluate(w.call("int32", "hp_fence"))

    aligned = t.And((address & 63) == 0, (columns % LANES) == 0)
    w.either(t.And(stream != 0, aligned), past, lambda: write(False))
