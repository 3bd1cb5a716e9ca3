"""Code that forward and backward of BatchNorm share: loops over rows, sums over them, activations.

A tensor is read as rows (one pixel of one image) of channels. Forward reads it twice: for the moments of the batch, and
to normalise and activate. Backward reads it and the gradient twice: for the two sums that the gradient needs, and to
write it; what the activation took is not kept but made again. Rows are walked in the order in which they lie in memory,
as CPUs fetch ahead what is read in order. The first pass goes through the segments of the tensor from the last one on,
which is still in the caches from when the tensor was written; the second pass begins where the first one ended.

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

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hybridpar.codegen.tir_writer import LANES, Writer

#: Wide rows whose sums are float32.
CHUNK = 128

#: Wide rows that are summed at a time, so that sums are read and written less often.
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
    """Defines no function: this file is one of the sources so that kernels are built anew when it changes."""
    return {}


class Extent:
    """How the rows of a call are grouped, and where in scratch memory their sums are."""

    def __init__(self, w: Writer, scratch: Any, table: Any, numbers: dict[str, Any]) -> None:
        self.w, self.t, self.table = w, w.t, w.view(table, "float32")
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
        """Whether a bit of the call's `phases` is set."""
        return (self.phases & bit) != 0

    def sums(self, segment: Any) -> Any:
        """Index of the two rows of sums of a segment among the doubles of scratch memory."""
        return segment * SEGMENT * self.width

    def work(self) -> Any:
        """Index of the float32 rows that this call alone uses, among the floats of scratch memory."""
        return self.w.keep((self.begin * SEGMENT + 2) * self.width * 2)

    def bounds(self, segment: Any) -> tuple[Any, Any]:
        """The wide rows of a segment."""
        first = self.w.keep(segment * self.length)
        return first, self.w.keep(self.t.min(first + self.length, self.wide))

    def columns(self, body: Callable[[Any], None]) -> None:
        """Write a loop over the vectors of a wide row."""
        with self.t.serial(0, self.width // LANES) as block:
            body(self.w.keep(block * LANES))

    def walk(self, start: Any, stop: Any, count: int, body: Callable[[Any, Sequence[Any]], None]) -> None:
        """Write loops over the vectors of some wide rows, several rows at a time."""
        t, w = self.t, self.w
        groups = w.keep((stop - start) // count)
        with t.serial(0, groups) as group:
            row = w.keep((start + group * count) * self.width)
            self.columns(lambda column: body(column, [row + self.width * step + column for step in range(count)]))
        if count > 1:
            with t.serial(0, stop - start - groups * count) as odd:
                row = w.keep((start + groups * count + odd) * self.width)
                self.columns(lambda column: body(column, [row + column]))

    def fetch(self, memory: Any, column: Any, places: Sequence[Any]) -> None:
        """Fetch a part of what a walk reads after its rows of now, in the order in which it lies in memory."""
        count = len(places)
        first = self.w.keep(places[0] + count * self.width + (count - 1) * column)
        for step in range(count):
            self.w.prefetch(memory, first + LANES * step)

    def chunks(self, first: Any, last: Any, body: Callable[[Any, Any], None]) -> None:
        """Write a loop over the chunks of some wide rows."""
        t, w = self.t, self.w
        count = w.keep((last - first + CHUNK - 1) // CHUNK)
        with t.serial(0, count) as step:
            start = w.keep(first + step * CHUNK)
            body(start, w.keep(t.min(start + CHUNK, last)))

    def backwards(self, body: Callable[[Any], None]) -> None:
        """Write a loop over the segments of this call, the last one first."""
        with self.t.serial(0, self.end - self.begin) as step:
            body(self.w.keep(self.end - 1 - step))

    def over_segments(self, value: Callable[[Any, Any, Any], Any]) -> None:
        """Set the joined row to a sum over segments."""
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
        """Sum a channel over its columns of the joined row and over the rows left over."""
        t, w = self.t, self.w
        zero = t.int64(0)
        w.store(total, zero, t.float64(0))
        with t.serial(0, self.repeat) as copy:
            w.store(total, zero, total[zero] + self.doubles[self.joined + copy * self.channels + channel])
        with t.serial(0, self.left) as row:
            w.store(total, zero, total[zero] + left((self.tail + row) * self.channels + channel))

    def apply(self, result: Any, put: Put, make: Callable[[Any, Sequence[Any], Put, bool], None]) -> None:
        """Write the result of the segments of this call, and of the rows left over if the last segment
        is among them.
        """
        t, w = self.t, self.w
        first, last = w.keep(self.begin * self.length), w.keep(t.min(self.end * self.length, self.wide))
        self.walk(first, last, 1, lambda column, places: make(column, places, put, True))

        def left() -> None:
            with t.serial(0, self.left * self.channels) as column:
                place = w.keep(self.tail * self.channels + column)
                make(column, [place], lambda place, value: w.store(result, place, value), False)

        w.when(self.end == self.segments, left)

    def terms(self, column: Any, wide: bool) -> list[Any]:
        """Mean, scale and shift, from the table."""
        places = [self.width * number + column for number in (MEAN, SCALE, SHIFT)]
        return [self.w.keep(self.table[self.w.at(place) if wide else place]) for place in places]


def added(values: Iterable[Any]) -> Any:
    """The sum of some values, by a tree: the sum so far, which memory holds, then waits for one addition only."""
    left = list(values)
    while len(left) > 1:
        left = [one + other for one, other in zip(left[::2], left[1::2], strict=True)]
    return left[0]


def write_out(w: Writer, memory: Any, stream: Any, write: Callable[[Put], None]) -> None:
    """Write statements twice: with stores to the caches, and with stores past them."""
    w.past_caches(stream != 0, lambda past: write(lambda place, value: w.put(memory, place, value, past=past)))


def _constant(w: Writer, value: float, wide: bool) -> Any:
    return w.lanes(w.t.float32(value)) if wide else w.t.float32(value)


def _sigmoid(w: Writer, z: Any, wide: bool) -> Any:
    return w.keep(w.call(f"float32x{LANES}", "hp_sigmoid", z) if wide else w.call("float32", "hp_sigmoid_one", z))


def activate(w: Writer, activation: str, z: Any, wide: bool) -> Any:
    """The activation of a value; NaN stays NaN."""
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
    """The derivative of the activation at z, times a gradient; at NaN, relu passes it on and relu6 does not."""
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
