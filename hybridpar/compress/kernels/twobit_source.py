"""CPU kernels of `twobit`: two passes, as the threshold depends on all values.

The first pass finds mean and largest magnitude, of v that is made on the way; the second makes v again, and writes
codes and what is not sent. Sums run over `BLOCK` values in float32 and on from there in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridpar.codegen.tir_writer import INFINITE, LANES, Writer

#: The threshold is `fixed`, or where that is 0 min(factor_of_mean * mean, cap * largest).
ENCODE = ("values", "kept", "pending", "level", "codes", "count", "stream")
RULE = ("fixed", "factor_of_mean", "cap")
DECODE = ("level", "codes", "out", "count", "stream")

#: Values whose sum is made in float32; a multiple of `LANES`.
BLOCK = 1024


def define(w: Writer) -> dict[str, Any]:
    """The functions of this file by name."""
    return {
        "twobit_encode": w.function("twobit_encode", ENCODE, RULE, _encode(w, keeps=False)),
        "twobit_encode_keep": w.function("twobit_encode_keep", ENCODE, (*RULE, "factor"), _encode(w, keeps=True)),
        "twobit_decode": w.function("twobit_decode", DECODE, (), _decode(w, add=False)),
        "twobit_add": w.function("twobit_add", DECODE, (), _decode(w, add=True)),
    }


def _encode(w: Writer, keeps: bool) -> Callable[..., None]:
    t = w.t
    zero = t.int64(0)

    def body(pending: Any, count: Any, fixed: Any, factor: Any = None, **own: Any) -> None:
        g, r, left = w.view(own["values"], "float32"), w.view(own["kept"], "float32"), w.view(pending, "float32")
        levels, packed = w.view(own["level"], "float32"), w.view(own["codes"], "uint8")
        whole = w.keep(count // LANES)
        tail = w.keep(whole * LANES)

        def v(index: Any, wide: bool) -> Any:
            place = w.at(index) if wide else index
            return g[place] + (w.lanes(factor) if wide else factor) * r[place] if keeps else g[place]

        total, sums = w.local(1, "float64"), w.local(LANES, "float32")  # of magnitudes
        top, widest = w.local(LANES, "int32"), w.local(1, "int32")  # bits of the largest
        w.store(total, zero, t.float64(0))
        w.store(top, w.at(zero), w.lanes(t.int32(0)))
        w.store(widest, zero, t.int32(0))
        with t.serial(0, (whole + BLOCK // LANES - 1) // (BLOCK // LANES)) as block:
            w.store(sums, w.at(zero), w.zeros())
            begin = w.keep(block * (BLOCK // LANES))
            with t.serial(0, t.min(t.int64(BLOCK // LANES), whole - begin)) as step:
                value = w.keep(v((begin + step) * LANES, True))
                bits = t.reinterpret("int32x16", value) & w.lanes(t.int32(0x7FFFFFFF))
                w.store(top, w.at(zero), t.max(top[w.at(zero)], bits))
                w.store(sums, w.at(zero), sums[w.at(zero)] + t.max(value, -value))
            w.store(total, zero, total[zero] + t.cast(w.folded(sums, lambda x, y: x + y), "float64"))
        with t.serial(0, count - tail) as step:
            value = w.keep(v(tail + step, False))
            w.store(widest, zero, t.max(widest[zero], t.reinterpret("int32", value) & 0x7FFFFFFF))
            w.store(total, zero, total[zero] + t.cast(t.max(value, -value), "float64"))
        w.store(widest, zero, t.max(widest[zero], w.folded(top, t.max)))
        mean = w.keep(t.cast(total[zero] / t.cast(count, "float64"), "float32"))
        largest = w.keep(t.reinterpret("float32", widest[zero]))
        adapted = t.min(own["factor_of_mean"] * mean, own["cap"] * largest)
        least = w.keep(t.Select(fixed > t.float32(0), fixed, adapted))
        sent_as = w.keep(t.Select(widest[zero] < INFINITE, least, w.nan()))
        w.store(levels, zero, sent_as)

        def blocks(past: bool) -> None:
            with t.serial(0, whole) as block:
                place = block * LANES
                value = w.keep(v(place, True))
                plus, minus = value >= w.lanes(least), value <= w.lanes(-least)
                pairs = w.call("int32", "hp_pairs", t.Or(plus, minus), plus)
                t.evaluate(w.call("void", "hp_store32", t.address_of(packed[block * 4]), pairs))
                if keeps:
                    w.put(left, place, value - _signs(w, plus, minus, w.lanes) * w.lanes(sent_as), past=past)

        if keeps:
            w.past_caches(t.And(own["stream"] != 0, (pending & 63) == 0), blocks)
        else:
            blocks(False)

        def last() -> None:
            word = w.local(1, "int32")
            w.store(word, zero, t.int32(0))
            with t.serial(0, count - tail) as step:
                value = w.keep(v(tail + step, False))
                plus, minus = value >= least, value <= -least
                code = t.Select(plus, t.int32(3), t.Select(minus, t.int32(2), t.int32(0)))
                w.store(word, zero, word[zero] | (code << (30 - 2 * t.cast(step, "int32"))))
                if keeps:
                    w.store(left, tail + step, value - _signs(w, plus, minus, lambda x: x) * sent_as)
            t.evaluate(w.call("void", "hp_store32", t.address_of(packed[whole * 4]), word[zero]))

        w.when(count > tail, last)

    return body


def _signs(w: Writer, plus: Any, minus: Any, wide: Callable[[Any], Any]) -> Any:
    """1, -1 or 0."""
    number = w.t.float32
    return w.t.Select(plus, wide(number(1)), w.t.Select(minus, wide(number(-1)), wide(number(0))))


def _decode(w: Writer, add: bool) -> Callable[..., None]:
    t = w.t

    def body(level: Any, codes: Any, out: Any, count: Any, stream: Any) -> None:
        packed, result = w.view(codes, "uint8"), w.view(out, "float32")
        unit = w.keep(w.view(level, "float32")[t.int64(0)])
        nothing = w.keep(t.Select(w.finite(unit), t.float32(0), w.nan()))  # all that is decoded is NaN, or nothing

        def value_of(code: Any, wide: Callable[[Any], Any]) -> Any:
            minus = t.Select(code == wide(t.int32(2)), wide(-unit), wide(nothing))
            return t.Select(code == wide(t.int32(3)), wide(unit), minus)

        def blocks(past: bool) -> None:
            shifts = w.lanes(t.int32(30)) - w.at(t.int32(0)) * w.lanes(t.int32(2))
            with t.serial(0, count // LANES) as block:
                word = w.keep(w.call("int32", "hp_load32", t.address_of(packed[block * 4])))
                place = block * LANES
                value = value_of((w.lanes(word) >> shifts) & w.lanes(t.int32(3)), w.lanes)
                w.put(result, place, value, add=add, past=past)

        if add:
            blocks(False)
        else:
            w.past_caches(t.And(stream != 0, (out & 63) == 0), blocks)
        tail = w.keep(count // LANES * LANES)
        with t.serial(0, count - tail) as step:
            place = w.keep(tail + step)
            code = w.keep((t.cast(packed[place // 4], "int32") >> (6 - 2 * t.cast(place % 4, "int32"))) & 3)
            value = value_of(code, lambda x: x)
            w.store(result, place, result[place] + value if add else value)

    return body
