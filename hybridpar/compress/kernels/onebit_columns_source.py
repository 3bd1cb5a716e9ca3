"""CPU kernels of `onebit` for groups that are columns of a matrix.

All columns are processed at once, in row-major order, because a column's values lie in different cache lines. A
column's sums are known only after the last row: what is left is written in a second pass, in which v is made again.
Sums stay in the cache, as they are few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridpar.codegen.tir_writer import INFINITE, LANES, Writer

#: What the encoders take: addresses, then numbers. Rows of `values` begin `stride` values after each other; those of
#: what is kept and left lie side by side. `ones` has room for a float32 per column. Bits of a row fill whole 16s.
ENCODE = ("values", "kept", "pending", "lower", "upper", "ones", "bits", "rows", "columns", "stride", "stream")
DECODE = ("lower", "upper", "bits", "out", "rows", "columns", "stride", "stream")


def define(w: Writer) -> dict[str, Any]:
    """The functions of this file by name.

    Args:
        w: What the functions are written with.
    """
    name = "onebit_columns"
    return {
        f"{name}_encode": w.function(f"{name}_encode", ENCODE, (), _encode(w, keeps=False)),
        f"{name}_encode_keep": w.function(f"{name}_encode_keep", ENCODE, ("factor",), _encode(w, keeps=True)),
        f"{name}_decode": w.function(f"{name}_decode", DECODE, (), _decode(w, add=False)),
        f"{name}_add": w.function(f"{name}_add", DECODE, (), _decode(w, add=True)),
    }


def _encode(w: Writer, keeps: bool) -> Callable[..., None]:
    t = w.t
    zero = t.int64(0)

    def body(rows: Any, columns: Any, stride: Any, **own: Any) -> None:
        g, r, left = (w.view(own[name], "float32") for name in ("values", "kept", "pending"))
        a0s, a1s, counts = (w.view(own[name], "float32") for name in ("lower", "upper", "ones"))
        packed, word, factor = w.view(own["bits"], "uint8"), w.local(1, "int32"), own.get("factor")
        blocks = w.keep(columns // LANES)
        odd = w.keep(blocks * LANES)  # where columns begin that fill no block
        words = w.keep((columns + LANES - 1) // LANES)

        def v(row: Any, column: Any, wide: bool) -> Any:
            there, here = row * stride + column, row * columns + column
            if not wide:
                return g[there] + factor * r[here] if keeps else g[there]
            return g[w.at(there)] + w.lanes(factor) * r[w.at(here)] if keeps else g[w.at(there)]

        def put(row: Any, number: Any, bits_of_word: Any) -> None:
            place = t.address_of(packed[(row * words + number) * 2])
            t.evaluate(w.call("void", "hp_store16", place, bits_of_word))

        with t.serial(0, columns) as column:
            for sums in (a0s, a1s, counts):
                w.store(sums, column, t.float32(0))
        with t.serial(0, rows) as row:
            with t.serial(0, blocks) as block:
                at = w.at(block * LANES)
                value = w.keep(v(row, block * LANES, True))
                positive = value >= w.zeros()
                put(row, block, w.call("int32", "hp_bits", positive))
                # NaN is not positive, so it reaches the lower level.
                w.store(a1s, at, a1s[at] + t.Select(positive, value, w.zeros()))
                w.store(a0s, at, a0s[at] + t.Select(positive, w.zeros(), value))
                w.store(counts, at, counts[at] + t.Select(positive, w.lanes(t.float32(1)), w.zeros()))

            def rest(row: Any = row) -> None:
                w.store(word, zero, t.int32(0))
                with t.serial(odd, columns) as column:
                    value = w.keep(v(row, column, False))
                    positive = value >= t.float32(0)
                    bit = w.keep(t.Select(positive, t.int32(1), t.int32(0)))
                    w.store(word, zero, word[zero] | (bit << (15 - t.cast(column - odd, "int32"))))
                    w.store(a1s, column, a1s[column] + t.Select(positive, value, t.float32(0)))
                    w.store(a0s, column, a0s[column] + t.Select(positive, t.float32(0), value))
                    w.store(counts, column, counts[column] + t.cast(bit, "float32"))
                put(row, blocks, word[zero])

            w.when(odd < columns, rest)
        with t.serial(0, columns) as column:
            above = w.keep(counts[column])
            a0 = w.keep(a0s[column] / t.max(t.cast(rows, "float32") - above, t.float32(1)))
            mean = w.keep(a1s[column] / t.max(above, t.float32(1)))
            w.store(a0s, column, a0)
            # A NaN was added to the lower level; both are NaN then. Infinity is of one side only.
            w.store(a1s, column, t.Select((t.reinterpret("int32", a0) & 0x7FFFFFFF) > INFINITE, a0, mean))
        if not keeps:
            return

        def leave(past: bool) -> None:
            with t.serial(0, rows) as row:
                with t.serial(0, blocks) as block:
                    at = w.at(block * LANES)
                    value = w.keep(v(row, block * LANES, True))
                    remaining = value - t.Select(value >= w.zeros(), a1s[at], a0s[at])
                    w.put(left, row * columns + block * LANES, remaining, past=past)
                with t.serial(odd, columns) as column:
                    value = w.keep(v(row, column, False))
                    remaining = value - t.Select(value >= t.float32(0), a1s[column], a0s[column])
                    w.store(left, row * columns + column, remaining)

        w.past_caches(_streams(w, own["stream"], own["pending"], columns), leave)

    return body


def _decode(w: Writer, add: bool) -> Callable[..., None]:
    t = w.t

    def body(out: Any, rows: Any, columns: Any, stride: Any, stream: Any, **own: Any) -> None:
        a0s, a1s = w.view(own["lower"], "float32"), w.view(own["upper"], "float32")
        packed, result = w.view(own["bits"], "uint8"), w.view(out, "float32")
        blocks = w.keep(columns // LANES)
        odd = w.keep(blocks * LANES)
        words = w.keep((columns + LANES - 1) // LANES)

        def word(row: Any, number: Any) -> Any:
            place = w.keep((row * words + number) * 2)
            return w.keep((t.cast(packed[place], "int32") << 8) | t.cast(packed[place + 1], "int32"))

        def write(past: bool) -> None:
            with t.serial(0, rows) as row:
                with t.serial(0, blocks) as block:
                    at = w.at(block * LANES)
                    mask = w.call("boolx16", "hp_mask", word(row, block))
                    value = t.Select(mask, a1s[at], a0s[at])
                    w.put(result, w.keep(row * stride + block * LANES), value, add=add, past=past)

                def rest(row: Any = row) -> None:
                    last = word(row, blocks)
                    with t.serial(odd, columns) as column:
                        bit = (last >> (15 - t.cast(column - odd, "int32"))) & 1
                        value = w.keep(t.Select(bit == 1, a1s[column], a0s[column]))
                        place = w.keep(row * stride + column)
                        w.store(result, place, result[place] + value if add else value)

                w.when(odd < columns, rest)

        if add:
            write(False)
        else:
            w.past_caches(_streams(w, stream, out, stride), write)

    return body


def _streams(w: Writer, stream: Any, address: Any, stride: Any) -> Any:
    """Whether to write past the caches: that is asked for, and all rows begin at multiples of 64 bytes."""
    return w.t.And(stream != 0, w.t.And(((address & 63) == 0), ((stride * 4) & 63) == 0))
