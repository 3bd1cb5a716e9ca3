"""CPU kernels of `qsgd_mn`: rounding, packing and unpacking in one pass each.

Of W words, word j holds values j, j + W, ...: a block of words is filled by one run through the values of each place,
and stays in the cache meanwhile. The arithmetic of a value is that of the torch code, operation by operation, except
that a product and a sum may be rounded once instead of twice when encoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridpar.codegen.tir_writer import INFINITE, LANES, Writer

#: `noise` is what to add, `places` where in it each run of up to `chunk` values begins: one number per chunk and place.
ENCODE = ("values", "scale", "words", "noise", "places", "count", "total", "width", "per_word", "steps", "chunk")
DECODE = ("words", "scale", "out", "count", "total", "width", "per_word", "zero")

#: Words that stay in the cache while all their places are filled or read; a chunk is a multiple of it.
BLOCK = 512

_WORDS = {"uint8": 8, "int32": 32, "int64": 64}


def define(w: Writer) -> dict[str, Any]:
    """The functions of this file by name."""
    functions = {"qsgd_scale": w.function("qsgd_scale", ("values", "out", "count"), (), _scale(w))}
    for dtype, bits in _WORDS.items():
        functions |= {
            f"qsgd_encode{bits}": w.function(f"qsgd_encode{bits}", ENCODE, (), _encode(w, dtype)),
            f"qsgd_decode{bits}": w.function(f"qsgd_decode{bits}", DECODE, ("unit",), _decode(w, dtype, add=False)),
            f"qsgd_add{bits}": w.function(f"qsgd_add{bits}", DECODE, ("unit",), _decode(w, dtype, add=True)),
        }
    return functions


def _itself(one: Any) -> Any:
    return one


def _scale(w: Writer) -> Callable[..., None]:
    t = w.t
    zero = t.int64(0)

    def body(values: Any, out: Any, count: Any) -> None:
        """The largest magnitude, infinite where a value is not finite."""
        bits, result = w.view(values, "int32"), w.view(out, "int32")
        # Four at a time, so that one maximum need not wait for the one before.
        tops = [w.local(LANES, "int32") for _ in range(4)]
        for top in tops:
            w.store(top, w.at(zero), w.lanes(t.int32(0)))
        whole = w.keep(count // (4 * LANES))
        with t.serial(0, whole) as block:
            for index, top in enumerate(tops):
                own = bits[w.at(block * (4 * LANES) + index * LANES)] & w.lanes(t.int32(0x7FFFFFFF))
                w.store(top, w.at(zero), t.max(top[w.at(zero)], own))
        widest = w.local(1, "int32")
        w.store(widest, zero, t.int32(0))
        for top in tops:
            w.store(widest, zero, t.max(widest[zero], w.folded(top, t.max)))
        with t.serial(0, count - whole * (4 * LANES)) as step:
            w.store(widest, zero, t.max(widest[zero], bits[whole * (4 * LANES) + step] & 0x7FFFFFFF))
        w.store(result, zero, t.min(widest[zero], t.int32(INFINITE)))

    return body


def _vectors(w: Writer, count: Any, each: Callable[[Any, bool], None]) -> None:
    """Call each(index, True) for every vector of so many values, and each(index, False) for each value left over."""
    with w.t.serial(0, count // LANES) as block:
        each(block * LANES, True)
    with w.t.serial(0, count % LANES) as step:
        each(count // LANES * LANES + step, False)


def _runs(w: Writer, count: Any, total: Any, per_word: Any, run: Callable[[Any, Any, Any], None]) -> None:
    """Call run(first word, place, number of values) for each block of words and each place in them."""
    t = w.t
    with t.serial(0, (total + BLOCK - 1) // BLOCK) as block:
        first = w.keep(block * BLOCK)
        with t.serial(0, per_word) as place:
            long = t.min(t.min(t.int64(BLOCK), total - first), count - place * total - first)
            run(first, place, w.keep(t.max(long, t.int64(0))))


def _encode(w: Writer, dtype: str) -> Callable[..., None]:
    t = w.t
    zero = t.int64(0)

    def body(count: Any, total: Any, width: Any, per_word: Any, steps: Any, chunk: Any, **own: Any) -> None:
        v, packed, ring = w.view(own["values"], "float32"), w.view(own["words"], dtype), w.view(own["noise"], "float32")
        starts, scales = w.view(own["places"], "int64"), w.view(own["scale"], "float32")
        divisor = w.keep(t.Select(scales[zero] > t.float32(0), scales[zero], t.float32(1)))
        most, shift_back = w.keep(t.cast(steps, "float32")), w.keep(t.cast(steps, "int32"))

        def run(first: Any, place: Any, long: Any) -> None:
            start = w.keep(place * total + first)
            drawn = w.keep(starts[first // chunk * per_word + place] + first % chunk)
            shift = w.keep(t.cast(place * width, dtype))

            def put(offset: Any, wide: bool) -> None:
                at, lanes = (w.at, w.lanes) if wide else (_itself, _itself)
                position = v[at(start + offset)] / lanes(divisor) * lanes(most) + ring[at(drawn + offset)]
                code = t.cast(t.min(t.floor(position), lanes(most)), "int32x16" if wide else "int32")
                field = t.cast(code + lanes(shift_back), f"{dtype}x16" if wide else dtype) << lanes(shift)
                index = at(first + offset)
                before = t.Select(lanes(place == 0), lanes(t.cast(0, dtype)), packed[index])
                w.store(packed, index, before | field)

            _vectors(w, long, put)

        _runs(w, count, total, per_word, run)

    return body


def _decode(w: Writer, dtype: str, add: bool) -> Callable[..., None]:
    t = w.t

    def body(count: Any, total: Any, width: Any, per_word: Any, zero: Any, unit: Any, **own: Any) -> None:
        packed, result = w.view(own["words"], dtype), w.view(own["out"], "float32")
        size = w.keep(w.view(own["scale"], "float32")[t.int64(0)])
        mask = w.keep(t.cast((t.int64(1) << width) - 1, dtype))
        origin = w.keep(t.cast(zero, "float32"))

        def run(first: Any, place: Any, long: Any) -> None:
            start = w.keep(place * total + first)
            shift = w.keep(t.cast(place * width, dtype))

            def put(offset: Any, wide: bool) -> None:
                at, lanes = (w.at, w.lanes) if wide else (_itself, _itself)

                def cast(value: Any, to: str) -> Any:
                    return t.cast(value, f"{to}x16" if wide else to)

                field = (packed[at(first + offset)] >> lanes(shift)) & lanes(mask)
                value = (cast(cast(field, "int32"), "float32") - lanes(origin)) / lanes(unit) * lanes(size)
                index = at(start + offset)
                w.store(result, index, result[index] + value if add else value)

            _vectors(w, long, put)

        _runs(w, count, total, per_word, run)

    return body
