"""Forward of BatchNorm with its activation: one pass for the moments of the batch, one to normalise.

Rows are processed and summed as `norm_rows` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridpar.codegen.tir_writer import INFINITE, LANES, Writer
from hybridpar.tvm_kernels.schedules import norm_rows

FORWARD = ("x", "weight", "bias", "running_mean", "running_var", "y", "table", "scratch", *norm_rows.EXTENT)


def define(w: Writer) -> dict[str, Any]:
    """One function for each activation."""
    names = {activation: f"norm_forward_{activation}" for activation in norm_rows.ACTIVATIONS}
    return {name: w.function(name, FORWARD, ("eps", "momentum"), _forward(w, one)) for one, name in names.items()}


def _forward(w: Writer, activation: str) -> Callable[..., None]:
    t = w.t

    def body(weight: Any, bias: Any, stream: Any, eps: Any, momentum: Any, **own: Any) -> None:
        values, result = w.view(own["x"], "float32"), w.view(own["y"], "float32")
        extent = norm_rows.Extent(w, own["scratch"], own["table"], own)
        running = w.view(own["running_mean"], "float32"), w.view(own["running_var"], "float32")
        parameters = (weight, w.view(weight, "float32")), (bias, w.view(bias, "float32"))

        def learn(channel: Any, mean: Any, variance: Any) -> None:
            mean, variance = w.keep(mean), w.keep(variance)
            unbiased = w.keep(_unbiased(w, extent, variance))
            _fill_table(w, extent, channel, (mean, variance, unbiased), parameters, eps)

            def track() -> None:
                part = w.keep(t.cast(momentum, "float64"))
                for kept, new in zip(running, (mean, unbiased), strict=True):
                    old = t.cast(kept[channel], "float64")
                    w.store(kept, channel, t.cast(part * new + (t.float64(1) - part) * old, "float32"))

            w.when(extent.phase(norm_rows.TRACK), track)

        def take_running() -> None:
            with t.serial(0, extent.channels) as channel:
                learn(channel, *(t.cast(one[channel], "float64") for one in running))

        def join() -> None:
            w.either(extent.phase(norm_rows.FIXED), take_running, lambda: _from_moments(w, extent, values, learn))

        w.when(extent.phase(norm_rows.REDUCE), lambda: _moments(w, extent, values))
        w.when(extent.phase(norm_rows.JOIN), join)

        def activated(column: Any, places: Sequence[Any], put: norm_rows.Put, wide: bool) -> None:
            mean, scale, shift = extent.terms(column, wide)
            for place in places:
                value = values[w.at(place) if wide else place]
                put(place, norm_rows.activate(w, activation, (value - mean) * scale + shift, wide))

        def apply() -> None:
            norm_rows.write_out(w, result, stream, lambda put: extent.apply(result, put, activated))

        w.when(extent.phase(norm_rows.APPLY), apply)

    return body


def _moments(w: Writer, extent: norm_rows.Extent, values: Any) -> None:
    """The mean of each segment's columns, and the sum of squared deviations from it."""
    t = w.t
    doubles, floats, width = extent.doubles, extent.floats, extent.width
    origin = extent.work()
    sums, squares = w.keep(origin + width), w.keep(origin + 2 * width)

    def reference(place: Any) -> Any:
        """A value to measure from. Infinity and NaN would hide what the others are."""
        value = w.keep(values[w.at(place)])
        finite = (t.reinterpret(f"int32x{LANES}", value) & w.lanes(t.int32(0x7FFFFFFF))) < w.lanes(t.int32(INFINITE))
        return t.Select(finite, value, w.zeros())

    def segment(number: Any) -> None:
        first, last = extent.bounds(number)
        means, deviations = w.keep(extent.sums(number)), w.keep(extent.sums(number) + width)

        def clear(column: Any) -> None:
            for row in (means, deviations):
                w.store(doubles, w.at(row + column), w.lanes(t.float64(0)))

        def chunk(start: Any, stop: Any) -> None:
            def begin(column: Any) -> None:
                w.store(floats, w.at(origin + column), reference(start * width + column))
                for row in (sums, squares):
                    w.store(floats, w.at(row + column), w.zeros())

            def add(column: Any, places: Sequence[Any]) -> None:
                base = w.keep(floats[w.at(origin + column)])
                total, square = floats[w.at(sums + column)], floats[w.at(squares + column)]
                extent.fetch(values, column, places)
                offs = [w.keep(values[w.at(place)] - base) for place in places]
                w.store(floats, w.at(sums + column), total + norm_rows.added(offs))
                w.store(floats, w.at(squares + column), square + norm_rows.added([off * off for off in offs]))

            def end(column: Any) -> None:
                count = w.lanes(t.cast(stop - start, "float64"))

                def exact(row: Any) -> Any:
                    return w.keep(t.cast(floats[w.at(row + column)], f"float64x{LANES}"))

                total = exact(sums)
                off = w.keep(total / count)
                within = w.keep(exact(squares) - total * off)
                # Chunks are merged relative to the first row of the segment.
                mean = exact(origin) + off - t.cast(reference(first * width + column), f"float64x{LANES}")
                mean = w.keep(mean)
                w.store(doubles, w.at(means + column), doubles[w.at(means + column)] + count * mean)
                more = within + count * mean * mean
                w.store(doubles, w.at(deviations + column), doubles[w.at(deviations + column)] + more)

            extent.columns(begin)
            extent.walk(start, stop, norm_rows.ROWS, add)
            extent.columns(end)

        def finish(column: Any) -> None:
            total = w.keep(doubles[w.at(means + column)])
            off = w.keep(total / w.lanes(t.cast(last - first, "float64")))
            w.store(doubles, w.at(deviations + column), doubles[w.at(deviations + column)] - total * off)
            base = t.cast(reference(first * width + column), f"float64x{LANES}")
            w.store(doubles, w.at(means + column), base + off)

        extent.columns(clear)
        extent.chunks(first, last, chunk)
        extent.columns(finish)

    extent.backwards(segment)


