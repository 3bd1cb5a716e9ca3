"""The forward pass in channels_last that also computes mean and variance of its result, for the BatchNorm behind it.

It is `cpu_gather`, whose tiles also add their results, less a shift, and the squares of these to the sums of a piece: a
few rows of a strip, so that float32 is precise enough. The shift is one of the first results of the piece, so nothing
is lost where the mean is large (see `norm_rows`). `merge` moves the sums of all pieces to one origin and adds them in
float64, in the order of the images, so the result does not depend on the number of threads.

Scratch memory begins with the result for the norm: 2 x C float64, the mean of each channel and its biased variance.
Then come the transposed weights, and for each piece shifts, sums and squares. These have a place for each lane of each
block of channels, as channels that are in two blocks are summed in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridpar.codegen.tir_writer import INFINITE, Writer
from hybridpar.tvm_kernels.schedules.cpu_gather import Gather
from hybridpar.tvm_kernels.schedules.geometry import Span, functions_of
from hybridpar.tvm_kernels.schedules.planes import whole_lines
from hybridpar.tvm_kernels.shapes import ConvShape, Direction

#: No pass that turns schedules into loops is needed.
WRITTEN_OUT = True

#: Results of a channel whose sums are float32, but for tiles that are larger.
_PIECE = 1024

#: Rows of sums that a piece has: shifts, sums and squares.
_ROWS = 3


def define(w: Writer, shape: str, direction: str, parameters: dict[str, int]) -> dict[str, Any]:
    """The functions of one kernel: `prepare` and `rows` as of the plain one; `merge` is for blocks of channels.

    Args:
        w: Writes them.
        shape: As `ConvShape.text`.
        direction: Forward.
        parameters: As of the plain kernel.

    Returns:
        Functions of TIR by name.
    """
    kernel = _Summed(w, ConvShape.parse(shape), Direction(direction), parameters)
    return functions_of(w, {"prepare": kernel.prepare, "rows": kernel.rows, "merge": kernel.merge})


def piece_rows(shape: ConvShape, strip: int, tile_rows: int) -> int:
    """Output rows of a piece: as many tiles of a strip as float32 sums allow, in numbers that divide the strip evenly.

    Args:
        shape: The convolution.
        strip: Rows of a strip.
        tile_rows: Rows of a tile.

    Returns:
        Number of rows.
    """
    tiles = strip // tile_rows
    fitting = (one for one in range(tiles, 1, -1) if tiles % one == 0)
    return tile_rows * next((one for one in fitting if one * tile_rows * shape.out_width <= _PIECE), 1)


def weights_at(shape: ConvShape) -> int:
    """Floats in front of the weights in scratch memory: the moments, 2 x C float64.

    Args:
        shape: The convolution.

    Returns:
        Number of floats.
    """
    return whole_lines(4 * shape.channels)


def sums_at(shape: ConvShape) -> int:
    """Floats in front of the sums in scratch memory.

    Args:
        shape: The convolution.

    Returns:
        Number of floats.
    """
    return weights_at(shape) + whole_lines((shape.kernel[0] * shape.kernel[1] + 1) * shape.channels)


def scratch_floats(shape: ConvShape, lanes: int, strip: int, tile_rows: int) -> int:
    """Floats of scratch memory.

    Args:
        shape: The convolution.
        lanes: Values of a vector.
        strip: Rows of a strip.
        tile_rows: Rows of a tile.

    Returns:
        Number of floats.
    """
    pieces = shape.batch * -(-shape.out_height // piece_rows(shape, strip, tile_rows))
    return sums_at(shape) + pieces * _ROWS * -(-shape.channels // lanes) * lanes


class _Summed(Gather):
    """Writes one kernel."""

    def __init__(self, w: Writer, shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> None:
        super().__init__(w, shape, direction, parameters)
        #: Floats of a row of sums.
        self.width = -(-shape.channels // self.lanes) * self.lanes
        self.piece = piece_rows(shape, self.strip, self.tile_rows)
        self.pieces = -(-shape.out_height // self.piece)

    def prepare(self, second: Any, third: Any, scratch: Any, begin: Any, end: Any, **_: Any) -> None:
        """As of the plain kernel."""
        super().prepare(second, third, scratch + 4 * weights_at(self.shape), begin, end)

    def _strips(self, first: Any, out: Any, scratch: Any, begin: Any, end: Any) -> None:
        self.memory = self.w.view(scratch, "float32")
        super()._strips(first, out, scratch + 4 * weights_at(self.shape), begin, end)

    def _blocks(self) -> Iterator[Any]:
        lanes = self.lanes
        for channel in super()._blocks():
            # The last block may reach back, and has its own places all the same.
            whole = self.shape.channels % lanes == 0
            block = self.t.floordiv(channel + (lanes - 1), self.t.int64(lanes))
            self._place = channel if whole else self.w.keep(block * lanes)
            yield channel

    def _tile(self, image: Any, row: Any, bottom: Any, span: Span, moved: Any, channel: Any) -> None:
        w, t = self.w, self.t
        piece = w.keep(t.floordiv(row, t.int64(self.piece)))
        self._top = w.keep(piece * self.piece)
        self._sums = w.keep(self._sums_of(image * self.pieces + piece) + self._place)
        super()._tile(image, row, bottom, span, moved, channel)

    def _whole(self, image: Any, row: Any, span: Span, moved: Any, channel: Any) -> None:
        self._values: list[Any] = []
        super()._whole(image, row, span, moved, channel)
        self._add(row, span, moved)

    def _row(self, image: Any, row: Any, span: Span, moved: Any, channel: Any) -> None:
        self._values = []
        super()._row(image, row, span, moved, channel)
        self._add(row, span, moved)

    def _store(self, start: Any, value: Any) -> None:
        value = self.w.keep(value)
        super()._store(start, value)
        self._values.append(value)

    def _add(self, row: Any, span: Span, moved: Any) -> None:
        """Add what was just stored to the sums of its piece; where it is the first of it, after they were begun."""
        w, t, values = self.w, self.t, self._values
        if span.start == 0:
            first = row <= self._top
            w.when(t.And(first, moved <= t.int64(0)) if span.count > 1 else first, self._begin)
        shift = w.keep(self._load(self.memory, self._sums))
        offs = [w.keep(value - shift) for value in values]
        total, square = offs[0], offs[0] * offs[0]
        for off in offs[1:]:
            total, square = total + off, square + off * off
        for row_of, more in ((1, total), (2, square)):
            place = w.keep(self._sums + row_of * self.width)
            w.store(self.memory, self._at(place), self._load(self.memory, place) + more)

    def _begin(self) -> None:
        """Begin a piece. Its shift is the last of a tile's values: the first one lies on the border most often."""
        w, t = self.w, self.t
        value = self._values[-1]
        bits = t.reinterpret("int32" if self.lanes == 1 else f"int32x{self.lanes}", value)
        # Infinity and NaN would hide what the others are.
        finite = (bits & self._all(t.int32(0x7FFFFFFF))) < self._all(t.int32(INFINITE))
        zero = self._all(t.float32(0))
        for row_of, start in enumerate((t.Select(finite, value, zero), zero, zero)):
            w.store(self.memory, self._at(self._sums + row_of * self.width), start)

    def merge(self, scratch: Any, begin: Any, end: Any, **_: Any) -> None:
        """Leave mean and biased variance of the channels of some blocks."""
        w, t, shape, lanes = self.w, self.t, self.shape, self.lanes
        memory, moments = w.view(scratch, "float32"), w.view(scratch, "float64")
        values = shape.batch * shape.out_height * shape.out_width
        last = (shape.out_height - (self.pieces - 1) * self.piece) * shape.out_width

        def exact(place: Any) -> Any:
            return w.keep(t.cast(self._load(memory, place), "float64" if lanes == 1 else f"float64x{lanes}"))

        with t.serial(begin, end) as block:
            place = w.keep(block * lanes)
            origin = exact(self._sums_of(t.int64(0)) + place)
            total, square = w.local(lanes, "float64"), w.local(lanes, "float64")
            whole = self._at(t.int64(0))
            for one in (total, square):
                w.store(one, whole, self._all(t.float64(0)))

            def add(piece: Any, count: int) -> None:
                at = w.keep(self._sums_of(piece) + place)
                off = w.keep(exact(at) - origin)
                own, squares = exact(at + self.width), exact(at + 2 * self.width)
                moved = w.keep(off * self._all(t.float64(count)))
                w.store(total, whole, total[whole] + own + moved)
                w.store(square, whole, square[whole] + squares + off * (own + own + moved))

            with t.serial(t.int64(0), t.int64(shape.batch)) as image:
                first = w.keep(image * self.pieces)
                if self.pieces > 1:
                    with t.serial(t.int64(0), t.int64(self.pieces - 1)) as piece:
                        add(first + piece, self.piece * shape.out_width)
                add(first + (self.pieces - 1), last)
            count = self._all(t.float64(values))
            off = w.keep(total[whole] / count)
            channel = w.keep(t.min(place, t.int64(shape.channels - lanes)))
            w.store(moments, self._at(channel), origin + off)
            w.store(moments, self._at(channel + shape.channels), (square[whole] - total[whole] * off) / count)

    def _sums_of(self, piece: Any) -> Any:
        return piece * (_ROWS * self.width) + sums_at(self.shape)
