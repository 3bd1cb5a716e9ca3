"""CPU kernels of `onebit` for groups that are rows: signs, means and residual in one pass over memory.

A group is read twice, the second time from the cache. v is not written in between but made again, so that memory is
read at v's two parts and written once. Large tensors are written past the caches: else each line would first be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridpar.codegen.tir_writer import INFINITE, LANES, Writer

#: What the encoders take: addresses, then numbers. `stream` is 1 where what is left is to be written past the caches.
ENCODE = ("values", "kept", "pending", "lower", "upper", "bits", "groups", "length", "stream")
DECODE = ("lower", "upper", "bits", "out", "groups", "length", "stream")


def define(w: Writer) -> dict[str, Any]:
    """The functions of this file by name."""
    return {
        "onebit_encode": w.function("onebit_encode", ENCODE, (), _encode(w, keeps=False)),
        "onebit_encode_keep": w.function("onebit_encode_keep", ENCODE, ("factor",), _encode(w, keeps=True)),
        "onebit_encode_short": w.function(
            "onebit_encode_short", ENCODE, ("factor",), _encode(w, keeps=True, short=True)
        ),
        "onebit_decode": w.function("onebit_decode", DECODE, (), _decode(w, add=False)),
        "onebit_add": w.function("onebit_add", DECODE, (), _decode(w, add=True)),
    }


def _encode(w: Writer, keeps: bool, short: bool = False) -> Callable[..., None]:
    """The encoder; what it keeps is float32, or bfloat16 where it is short."""
    t = w.t
    kind, size = ("uint16", 2) if short else ("float32", 4)
    zero, one = t.int64(0), t.int64(1)

    def body(pending: Any, groups: Any, length: Any, stream: Any, factor: Any = None, **own: Any) -> None:
        g, r, left = w.view(own["values"], "float32"), w.view(own["kept"], kind), w.view(pending, kind)
        a0s, a1s = w.view(own["lower"], "float32"), w.view(own["upper"], "float32")
        packed = w.view(own["bits"], "uint8")
        below, above = w.local(LANES, "float32"), w.local(LANES, "float32")
        counts, sums, ones = w.local(LANES, "int32"), w.local(2, "float32"), w.local(1, "int32")
        # Bits that fill no 16 yet, in the low end; how many they are; and how many 16s are written.
        rest, fill, written = w.local(1, "int32"), w.local(1, "int32"), w.local(1, "int64")
        blocks = w.keep(length // LANES)
        first = w.at(zero)

        def v(index: Any, wide: bool) -> Any:
            place = w.at(index) if wide else index
            if not keeps:
                return g[place]
            kept = w.widened(r[place], LANES if wide else 1) if short else r[place]
            return g[place] + (w.lanes(factor) if wide else factor) * kept

        def store_16(index: Any, new: Any) -> None:
            t.evaluate(w.call("void", "hp_store16", t.address_of(packed[index * 2]), new))

        def put(new: Any, count: Any) -> None:
            """Append bits, fewer than 17; fill stays below 16."""
            w.store(rest, zero, (rest[zero] << count) | new)
            w.store(fill, zero, fill[zero] + count)

            def flush() -> None:
                w.store(fill, zero, fill[zero] - 16)
                store_16(written[zero], rest[zero] >> fill[zero])
                w.store(written, zero, written[zero] + 1)
                w.store(rest, zero, rest[zero] & ((1 << fill[zero]) - 1))

            w.when(fill[zero] >= 16, flush)

        def leave(start: Any, tail: Any, a0: Any, a1: Any) -> None:
            """Write v - C(v) of a group."""

            def whole(past: bool) -> None:
                with t.serial(0, blocks) as block:
                    place = start + block * LANES
                    value = w.keep(v(place, True))
                    unsent = value - t.Select(value >= w.zeros(), w.lanes(a1), w.lanes(a0))
                    w.put(left, place, w.shortened(unsent) if short else unsent, past=past)

            past = t.And(stream != 0, ((pending + start * size) & (LANES * size - 1)) == 0)
            w.either(past, lambda: whole(True), lambda: whole(False))
            with t.serial(0, start + length - tail) as step:
                value = w.keep(v(tail + step, False))
                unsent = value - t.Select(value >= t.float32(0), a1, a0)
                w.store(left, tail + step, w.shortened(unsent, 1) if short else unsent)

        w.store(rest, zero, t.int32(0))
        w.store(fill, zero, t.int32(0))
        w.store(written, zero, zero)
        with t.serial(0, groups) as row:
            start = w.keep(row * length)
            tail = w.keep(start + blocks * LANES)
            for sums_of in (below, above):
                w.store(sums_of, first, w.zeros())
            w.store(counts, first, w.lanes(t.int32(0)))

            def whole(put_16: Callable[[Any, Any], None], start: Any = start) -> None:
                with t.serial(0, blocks) as block:
                    value = w.keep(v(start + block * LANES, True))
                    positive = value >= w.zeros()
                    put_16(block, w.call("int32", "hp_bits", positive))
                    # NaN is not positive, so it reaches the lower level.
                    w.store(above, first, above[first] + t.Select(positive, value, w.zeros()))
                    w.store(below, first, below[first] + t.Select(positive, w.zeros(), value))
                    w.store(counts, first, counts[first] + t.Select(positive, w.lanes(t.int32(1)), w.lanes(t.int32(0))))

            def aligned() -> None:
                began = w.keep(written[zero])
                whole(lambda block, new: store_16(began + block, new))
                w.store(written, zero, began + blocks)

            # Most rows begin where 16 bits begin, and then all their bits do.
            w.either(fill[zero] == 0, aligned, lambda: whole(lambda _block, new: put(new, t.int32(16))))
            w.store(sums, zero, w.folded(below, lambda x, y: x + y))
            w.store(sums, one, w.folded(above, lambda x, y: x + y))
            w.store(ones, zero, w.folded(counts, lambda x, y: x + y))
            with t.serial(0, start + length - tail) as step:
                value = w.keep(v(tail + step, False))
                positive = value >= t.float32(0)
                w.store(sums, zero, sums[zero] + t.Select(positive, t.float32(0), value))
                w.store(sums, one, sums[one] + t.Select(positive, value, t.float32(0)))
                bit = w.keep(t.Select(positive, t.int32(1), t.int32(0)))
                w.store(ones, zero, ones[zero] + bit)
                put(bit, t.int32(1))
            zeros = t.max(t.cast(length, "int32") - ones[zero], 1)
            a0 = w.keep(sums[zero] / t.cast(zeros, "float32"))
            mean = w.keep(sums[one] / t.cast(t.max(ones[zero], 1), "float32"))
            # A NaN was added to the lower level; both are NaN then. Infinity is of one side only.
            a1 = w.keep(t.Select((t.reinterpret("int32", a0) & 0x7FFFFFFF) > INFINITE, a0, mean))
            w.store(a0s, row, a0)
            w.store(a1s, row, a1)
            if keeps:
                leave(start, tail, a0, a1)

        def last(count: int) -> None:
            """The bits that fill no 16: one byte or two, with zeros behind them."""
            whole = w.keep(rest[zero] << (16 - fill[zero]))
            place = written[zero] * 2
            w.store(packed, place, t.cast(whole >> 8, "uint8"))
            if count == 2:
                w.store(packed, place + 1, t.cast(whole & 255, "uint8"))

        w.when(fill[zero] > 8, lambda: last(2))
        w.when(t.And(fill[zero] > 0, fill[zero] <= 8), lambda: last(1))
        if keeps:
            w.when(stream != 0, lambda: t.evaluate(w.call("int32", "hp_fence")))

    return body


def _decode(w: Writer, add: bool) -> Callable[..., None]:
    t = w.t

    def body(out: Any, groups: Any, length: Any, stream: Any, **own: Any) -> None:
        a0s, a1s = w.view(own["lower"], "float32"), w.view(own["upper"], "float32")
        packed, result = w.view(own["bits"], "uint8"), w.view(out, "float32")
        with t.serial(0, groups) as row:
            start = w.keep(row * length)
            a0, a1 = w.keep(a0s[row]), w.keep(a1s[row])
            # 16 bits are read as 32, so the last ones of all are read one by one.
            blocks = w.keep(t.max((length - t.Select(row == groups - 1, LANES, 0)) // LANES, 0))
            tail = w.keep(start + blocks * LANES)

            def whole(past: bool, start: Any = start, blocks: Any = blocks, a0: Any = a0, a1: Any = a1) -> None:
                with t.serial(0, blocks) as block:
                    place = start + block * LANES
                    word = w.call("int32", "hp_load32", t.address_of(packed[place // 8]))
                    signs = w.keep((word >> (16 - t.cast(place % 8, "int32"))) & 0xFFFF)
                    value = t.Select(w.call("boolx16", "hp_mask", signs), w.lanes(a1), w.lanes(a0))
                    w.put(result, place, value, add=add, past=past)

            if add:
                whole(False)
            else:
                past = t.And(stream != 0, ((out + start * 4) & 63) == 0)
                w.either(past, lambda: whole(True), lambda: whole(False))
            with t.serial(0, start + length - tail) as step:
                place = w.keep(tail + step)
                bit = (t.cast(packed[place // 8], "int32") >> (7 - t.cast(place % 8, "int32"))) & 1
                value = w.keep(t.Select(bit == 1, a1, a0))
                w.store(result, place, result[place] + value if add else value)
        if not add:
            w.when(stream != 0, lambda: t.evaluate(w.call("int32", "hp_fence")))

    return body