def _from_moments(w: Writer, extent: norm_rows.Extent, values: Any, learn: Callable[[Any, Any, Any], None]) -> None:
    """Have each channel's mean and variance learnt from the moments of segments and of the rows left over."""
    t = w.t
    zero = t.int64(0)
    doubles, width = extent.doubles, extent.width
    count = w.keep(t.cast(extent.rows, "float64"))
    mean = w.keep(extent.joined + width)
    total = w.local(1, "float64")

    extent.over_segments(lambda place, rows, _column: doubles[w.at(place)] * rows)
    with t.serial(0, extent.channels) as channel:
        extent.per_channel(total, channel, lambda place: t.cast(values[place], "float64"))
        own = w.keep(total[zero] / count)
        with t.serial(0, extent.repeat) as copy:
            w.store(doubles, mean + copy * extent.channels + channel, own)

    def deviations(place: Any, rows: Any, column: Any) -> Any:
        off = w.keep(doubles[w.at(place)] - doubles[w.at(mean + column)])
        return doubles[w.at(place + width)] + rows * off * off

    extent.over_segments(deviations)
    with t.serial(0, extent.channels) as channel:

        def left(place: Any, channel: Any = channel) -> Any:
            off = w.keep(t.cast(values[place], "float64") - doubles[mean + channel])
            return off * off

        extent.per_channel(total, channel, left)
        learn(channel, doubles[mean + channel], total[zero] / count)


def _unbiased(w: Writer, extent: norm_rows.Extent, variance: Any) -> Any:
    count = w.keep(w.t.cast(extent.rows, "float64"))
    return variance * (count / (count - w.t.float64(1)))


def _fill_table(
    w: Writer,
    extent: norm_rows.Extent,
    channel: Any,
    statistics: tuple[Any, Any, Any],
    parameters: tuple[tuple[Any, Any], tuple[Any, Any]],
    eps: Any,
) -> None:
    """Set a channel's column of the table."""
    t, width = w.t, extent.width
    mean, variance, unbiased = statistics
    inverse = w.keep(t.float64(1) / t.sqrt(variance + t.cast(eps, "float64")))
    high = w.keep(t.cast(mean, "float32"))
    rest = w.keep(mean - t.cast(high, "float64"))
    scale = w.keep(_parameter(w, *parameters[0], channel, 1) * inverse)
    shift = w.keep(_parameter(w, *parameters[1], channel, 0) - rest * scale)
    found = enumerate((mean, scale, shift, inverse, rest, unbiased))  # in the order of the table's rows
    with t.serial(0, extent.repeat) as copy:
        place = w.keep(copy * extent.channels + channel)
        for row, value in found:
            w.store(extent.table, width * row + place, t.cast(value, "float32"))


def _parameter(w: Writer, address: Any, memory: Any, channel: Any, otherwise: int) -> Any:
    """A channel's parameter, or what it is where there is none."""
    t = w.t
    zero, value = t.int64(0), w.local(1, "float64")
    w.store(value, zero, t.float64(otherwise))
    w.when(address != 0, lambda: w.store(value, zero, t.cast(memory[channel], "float64")))
    return value[zero]
