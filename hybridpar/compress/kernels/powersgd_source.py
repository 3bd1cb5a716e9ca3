"""CPU kernels of `powersgd`: passes over a matrix with few rows of factors, each of which reads memory once.

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

#: `owed_p` and `owed_q` are factors of what is still to be subtracted from what is kept.
LEFT = ("values", "kept", "owed_p", "owed_q", "pending", "q", "p", "rows", "columns", "stream")
RIGHT = ("matrix", "p", "q", "rows", "columns")
PRODUCT = ("p", "q", "out", "rows", "columns", "stream")
SUBTRACT = ("p", "q", "out", "rows", "columns")

#: Rows of the matrix that are worked on at a time, so that numbers of factors are read once for all of them; where only
#: one matrix is read, and none written, twice as many.
ROWS = 4


def define(w: Writer) -> dict[str, Any]:
    """The functions of this file by name."""
    functions: dict[str, Any] = {}
    for rank in RANKS:
        functions |= {
            f"powersgd_left{rank}": w.function(f"powersgd_left{rank}", LEFT, ("factor",), _left(w, rank)),
            f"powersgd_right{rank}": w.function(f"powersgd_right{rank}", RIGHT, (), _right(w, rank)),
            f"powersgd_product{rank}": w.function(f"powersgd_product{rank}", PRODUCT, ("scale",), _product(w, rank)),
            f"powersgd_subtract{rank}": w.function(f"powersgd_subtract{rank}", SUBTRACT, (), _subtract(w, rank)),
        }
    return functions


def _muladd(w: Writer, x: Any, y: Any, z: Any) -> Any:
    return w.call("float32x16", "hp_muladd", x, y, z)


def _left(w: Writer, rank: int) -> Callable[..., None]:
    t = w.t
    zero = t.int64(0)

    def body(pending: Any, rows: Any, columns: Any, stream: Any, factor: Any, **own: Any) -> None:
        """Set pending = values + factor * (kept - owed_p^T owed_q), and p = q pending^T."""
        g, r, v = w.view(own["values"], "float32"), w.view(own["kept"], "float32"), w.view(pending, "float32")
        right, result = w.view(own["q"], "float32"), w.view(own["p"], "float32")
        ps, qs = w.view(own["owed_p"], "float32"), w.view(own["owed_q"], "float32")
        whole = w.keep(columns // LANES)
        sums = [[w.local(LANES) for _ in range(ROWS)] for _ in range(rank)]
        end = w.local(1)

        def some(first: Any, count: int, past: bool) -> None:
            starts = [w.keep((first + n) * columns) for n in range(count)]
            owed = _numbers(w, ps, rank, rows, first, count)
            for own in sums:
                for one in own[:count]:
                    w.store(one, w.at(zero), w.zeros())
            with t.serial(0, whole) as block:
                places = [w.keep(start + block * LANES) for start in starts]
                values = [r[w.at(place)] for place in places]
                for index, own in enumerate(owed):
                    numbers = w.keep(qs[w.at(index * columns + block * LANES)])
                    values = [
                        w.keep(_muladd(w, w.lanes(number), numbers, value))
                        for number, value in zip(own, values, strict=True)
                    ]
                values = [
                    w.keep(_muladd(w, w.lanes(factor), value, g[w.at(place)]))
                    for place, value in zip(places, values, strict=True)
                ]
                for place, value in zip(places, values, strict=True):
                    w.put(v, place, value, past=past)
                for index, own in enumerate(sums):
                    numbers = w.keep(right[w.at(index * columns + block * LANES)])
                    for value, one in zip(values, own, strict=False):
                        w.store(one, w.at(zero), _muladd(w, numbers, value, one[w.at(zero)]))
            with t.serial(whole * LANES, columns) as column:
                for n, start in enumerate(starts):
                    value = r[start + column]
                    for index, own in enumerate(owed):
                        value = value + own[n] * qs[index * columns + column]
                    w.store(v, start + column, g[start + column] + factor * value)
            for index, own in enumerate(sums):
                for n in range(count):
                    w.store(end, zero, w.folded(own[n], lambda x, y: x + y))
                    with t.serial(whole * LANES, columns) as column:
                        w.store(end, zero, end[zero] + right[index * columns + column] * v[starts[n] + column])
                    w.store(result, index * rows + first + n, end[zero])

        def write(past: bool) -> None:
            _by_rows(w, rows, lambda first, count: some(first, count, past))

        w.past_caches(_streams(w, stream, pending, columns), write)

    return body


def _right(w: Writer, rank: int) -> Callable[..., None]:
    t = w.t

    def body(matrix: Any, p: Any, q: Any, rows: Any, columns: Any) -> None:
        """Set q = p matrix."""
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

        _by_rows(w, rows, add, 2 * ROWS)

    return body


def _product(w: Writer, rank: int) -> Callable[..., None]:
    t = w.t

    def body(p: Any, q: Any, out: Any, rows: Any, columns: Any, stream: Any, scale: Any) -> None:
        """Set out = scale * p^T q."""
        ps, qs, result = w.view(p, "float32"), w.view(q, "float32"), w.view(out, "float32")
        whole = w.keep(columns // LANES)

        def some(first: Any, count: int, past: bool) -> None:
            starts = [w.keep((first + n) * columns) for n in range(count)]
            numbers = [[w.keep(ps[index * rows + first + n]) for n in range(count)] for index in range(rank)]
            with t.serial(0, whole) as block:
                wide = [w.keep(qs[w.at(index * columns + block * LANES)]) for index in range(rank)]
                for n, start in enumerate(starts):
                    total = w.keep(wide[0] * w.lanes(numbers[0][n]))
                    for index in range(1, rank):
                        total = w.keep(_muladd(w, w.lanes(numbers[index][n]), wide[index], total))
                    w.put(result, w.keep(start + block * LANES), total * w.lanes(scale), past=past)
            with t.serial(whole * LANES, columns) as column:
                for n, start in enumerate(starts):
                    total = numbers[0][n] * qs[column]
                    for index in range(1, rank):
                        total = total + numbers[index][n] * qs[index * columns + column]
                    w.store(result, start + column, total * scale)

        def write(past: bool) -> None:
            _by_rows(w, rows, lambda first, count: some(first, count, past))

        w.past_caches(_streams(w, stream, out, columns), write)

    return body


def _subtract(w: Writer, rank: int) -> Callable[..., None]:
    t = w.t

    def body(p: Any, q: Any, out: Any, rows: Any, columns: Any) -> None:
        """Set out -= p^T q, in the arithmetic of `_left`."""
        ps, qs, result = w.view(p, "float32"), w.view(q, "float32"), w.view(out, "float32")
        whole = w.keep(columns // LANES)

        def some(first: Any, count: int) -> None:
            starts = [w.keep((first + n) * columns) for n in range(count)]
            owed = _numbers(w, ps, rank, rows, first, count)
            with t.serial(0, whole) as block:
                for n, start in enumerate(starts):
                    place = w.keep(start + block * LANES)
                    value = result[w.at(place)]
                    for index, own in enumerate(owed):
                        wide = qs[w.at(index * columns + block * LANES)]
                        value = w.keep(_muladd(w, w.lanes(own[n]), wide, value))
                    w.store(result, w.at(place), value)
            with t.serial(whole * LANES, columns) as column:
                for n, start in enumerate(starts):
                    value = result[start + column]
                    for index, own in enumerate(owed):
                        value = value + own[n] * qs[index * columns + column]
                    w.store(result, start + column, value)

        _by_rows(w, rows, some)

    return body


def _numbers(w: Writer, factor: Any, rank: int, rows: Any, first: Any, count: int) -> list[list[Any]]:
    """Minus the numbers of some columns of a factor, by its rows."""
    return [[w.keep(-factor[index * rows + first + n]) for n in range(count)] for index in range(rank)]


def _by_rows(w: Writer, rows: Any, some: Callable[[Any, int], None], at_a_time: int = ROWS) -> None:
    """Call some(first row, number of rows) for some rows at a time, and for each of those that are left over."""
    with w.t.serial(0, rows // at_a_time) as block:
        some(w.keep(block * at_a_time), at_a_time)
    with w.t.serial(rows // at_a_time * at_a_time, rows) as row:
        some(row, 1)


def _streams(w: Writer, stream: Any, address: Any, columns: Any) -> Any:
    """Whether to write past the caches: that is asked for, and all rows begin at multiples of 64 bytes."""
    return w.t.And(stream != 0, w.t.And((address & 63) == 0, (columns % LANES) == 0))
