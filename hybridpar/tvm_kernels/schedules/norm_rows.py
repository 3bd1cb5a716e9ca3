"""What forward and backward of BatchNorm share: the order of rows, sums over them, activations.

A tensor is read as rows (one pixel of one image) of channels. Forward reads it twice: for the moments of the batch, and
to normalise and activate. Backward reads it and the gradient twice: for the two sums that the gradient needs, and to
write it; what the activation took is not kept but made again. Rows are walked in the order in which they lie in memory.
The first pass begins at the end, which is still in the caches from when the tensor was written; the second one begins
where the first one ended.

Moments lose nothing where the mean is large. Values are taken relative to the first of up to `CHUNK` rows and summed in
float32; chunks are merged in float64 (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance",
equation 2.1). As (first - mean)^2 <= CHUNK * variance of the chunk, that much at most can cancel. The mean is kept as
the sum of two float32, so that x - mean is as good as x.

One function does a direction for one activation, in phases: all in one call, or those over rows for ranges of
segments, each by a thread of its own, and in between the one that joins them. Segments depend on the shape only, so
results do not depend on the number of threads. Rows that are no multiple of a vector are read several at a time, as one
wide row; the phase that joins also computes what is left over, less than a wide row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridpar.codegen.tir_writer import LANES, Writer

#: Wide rows whose sums are float32.
CHUNK = 128

#: Wide rows that are walked at a time, so that sums are read and written less often.
ROWS = 4

#: Phases of a call, added up. REDUCE and APPLY run over segments; JOIN runs once in between. With TRACK it moves the
#: running statistics; with FIXED it takes them in place of the batch's, and backward takes them as constants. With
#: GIVEN scratch holds what replaces REDUCE: 2 x C float64, mean and biased variance.
REDUCE, JOIN, APPLY, FIXED, TRACK, GIVEN = 1, 2, 4, 8, 16, 32

#: Rows of the table that forward leaves for backward, each repeated to a wide row of float32. REST is what the float32
#: of MEAN lacks; VARIANCE is the unbiased one.
MEAN, SCALE, SHIFT, INVERSE, REST, VARIANCE = range(6)
TABLE_ROWS = 6

#: Doubles of scratch for each column of a wide row: per segment, and once.
SEGMENT, SHARED = 4, 3

ACTIVATIONS = ("none", "relu", "relu6", "silu")

#: Activations whose slope costs more than memory: their gradient before the activation is computed once, and stored in
#: the memory of the result meanwhile.
COSTLY = ("silu",)

#: The numbers that follow a function's addresses; those of parameters and running statistics may be 0 for none. There
#: are rows * channels float32; `repeat` rows are one wide row, whose width is a multiple of LANES; `length` wide rows
#: are a segment; a call is for the segments from `begin` up to `end`; `stream` is 1 where the result, which then begins
#: at a multiple of 64, is to be written past the caches.
EXTENT = ("rows", "channels", "repeat", "length", "begin", "end", "phases", "stream")

#: Sets the values at a place.
Put = Callable[[Any, Any], None]


def define(_writer: Writer) -> dict[str, Any]:
    """No function: this file is among the sources so that kernels are built anew where it changes."""
    return {}


class Extent:
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
        """Whether this call is for a phase, or in a mode."""
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


def write_out(w: Writer, memory: Any, stream: Any, write: Callable[[Put], None]) -> None:
    """Write a body twice: for vectors that go to the caches, and for those that go past them."""

    def past() -> None:
        write(lambda place, value: w.stream(memory, place, value))
        w.t.evaluate(w.call("int32", "hp_fence"))

    w.either(stream != 0, past, lambda: write(lambda place, value: w.store(memory, w.at(place), value)))


def apply_rows(
    w: Writer, extent: Extent, result: Any, put: Put, make: Callable[[Any, Sequence[Any], Put, bool], None]
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


def terms_of(w: Writer, extent: Extent, rows: Any, column: Any, wide: bool) -> list[Any]:
    """Mean, scale and shift of a column, or of a vector of them."""
    places = [extent.width * number + column for number in (MEAN, SCALE, SHIFT)]
    return [w.keep(rows[w.at(place) if wide else place]) for place in places]


def _constant(w: Writer, value: float, wide: bool) -> Any:
    return w.lanes(w.t.float32(value)) if wide else w.t.float32(value)


def _sigmoid(w: Writer, z: Any, wide: bool) -> Any:
    return w.keep(w.call(f"float32x{LANES}", "hp_sigmoid", z) if wide else w.call("float32", "hp_sigmoid_one", z))


def activate(w: Writer, activation: str, z: Any, wide: bool) -> Any:
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


def slope_of(w: Writer, activation: str, z: Any, gradient: Any, wide: bool) -> Any:
    """f'(z) * gradient. Where z is NaN relu lets it through and relu6 does not, as torch's vectors have it."""
    zero, six, one = (_constant(w, value, wide) for value in (0, 6, 1))
    select = w.t.Select
    if activation == "none":
        return gradient
    z = w.keep(z)
    if activation == "relu":
        return select(z <= zero, zero, gradient)
    if activation == "relu6":
        return select(z > zero, select(z < six, gradient, zero), zero)
    own = _sigmoid(w, z, wide)
    return gradient * (own * (one + z * (one - own)))
