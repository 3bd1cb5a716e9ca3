"""Backward of BatchNorm with its activation: one pass for two sums, one to write the gradient.

With z = (x - mean) scale + shift, g = f'(z) dy, n rows and 1 / sqrt(var + eps) = inverse (Ioffe and Szegedy 2015,
"Batch Normalization", section 3): dbias = sum(g), dweight = inverse sum(g (x - mean)), and
dx = scale (g - dbias / n - (x - mean) inverse dweight / n). What the activation took, z, is made again from x. Rows
are processed and summed as `norm_rows` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridpar.codegen.tir_writer import LANES, Writer
from hybridpar.tvm_kernels.schedules import norm_rows

BACKWARD = ("x", "grad_y", "table", "grad_x", "grad_weight", "grad_bias", "scratch", *norm_rows.EXTENT)


def define(w: Writer) -> dict[str, Any]:
    """One function for each activation."""
    names = {activation: f"norm_backward_{activation}" for activation in norm_rows.ACTIVATIONS}
    return {name: w.function(name, BACKWARD, (), _backward(w, one)) for one, name in names.items()}


def _backward(w: Writer, activation: str) -> Callable[..., None]:
    t = w.t

    def body(stream: Any, **own: Any) -> None:
        values, above = w.view(own["x"], "float32"), w.view(own["grad_y"], "float32")
        result, of_weight, of_bias = (w.view(own[one], "float32") for one in ("grad_x", "grad_weight", "grad_bias"))
        extent = norm_rows.Extent(w, own["scratch"], own["table"], own)
        #: Two rows of float32 behind the joined row: what x - mean is multiplied by, and what is added.
        factors = w.keep((extent.joined + extent.width) * 2)

        def slope(terms: Sequence[Any], place: Any, wide: bool) -> tuple[Any, Any]:
            """The value less its mean, and the gradient before the activation."""
            gradient = w.load(above, place) if wide else above[place]
            centred = w.keep(values[w.at(place) if wide else place] - terms[0])
            return centred, w.keep(norm_rows.slope_of(w, activation, centred * terms[1] + terms[2], gradient, wide))

        def join() -> None:
            zero = t.int64(0)
            first, second = w.local(1, "float64"), w.local(1, "float64")

            def left(channel: Any, centred: bool) -> Callable[[Any], Any]:
                def one(place: Any) -> Any:
                    x, g = slope(extent.terms(channel, False), place, False)
                    exact = t.cast(g, "float64")
                    return exact * t.cast(x, "float64") if centred else exact

                return one

            # The sums are taken row by row, as there is one joined row: first of g, which goes to the gradient of bias.
            extent.over_segments(lambda place, _rows, _column: extent.doubles[w.at(place)])
            with t.serial(0, extent.channels) as channel:
                extent.per_channel(first, channel, left(channel, False))
                w.store(extent.doubles, extent.joined + 2 * extent.width + channel, first[zero])
                w.store(of_bias, channel, t.cast(first[zero], "float32"))
            extent.over_segments(lambda place, _rows, _column: extent.doubles[w.at(place + extent.width)])
            with t.serial(0, extent.channels) as channel:
                extent.per_channel(second, channel, left(channel, True))
                sum_g = w.keep(extent.doubles[extent.joined + 2 * extent.width + channel])

                def row(number: int, channel: Any = channel) -> Any:
                    return w.keep(t.cast(extent.table[extent.width * number + channel], "float64"))

                inverse, rest, scale = row(norm_rows.INVERSE), row(norm_rows.REST), row(norm_rows.SCALE)
                sum_gx = w.keep((second[zero] - rest * sum_g) * inverse)
                w.store(of_weight, channel, t.cast(sum_gx, "float32"))
                share = w.keep(scale / t.cast(extent.rows, "float64"))
                slope_x = w.keep(t.float64(0) - share * inverse * sum_gx)
                # x - mean misses the mean's second part.
                offset = w.keep(t.float64(0) - share * sum_g - slope_x * rest)
                with t.serial(0, extent.repeat) as copy:
                    place = factors + copy * extent.channels + channel
                    w.store(extent.floats, place, t.cast(slope_x, "float32"))
                    w.store(extent.floats, place + extent.width, t.cast(offset, "float32"))

        def gradient(column: Any, places: Sequence[Any], put: norm_rows.Put, wide: bool) -> None:
            terms = extent.terms(column, wide)
            at = w.at if wide else lambda one: one
            fixed = w.lanes(extent.phase(norm_rows.FIXED)) if wide else extent.phase(norm_rows.FIXED)
            zeros = w.zeros() if wide else t.float32(0)
            slope_x, offset = (
                w.keep(extent.floats[at(factors + extent.width * number + column)]) for number in range(2)
            )
            for place in places:
                if wide and activation in norm_rows.COSTLY:
                    centred, g = values[at(place)] - terms[0], result[at(place)]
                else:
                    centred, g = slope(terms, place, wide)
                # Where statistics are constants x has no part in it, not even as NaN.
                through = slope_x * centred + offset
                put(place, terms[1] * g + t.Select(fixed, zeros, through))

        def sums_of(put: norm_rows.Put | None) -> None:
            _gradient_sums(w, extent, (values, above), slope, put)

        def sums() -> None:
            if activation in norm_rows.COSTLY:
                norm_rows.write_out(w, result, stream, sums_of)
            else:
                sums_of(None)

        def apply() -> None:
            def write(put: norm_rows.Put) -> None:
                extent.apply(result, put, gradient)

            if activation in norm_rows.COSTLY:  # the memory has just been read
                write(lambda place, value: w.store(result, w.at(place), value))
            else:
                norm_rows.write_out(w, result, stream, write)

        w.when(extent.phase(norm_rows.REDUCE), sums)
        w.when(extent.phase(norm_rows.JOIN), join)
        w.when(extent.phase(norm_rows.APPLY), apply)

    return body


def _gradient_sums(
    w: Writer,
    extent: norm_rows.Extent,
    sources: Sequence[Any],
    slope: Callable[[Sequence[Any], Any, bool], tuple[Any, Any]],
    put: norm_rows.Put | None,
) -> None:
    """Each segment's columns of g and of g (x - mean), summed; g is the gradient before the activation, and is put.

    The sources are what is read: x and the gradient behind the activation.
    """
    t = w.t
    doubles, floats, width = extent.doubles, extent.floats, extent.width
    sums = extent.work()
    products = w.keep(sums + width)

    def segment(number: Any) -> None:
        first, last = extent.bounds(number)
        pairs = ((w.keep(extent.sums(number)), sums), (w.keep(extent.sums(number) + width), products))

        def clear(column: Any) -> None:
            for wide, _ in pairs:
                w.store(doubles, w.at(wide + column), w.lanes(t.float64(0)))

        def chunk(start: Any, stop: Any) -> None:
            def begin(column: Any) -> None:
                for _, row in pairs:
                    w.store(floats, w.at(row + column), w.zeros())

            def add(column: Any, places: Sequence[Any]) -> None:
                terms = extent.terms(column, True)
                total, product = floats[w.at(sums + column)], floats[w.at(products + column)]
                for memory in sources:
                    extent.fetch(memory, column, places)
                pairs = [slope(terms, place, True) for place in places]
                if put is not None:
                    for place, (_, g) in zip(places, pairs, strict=True):
                        put(place, g)
                w.store(floats, w.at(sums + column), total + norm_rows.added(g for _, g in pairs))
                w.store(floats, w.at(products + column), product + norm_rows.added(g * centred for centred, g in pairs))

            def end(column: Any) -> None:
                for wide, row in pairs:
                    own = t.cast(floats[w.at(row + column)], f"float64x{LANES}")
                    w.store(doubles, w.at(wide + column), doubles[w.at(wide + column)] + own)

            extent.columns(begin)
            extent.walk(start, stop, norm_rows.ROWS, add)
            extent.columns(end)

        extent.columns(clear)
        extent.chunks(first, last, chunk)

    extent.backwards(segment)
