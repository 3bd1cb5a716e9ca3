"""Why: BatchNorm and the activation behind it are bound by memory, so they should touch as little of it as they can.

A tensor is read as rows (one pixel of one image) of channels. Forward reads it twice: for the moments of the batch, and
to normalise and activate. Backward reads it and the gradient twice: for the two sums that the gradient needs, and to
write it; what the activation took is not kept but made again. Rows are walked in the order in which they lie in memory.
The first pass begins at the end, which whoever wrote the tensor has just left in the caches; the second one begins
where the first one ended.

Moments lose nothing where the mean is large. Values are taken relative to the first of up to `CHUNK` rows and summed in
float32; chunks are merged in float64 (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance",
equation 2.1). As (first - mean)^2 <= CHUNK * variance of the chunk, that much at most can cancel. The mean is kept as
the sum of two float32, so that x - mean is as good as x.

One function does a direction for one activation, in phases: all in one call, or those over rows for ranges of
segments, each by a thread of its own, and in between the one that joins them. Segments depend on the shape only, so
results do not depend on the number of threads. Rows that are no multiple of a vector are read several at a time, as one
wide row; what is then left over, less than a wide row, is the affair of the phase that joins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridpar.kernel_writer import INFINITE, LANES, Writer

#: Wide rows whose sums are float32.
CHUNK = 128

#: Wide rows that are walked at a time, so that sums are read and written less often.
ROWS = 4

#: Phases of a call, added up. REDUCE and APPLY run over segments; JOIN runs once in between. With TRACK it moves the
#: running statistics; with FIXED it takes them in place of the batch's, and backward takes them as constants.
REDUCE, JOIN, APPLY, FIXED, TRACK = 1, 2, 4, 8, 16

#: Rows of the table that forward leaves for backward, each repeated to a wide row of float32. REST is what the float32
#: of MEAN lacks; VARIANCE is the unbiased one.
MEAN, SCALE, SHIFT, INVERSE, REST, VARIANCE = range(6)
TABLE_ROWS = 6

#: Doubles of scratch for each column of a wide row: per segment, and once.
SEGMENT, SHARED = 4, 3

ACTIVATIONS = ("none", "relu", "relu6", "silu")

#: Activations whose slope costs more than memory: their gradient before the activation is computed once, and waits in
#: the memory of the result.
COSTLY = ("silu",)

_EXTENT = ("rows", "channels", "repeat", "length", "begin", "end", "phases", "stream")
#: Addresses (of the parameters, 0 for none) and numbers: there are rows * channels float32; `repeat` rows are one wide
#: row, whose width is a multiple of LANES; `length` wide rows are a segment; a call is for the segments from `begin` up
#: to `end`; `stream` is 1 where the result, at a multiple of 64, is to be written past the caches.
FORWARD = ("x", "weight", "bias", "running_mean", "running_var", "y", "table", "scratch", *_EXTENT)
BACKWARD = ("x", "grad_y", "table", "grad_x", "grad_weight", "grad_bias", "scratch", *_EXTENT)

#: Sets the values at a place.
_Put = Callable[[Any, Any], None]


def define(w: Writer) -> dict[str, Any]:
    """The functions of this file by name."""
    functions = {}
    for activation in ACTIVATIONS:
        forward, backward = f"norm_forward_{activation}", f"norm_backward_{activation}"
        functions[forward] = w.function(forward, FORWARD, ("eps", "momentum"), _forward(w, activation))
        functions[backward] = w.function(backward, BACKWARD, (), _backward(w, activation))
    return functions


class _Extent:
    """What follows from a function's numbers: how rows are grouped, and where in scratch their sums are."""

    def __init__(self, w: Writer, scratch: Any, numbers: dict[str, Any]) -> None:
        self.t = w.t
        self.w = w
        self.rows, self.channels, self.repeat = numbers["rows"], numbers["channels"], numbers["repeat"]
        self.length, self.begin, self.end = numbers["length"], numbers["begin"], numbers["end"]
        self.phases = numbers["phases"]
        self.width = w.keep(self.channels * self.repeat)
        self.wide = w.keep(self.rows // self.repeat)
        self.segments = w.keep((self.wide + self.length - 1) // self.length)
        #: Rows that fill no wide row, and where they begin.
        self.tail = w.keep(self.wide * self.repeat)
        self.left = w.keep(self.rows - self.tail)
        self.doubles = w.view(scratch, "float64")
        self.floats = w.view(scratch, "float32")
        self.joined = w.keep(self.segments * SEGMENT * self.width)

    def phase(self, bit: int) -> Any:
        return (self.phases & bit) != 0

    def sums(self, segment: Any) -> Any:
        """Where the two rows of sums of a segment are, among doubles."""
        return segment * SEGMENT * self.width

    def work(self) -> Any:
        """Where the float32 rows are that belong to this call alone, among floats."""
        return self.w.keep((self.begin * SEGMENT + 2) * self.width * 2)

    def bounds(self, segment: Any) -> tuple[Any, Any]:
        """The wide rows of a segment."""
        first = self.w.keep(segment * self.length)
        return first, self.w.keep(self.t.min(first + self.length, self.wide))

    def columns(self, body: Callable[[Any], None]) -> None:
        """Write a body for every vector of a wide row."""
        with self.t.serial(0, self.width // LANES) as block:
            body(self.w.keep(block * LANES))

    def walk(self, start: Any, stop: Any, body: Callable[[Any, Sequence[Any]], None]) -> None:
        """Write a body for every vector of wide rows: its column, and its places in as many rows as go together."""
        t, w = self.t, self.w
        groups = w.keep((stop - start) // ROWS)
        with t.serial(0, groups) as group:
            row = w.keep((start + group * ROWS) * self.width)
            self.columns(lambda column: body(column, [row + self.width * step + column for step in range(ROWS)]))
        with t.serial(0, stop - start - groups * ROWS) as odd:
            row = w.keep((start + groups * ROWS + odd) * self.width)
            self.columns(lambda column: body(column, [row + column]))

    def chunks(self, first: Any, last: Any, body: Callable[[Any, Any], None]) -> None:
        """Write a body for the chunks of some wide rows, the last one first."""
        t, w = self.t, self.w
        count = w.keep((last - first + CHUNK - 1) // CHUNK)
        with t.serial(0, count) as step:
            start = w.keep(first + (count - 1 - step) * CHUNK)
            body(start, w.keep(t.min(start + CHUNK, last)))

    def backwards(self, body: Callable[[Any], None]) -> None:
        """Write a body for the segments of this call, the last one first."""
        with self.t.serial(0, self.end - self.begin) as step:
            body(self.w.keep(self.end - 1 - step))

    def over_segments(self, value: Callable[[Any, Any, Any], Any]) -> None:
        """Set the joined row to a sum over segments: of value(place of its sums, its rows, column)."""
        t, w = self.t, self.w
        total, first = w.local(LANES, "float64"), w.at(t.int64(0))

        def column(place: Any) -> None:
            w.store(total, first, w.lanes(t.float64(0)))
            with t.serial(0, self.segments) as segment:
                begin, stop = self.bounds(segment)
                own = value(self.sums(segment) + place, w.lanes(t.cast(stop - begin, "float64")), place)
                w.store(total, first, total[first] + own)
            w.store(self.doubles, w.at(self.joined + place), total[first])

        self.columns(column)

    def per_channel(self, total: Any, channel: Any, left: Callable[[Any], Any]) -> None:
        """Set total[0] to the sum of a channel's columns of the joined row, and of left(place) of rows left over."""
        t, w = self.t, self.w
        zero = t.int64(0)
        w.store(total, zero, t.float64(0))
        with t.serial(0, self.repeat) as copy:
            w.store(total, zero, total[zero] + self.doubles[self.joined + copy * self.channels + channel])
        with t.serial(0, self.left) as row:
            w.store(total, zero, total[zero] + left((self.tail + row) * self.channels + channel))


def _forward(w: Writer, activation: str) -> Callable[..., None]:
    t = w.t

    def body(
        x: Any,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        y: Any,
        table: Any,
        scratch: Any,
        stream: Any,
        eps: Any,
        momentum: Any,
        **numbers: Any,
    ) -> None:
        values, result, rows = w.view(x, "float32"), w.view(y, "float32"), w.view(table, "float32")
        extent = _Extent(w, scratch, numbers)
        running = w.view(running_mean, "float32"), w.view(running_var, "float32")
        parameters = (weight, w.view(weight, "float32")), (bias, w.view(bias, "float32"))

        def learn(channel: Any, mean: Any, variance: Any) -> None:
            mean, variance = w.keep(mean), w.keep(variance)
            unbiased = w.keep(_unbiased(w, extent, variance))
            _fill_table(w, extent, rows, channel, (mean, variance, unbiased), parameters, eps)

            def track() -> None:
                part = w.keep(t.cast(momentum, "float64"))
                for kept, new in zip(running, (mean, unbiased), strict=True):
                    old = t.cast(kept[channel], "float64")
                    w.store(kept, channel, t.cast(part * new + (t.float64(1) - part) * old, "float32"))

            w.when(extent.phase(TRACK), track)

        def from_running() -> None:
            with t.serial(0, extent.channels) as channel:
                learn(channel, *(t.cast(one[channel], "float64") for one in running))

        def join() -> None:
            w.either(extent.phase(FIXED), from_running, lambda: _from_moments(w, extent, values, learn))

        w.when(extent.phase(REDUCE), lambda: _moments(w, extent, values))
        w.when(extent.phase(JOIN), join)

        def activated(column: Any, places: Sequence[Any], put: _Put, wide: bool) -> None:
            terms = [w.keep(one) for one in _terms(w, extent, rows, column, wide)]
            for place in places:
                index = w.at(place) if wide else place
                put(place, _activate(w, activation, _normal(terms, values[index]), wide))

        def apply() -> None:
            _written(w, result, stream, lambda put: _apply(w, extent, result, put, activated))

        w.when(extent.phase(APPLY), apply)

    return body


def _backward(w: Writer, activation: str) -> Callable[..., None]:
    t = w.t

    def body(
        x: Any,
        grad_y: Any,
        table: Any,
        grad_x: Any,
        grad_weight: Any,
        grad_bias: Any,
        scratch: Any,
        stream: Any,
        **numbers: Any,
    ) -> None:
        values, above, rows = w.view(x, "float32"), w.view(grad_y, "float32"), w.view(table, "float32")
        result, of_weight, of_bias = (w.view(one, "float32") for one in (grad_x, grad_weight, grad_bias))
        extent = _Extent(w, scratch, numbers)
        #: Two rows of float32 behind the joined row: what x - mean is multiplied by, and what is added.
        factors = w.keep((extent.joined + extent.width) * 2)

        def slope(terms: Sequence[Any], place: Any, wide: bool) -> tuple[Any, Any]:
            """The value less its mean, and the gradient before the activation."""
            centred = w.keep(values[place] - terms[0])
            return centred, w.keep(_slope(w, activation, centred * terms[1] + terms[2], above[place], wide))

        def join() -> None:
            zero = t.int64(0)
            first, second = w.local(1, "float64"), w.local(1, "float64")

            def left(channel: Any, centred: bool) -> Callable[[Any], Any]:
                def one(place: Any) -> Any:
                    x, g = slope(_terms(w, extent, rows, channel, False), place, False)
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
                    return w.keep(t.cast(rows[extent.width * number + channel], "float64"))

                inverse, rest, scale = row(INVERSE), row(REST), row(SCALE)
                sum_gx = w.keep((second[zero] - rest * sum_g) * inverse)
                w.store(of_weight, channel, t.cast(sum_gx, "float32"))
                share = w.keep(scale / t.cast(extent.rows, "float64"))
                slope_x = w.keep(t.float64(0) - share * inverse * sum_gx)
                # x - mean misses the mean's second part.
                offset = w.keep(t.float64(0) - share * sum_g - slope_x * rest)
                with t.serial(0, extent.repeat) as copy:
                    place = factors + copy * extent.channels + channel
                    constant = extent.phase(FIXED)
                    w.store(extent.floats, place, t.Select(constant, t.float32(0), t.cast(slope_x, "float32")))
                    place = place + extent.width
                    w.store(extent.floats, place, t.Select(constant, t.float32(0), t.cast(offset, "float32")))

        def gradient(column: Any, places: Sequence[Any], put: _Put, wide: bool) -> None:
            terms = [w.keep(one) for one in _terms(w, extent, rows, column, wide)]
            at = w.at if wide else lambda one: one
            slope_x, offset = (
                w.keep(extent.floats[at(factors + extent.width * number + column)]) for number in range(2)
            )
            for place in places:
                if wide and activation in COSTLY:
                    centred, g = values[at(place)] - terms[0], result[at(place)]
                else:
                    centred, g = slope(terms, at(place), wide)
                put(place, terms[1] * g + (slope_x * centred + offset))

        def sums() -> None:
            if activation in COSTLY:
                _written(w, result, stream, lambda put: _gradient_sums(w, extent, rows, slope, put))
            else:
                _gradient_sums(w, extent, rows, slope, None)

        def apply() -> None:
            def write(put: _Put) -> None:
                _apply(w, extent, result, put, gradient)

            if activation in COSTLY:  # the memory has just been read
                write(lambda place, value: w.store(result, w.at(place), value))
            else:
                _written(w, result, stream, write)

        w.when(extent.phase(REDUCE), sums)
        w.when(extent.phase(JOIN), join)
        w.when(extent.phase(APPLY), apply)

    return body


# ------------------------------------------------------------------------------------------------- the parts of forward


def _moments(w: Writer, extent: _Extent, values: Any) -> None:
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
                for place in places:
                    off = w.keep(values[w.at(place)] - base)
                    total, square = total + off, square + off * off
                total, square = w.keep(total), w.keep(square)
                w.store(floats, w.at(sums + column), total)
                w.store(floats, w.at(squares + column), square)

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
            extent.walk(start, stop, add)
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


def _from_moments(w: Writer, extent: _Extent, values: Any, learn: Callable[[Any, Any], Callable[[Any], None]]) -> None:
    """Fill the table from the moments of segments and of the rows left over."""
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


def _unbiased(w: Writer, extent: _Extent, variance: Any) -> Any:
    count = w.keep(w.t.cast(extent.rows, "float64"))
    return variance * (count / (count - w.t.float64(1)))


def _fill_table(
    w: Writer,
    extent: _Extent,
    rows: Any,
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
    factor, offset = w.local(1, "float64"), w.local(1, "float64")
    for (address, memory), local, otherwise in zip(parameters, (factor, offset), (1, 0), strict=True):
        w.store(local, t.int64(0), t.float64(otherwise))
        w.when(
            address != 0,
            lambda local=local, memory=memory: w.store(local, t.int64(0), t.cast(memory[channel], "float64")),
        )
    scale = w.keep(factor[t.int64(0)] * inverse)
    shift = w.keep(offset[t.int64(0)] - rest * scale)
    found = {MEAN: mean, SCALE: scale, SHIFT: shift, INVERSE: inverse, REST: rest, VARIANCE: unbiased}
    with t.serial(0, extent.repeat) as copy:
        place = w.keep(copy * extent.channels + channel)
        for row, value in found.items():
            w.store(rows, width * row + place, t.cast(value, "float32"))


# ------------------------------------------------------------------------------------------------ the parts of backward


def _gradient_sums(
    w: Writer,
    extent: _Extent,
    rows: Any,
    slope: Callable[[Sequence[Any], Any, bool], tuple[Any, Any]],
    put: _Put | None,
) -> None:
    """Each segment's columns of g and of g (x - mean), summed; g is the gradient before the activation, and is put."""
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
                terms = [w.keep(one) for one in _terms(w, extent, rows, column, True)]
                total, product = floats[w.at(sums + column)], floats[w.at(products + column)]
                for place in places:
                    centred, g = slope(terms, w.at(place), True)
                    if put is not None:
                        put(place, g)
                    total, product = total + g, product + g * centred
                total, product = w.keep(total), w.keep(product)
                w.store(floats, w.at(sums + column), total)
                w.store(floats, w.at(products + column), product)

            def end(column: Any) -> None:
                for wide, row in pairs:
                    own = t.cast(floats[w.at(row + column)], f"float64x{LANES}")
                    w.store(doubles, w.at(wide + column), doubles[w.at(wide + column)] + own)

            extent.columns(begin)
            extent.walk(start, stop, add)
            extent.columns(end)

        extent.columns(clear)
        extent.chunks(first, last, chunk)

    extent.backwards(segment)


# --------------------------------------------------------------------------------------------------- what both have


def _written(w: Writer, memory: Any, stream: Any, write: Callable[[_Put], None]) -> None:
    """Write a body twice: for vectors that go to the caches, and for those that go past them."""

    def past() -> None:
        write(lambda place, value: w.stream(memory, place, value))
        w.t.evaluate(w.call("int32", "hp_fence"))

    w.either(stream != 0, past, lambda: write(lambda place, value: w.store(memory, w.at(place), value)))


def _apply(
    w: Writer, extent: _Extent, result: Any, put: _Put, make: Callable[[Any, Sequence[Any], _Put, bool], None]
) -> None:
    """Write the result of the segments of this call, and of the rows left over where the last one is among them."""
    t = w.t
    first, last = w.keep(extent.begin * extent.length), w.keep(t.min(extent.end * extent.length, extent.wide))
    extent.walk(first, last, lambda column, places: make(column, places, put, True))

    def left() -> None:
        with t.serial(0, extent.left * extent.channels) as column:
            place = w.keep(extent.tail * extent.channels + column)
            make(column, [place], lambda place, value: w.store(result, place, value), False)

    w.when(extent.end == extent.segments, left)


def _terms(w: Writer, extent: _Extent, rows: Any, column: Any, wide: bool) -> list[Any]:
    """Mean, scale and shift of a column, or of a vector of them."""
    places = [extent.width * number + column for number in (MEAN, SCALE, SHIFT)]
    return [rows[w.at(place) if wide else place] for place in places]


def _normal(terms: Sequence[Any], value: Any) -> Any:
    mean, scale, shift = terms
    return (value - mean) * scale + shift


def _constant(w: Writer, value: float, wide: bool) -> Any:
    return w.lanes(w.t.float32(value)) if wide else w.t.float32(value)


def _sigmoid(w: Writer, z: Any, wide: bool) -> Any:
    return w.keep(w.call(f"float32x{LANES}", "hp_sigmoid", z) if wide else w.call("float32", "hp_sigmoid_one", z))


def _activate(w: Writer, activation: str, z: Any, wide: bool) -> Any:
    """f(z). What is compared with NaN is not so, and NaN stays."""
    zero, six = _constant(w, 0, wide), _constant(w, 6, wide)
    select = w.t.Select
    z = w.keep(z)
    if activation == "relu":
        return select(z <= zero, zero, z)
    if activation == "relu6":
        return select(z <= zero, zero, select(z >= six, six, z))
    if activation == "silu":
        return z * _sigmoid(w, z, wide)
    return z


def _slope(w: Writer, activation: str, z: Any, gradient: Any, wide: bool) -> Any:
    """f'(z) * gradient, with the gradient itself where z is NaN, as torch has it."""
    zero, six, one = (_constant(w, value, wide) for value in (0, 6, 1))
    select = w.t.Select
    if activation == "none":
        return gradient
    z = w.keep(z)
    if activation == "relu":
        return select(z <= zero, zero, gradient)
    if activation == "relu6":
        return select(z <= zero, zero, select(z >= six, zero, gradient))
    own = _sigmoid(w, z, wide)
    return gradient * (own * (one + z * (one - own)))
