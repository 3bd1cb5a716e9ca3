"""Copies strips of contiguous images into padded tiles, which have the border of zeros around them.

A `PaddedTile` is such a place: some rows of one plane with their padding, small enough for L1. Where outputs are two
columns apart, even and odd columns lie in halves of a row, so that what neighbouring outputs read is side by side
again. Nothing that is computed in it needs a condition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hybridpar.codegen.tir_writer import Writer
from hybridpar.tvm_kernels.schedules.geometry import Axis, Taps

#: Vectors of a row that are copied without a loop.
_WRITTEN_OUT = 8
_FLOATS_OF_LINE = 16


@dataclass(frozen=True)
class PaddedTile:
    """Rows of a plane with their border.

    Attributes:
        first: Image row in the first row of the padded tile, where outputs from row 0 on are computed.
        rows: Rows of it.
        low: Image column in the first place of a row.
        begin: First image column that is copied.
        columns: How many are.
        phases: Columns from one output to the next; those of equal remainder lie side by side.
        half: Places of one phase in a row.
    """

    first: int
    rows: int
    low: int
    begin: int
    columns: int
    phases: int
    half: int

    @property
    def pitch(self) -> int:
        """Places from one row to the next."""
        return self.phases * self.half

    @property
    def places(self) -> int:
        """Places of all rows, in whole cache lines."""
        return whole_lines(self.rows * self.pitch)

    def at(self, column: int) -> int:
        """Where in a row of the tile an image column lies.

        Args:
            column: Index of the column; those of the border are below 0 or behind the image.

        Returns:
            Index in the row.
        """
        apart = column - self.low
        return apart % self.phases * self.half + apart // self.phases


@dataclass(frozen=True)
class Vector:
    """Outputs of one row that are computed together: of each phase a vector.

    Attributes:
        start: First column.
        taps: Of the first column of each phase.
    """

    start: int
    taps: tuple[Taps, ...]


def padded_tile(vertical: Axis, horizontal: Axis, strip: int) -> PaddedTile:
    """The padded tile for a strip of output rows, whose first row is a multiple of `vertical.whole`.

    Args:
        vertical: Rows.
        horizontal: Columns.
        strip: Output rows.

    Returns:
        Its form.
    """
    whole = vertical.whole
    strip = min(strip, -(-vertical.out // whole) * whole)
    rows, columns = reach(vertical, strip), reach(horizontal, horizontal.out)
    begin = max(columns.start, 0)
    count = max(0, min(columns.stop, horizontal.size) - begin)
    phases = 1 if horizontal.transposed else horizontal.stride
    # What is copied first has phase 0, so that vectors are split the same way in all rows.
    low = columns.start - (begin - columns.start) % phases
    return PaddedTile(rows.start, len(rows), low, begin, count, phases, -(-(columns.stop - low) // phases))


def reach(along: Axis, count: int) -> range:
    """The input elements that the first outputs of an axis use, the border included.

    Args:
        along: The axis.
        count: Number of outputs.

    Returns:
        Indices of the elements; those outside of the image are the border.
    """
    places = [place for out in range(count) for _, place in along.unbounded(out)] or [0]
    return range(min(places), max(places) + 1)


def turned_tile(vertical: Axis, horizontal: Axis, strip: int, lanes: int) -> tuple[int, int]:
    """Sizes of a tile in which pixels of some channels lie as in channels_last.

    Args:
        vertical: Rows.
        horizontal: Columns.
        strip: Output rows.
        lanes: Channels.

    Returns:
        Floats for the input, and for input and output together.
    """
    strip = min(strip, vertical.out)
    inside = whole_lines(min(len(reach(vertical, strip)), vertical.size) * horizontal.size * lanes)
    return inside, inside + whole_lines(strip * horizontal.out * lanes)


def whole_lines(places: int) -> int:
    """Rounds a number of floats up to whole cache lines.

    Args:
        places: Number of floats.

    Returns:
        Number of floats.
    """
    return -(-places // _FLOATS_OF_LINE) * _FLOATS_OF_LINE


def empty(w: Writer, padded: Any, start: Any, places: int) -> None:
    """Set a padded tile to zero, as the columns of its border stay.

    Args:
        w: Writes it.
        padded: Memory of the padded tile.
        start: Index of the padded tile in it.
        places: Floats of the padded tile.
    """
    with w.t.serial(w.t.int64(0), w.t.int64(places)) as index:
        w.store(padded, start + index, w.t.float32(0))


def fill(
    w: Writer,
    source: Any,
    plane: Any,
    to: Any,
    start: Any,
    padded: PaddedTile,
    rows: int,
    pitch: int,
    first: Any,
    lanes: int,
) -> None:
    """Copy rows of a plane into a padded tile that was emptied once; rows outside of the image become zero.

    Args:
        w: Writes it.
        source: The images.
        plane: Index of the plane's first element in it.
        to: Memory of the padded tile.
        start: Index of the padded tile in it.
        padded: Its form.
        rows: Rows of the plane.
        pitch: Columns of the plane.
        first: Image row that comes into the padded tile's first row.
        lanes: Values of a vector.
    """
    t = w.t
    low = w.keep(t.min(t.max(t.int64(0) - first, t.int64(0)), t.int64(padded.rows)))
    high = w.keep(t.max(low, t.min(t.int64(padded.rows), t.int64(rows) - first)))

    def clear(begin: Any, end: Any) -> None:
        with t.serial(begin, end) as row:
            with t.serial(t.int64(0), t.int64(padded.pitch)) as index:
                w.store(to, start + row * padded.pitch + index, t.float32(0))

    clear(t.int64(0), low)
    clear(high, t.int64(padded.rows))
    if not padded.columns:
        return
    with t.serial(low, high) as row:
        here = w.keep(plane + (first + row) * pitch + padded.begin)
        there = w.keep(start + row * padded.pitch + padded.at(padded.begin))
        if padded.phases == 1:
            _copy(w, source, here, to, there, padded.columns, lanes)
        else:
            _split(w, source, here, to, there, padded, lanes)


def _copy(w: Writer, source: Any, here: Any, to: Any, there: Any, count: int, lanes: int) -> None:
    """Copy values that lie side by side; the last vector reaches back."""
    t = w.t

    def move(offset: Any) -> None:
        w.store(to, t.ramp(there + offset, 1, lanes), source[t.ramp(here + offset, 1, lanes)])

    whole = count // lanes
    if not whole:
        for offset in range(count):
            w.store(to, there + offset, source[here + offset])
        return
    if whole <= _WRITTEN_OUT:
        for index in range(whole):
            move(t.int64(index * lanes))
    else:
        with t.serial(t.int64(0), t.int64(whole)) as index:
            move(index * lanes)
    if count % lanes:
        move(t.int64(count - lanes))


def _split(w: Writer, source: Any, here: Any, to: Any, there: Any, padded: PaddedTile, lanes: int) -> None:
    """Copy a row of which even and odd columns go apart."""
    t, count = w.t, padded.columns

    def move(offset: Any, half: Any) -> None:
        places = (source[here + offset], to[there + half], to[there + half + padded.half])
        t.evaluate(w.call("void", f"hp_split{lanes}", *(t.address_of(place) for place in places)))

    pairs = count // 2
    whole = pairs // lanes
    if not whole:
        for offset in range(count):
            w.store(to, there + offset % 2 * padded.half + offset // 2, source[here + offset])
        return
    with t.serial(t.int64(0), t.int64(whole)) as index:
        half = w.keep(index * lanes)
        move(half * 2, half)
    if pairs % lanes:
        move(t.int64(2 * (pairs - lanes)), t.int64(pairs - lanes))
    if count % 2:
        w.store(to, there + pairs, source[here + (count - 1)])


def shuffles(lanes: int) -> str:
    """Functions in LLVM IR that put vectors of so many values in another order; addresses need no alignment.

    `hp_split` reads two vectors and writes even and odd values to two places; `hp_join` is its inverse for two vectors
    that are in registers.

    Args:
        lanes: Values of a vector.

    Returns:
        LLVM IR that defines both.
    """
    one, two = f"<{lanes} x float>", f"<{2 * lanes} x float>"
    even, odd = (mask_text(range(start, 2 * lanes, 2)) for start in (0, 1))
    mixed = mask_text(lane // 2 + lane % 2 * lanes for lane in range(2 * lanes))
    return f"""
define linkonce_odr void @hp_split{lanes}(ptr %from, ptr %even, ptr %odd) alwaysinline nounwind {{
  %all = load {two}, ptr %from, align 4
  %first = shufflevector {two} %all, {two} poison, {even}
  %second = shufflevector {two} %all, {two} poison, {odd}
  store {one} %first, ptr %even, align 4
  store {one} %second, ptr %odd, align 4
  ret void
}}
define linkonce_odr void @hp_join{lanes}(ptr %to, {one} %even, {one} %odd) alwaysinline nounwind {{
  %all = shufflevector {one} %even, {one} %odd, {mixed}
  store {two} %all, ptr %to, align 4
  ret void
}}
"""


def mask_text(lanes: Iterable[int]) -> str:
    """The mask of a `shufflevector` in LLVM IR.

    Args:
        lanes: Which lane of the operands each lane of the result is.

    Returns:
        The text.
    """
    places = [f"i32 {lane}" for lane in lanes]
    return f"<{len(places)} x i32> <{', '.join(places)}>"
