"""Forward and input gradient of contiguous images, with SIMD over the columns of a row.

Level 1 is a strip of rows of one plane, copied into a padded tile in L1 that has the border (`planes`). Level 2 is a
tile of rows x vectors of outputs in registers; a value of the padded tile is read once per tile and column of taps, and
multiplied with the tap of every output row that uses it. Taps are written out. The last vector of a row and the last
tile and strip of a plane reach back, so there are no conditions and no scalar rest.

At stride 2 outputs meet every second column: forward the padded tile keeps even and odd columns apart, and in the input
gradient a vector has outputs of the same remainder, which are interleaved when they are stored.

Work is cut into parts, each with a padded tile of its own in the scratch, which threads share out; planes are computed
one by one and alike in any part. Arguments of all functions: addresses (first, second, third, out, scratch), then the
range (begin, end). First is the input or the output's gradient, second the weights (C, 1, KH, KW), third the bias or 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from hybridpar.codegen.tir_writer import Writer
from hybridpar.tvm_kernels.schedules.geometry import ConvWriter, by_input, functions_of, share
from hybridpar.tvm_kernels.schedules.planes import Vector, empty, fill, padded_tile, shuffles
from hybridpar.tvm_kernels.shapes import ConvShape, Direction

#: No pass that turns schedules into loops is needed.
WRITTEN_OUT = True

#: Taps that are read once per plane and not once per tile.
_HELD = 9


def define(w: Writer, shape: str, direction: str, parameters: dict[str, int]) -> dict[str, Any]:
    """The function of one kernel: `planes` computes parts.

    Args:
        w: Writes it.
        shape: As `ConvShape.text`.
        direction: Forward or input gradient.
        parameters: lanes, tile_rows, tile_vectors, strip and parts.

    Returns:
        Functions of TIR by name.
    """
    kernel = _Rows(w, ConvShape.parse(shape), Direction(direction), parameters)
    return functions_of(w, {"planes": kernel.planes})


class _Rows(ConvWriter):
    """Writes one kernel."""

    def __init__(self, w: Writer, shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> None:
        super().__init__(w, shape, direction, parameters["lanes"])
        self.tile_rows, self.tile_vectors = parameters["tile_rows"], parameters["tile_vectors"]
        self.parts, whole = parameters["parts"], self.vertical.whole
        #: Rows in whole steps; where there are more than of the image, the last one is not stored.
        self.height = -(-self.vertical.out // whole) * whole
        self.strip = min(parameters["strip"], self.height)
        self.padded = padded_tile(self.vertical, self.horizontal, self.strip)
        self.phases = self.horizontal.whole

    def planes(self, first: Any, second: Any, third: Any, out: Any, scratch: Any, begin: Any, end: Any) -> None:
        """Compute parts of all planes."""
        w, t, shape = self.w, self.t, self.shape
        self.input, self.weights, self.output, self.memory, bias = self._views(first, second, out, scratch, third)
        self.start = w.local(1, "float32")
        total, padded = shape.batch * shape.channels, self.padded
        with t.attr(0, "pragma_import_llvm", w.tvm.ir.StringImm(shuffles(self.lanes))):
            with t.serial(begin, end) as part:
                self.own = w.keep(part * padded.places)
                empty(w, self.memory, self.own, padded.places)
                low, high = share(w, part, total, self.parts)
                with t.serial(low, high) as plane:
                    channel = w.keep(t.floormod(plane, t.int64(shape.channels)))
                    w.store(self.start, t.int64(0), t.float32(0))
                    if self.bias:
                        w.when(third != t.int64(0), lambda: w.store(self.start, t.int64(0), bias[channel]))
                    self._plane(plane, w.keep(channel * self.taps))

    def _plane(self, plane: Any, filters: Any) -> None:
        """All strips of one plane."""
        w, t, padded = self.w, self.t, self.padded
        vertical, horizontal = self.vertical, self.horizontal
        held = {tap: w.keep(self._tap(filters, tap)) for tap in range(self.taps)} if self.taps <= _HELD else None
        start = w.keep(self._all(self.start[t.int64(0)]))
        image = w.keep(plane * (vertical.size * horizontal.size))
        result = w.keep(plane * (vertical.out * horizontal.out))
        for top in self._starts(self.height, self.strip):
            first = w.keep(self._shift(top) + padded.first)
            sizes = (vertical.size, horizontal.size)
            fill(w, self.input, image, self.memory, self.own, padded, *sizes, first, self.lanes)
            for row in self._starts(self.strip, self.tile_rows):
                base = w.keep(self.own + self._shift(row) * padded.pitch)
                at = w.keep(result + (top + row) * horizontal.out)
                for vectors, moved in self._tiles():
                    self._tile(base, at, w.keep(top + row), vectors, moved, start, held, filters)

    def _starts(self, size: int, step: int) -> Iterator[Any]:
        """Where pieces of an axis begin; the last one reaches back."""
        t = self.t
        count = -(-size // step)
        if count == 1:
            yield t.int64(0)
            return
        with t.serial(t.int64(0), t.int64(count)) as index:
            yield self.w.keep(t.min(index * step, t.int64(size - step)) if size % step else index * step)

    def _shift(self, row: Any) -> Any:
        """How far the input of an output row is from that of row 0."""
        along = self.vertical
        return self.t.floordiv(row, self.t.int64(along.stride)) if along.transposed else row * along.stride

    def _tiles(self) -> Iterator[tuple[list[Vector], Any]]:
        """Vectors of tiles side by side, and how many tiles lie before; whole tiles are in a loop."""
        t, horizontal, width = self.t, self.horizontal, self.lanes * self.phases
        regular = horizontal.out // width
        starts = [index * width for index in range(regular)]
        if horizontal.out % width:
            starts.append(horizontal.out - width)
        vectors = [
            Vector(start, tuple(horizontal.unbounded(start + phase) for phase in range(self.phases)))
            for start in starts
        ]
        size = self.tile_vectors
        loops = regular // size
        if loops > 1:
            with t.serial(t.int64(0), t.int64(loops)) as index:
                yield vectors[:size], self.w.keep(index)
        for first in range(loops * size if loops > 1 else 0, len(vectors), size):
            yield vectors[first : first + size], t.int64(0)

    def _tile(
        self, base: Any, at: Any, row: Any, vectors: list[Vector], moved: Any, start: Any, held: Any, filters: Any
    ) -> None:
        """One tile, all of it written out."""
        w, t, lanes, padded = self.w, self.t, self.lanes, self.padded
        base = w.keep(base + moved * (self.tile_vectors * lanes))
        rows = range(self.tile_rows)
        sums = {(r, v, p): start for r in rows for v in range(len(vectors)) for p in range(self.phases)}
        taps: dict[int, Any] = held or {}
        row_taps = tuple(self.vertical.unbounded(r) for r in rows)
        for input_row, row_uses in by_input(row_taps):
            for v, vector in enumerate(vectors):
                for column, column_uses in by_input(vector.taps):
                    place = (input_row - padded.first) * padded.pitch + padded.at(column)
                    value = w.keep(self.memory[self._at(base + place)])
                    for r, row_tap in row_uses:
                        for phase, column_tap in column_uses:
                            tap = row_tap * self.shape.kernel[1] + column_tap
                            if tap not in taps:
                                taps[tap] = w.keep(self._tap(filters, tap))
                            sums[r, v, phase] = w.keep(sums[r, v, phase] + value * taps[tap])
        at = w.keep(at + moved * (self.tile_vectors * lanes * self.phases))
        for r in rows:
            beyond = r == self.tile_rows - 1 and self.height > self.vertical.out
            inside = t.If(row + r < t.int64(self.vertical.out)) if beyond else contextlib.nullcontext()
            with inside, t.Then() if beyond else contextlib.nullcontext():
                for v, vector in enumerate(vectors):
                    place = at + (r * self.horizontal.out + vector.start)
                    self._store(place, [sums[r, v, phase] for phase in range(self.phases)])

    def _store(self, place: Any, values: list[Any]) -> None:
        w, t = self.w, self.t
        if len(values) == 1:
            w.store(self.output, self._at(place), values[0])
        else:
            t.evaluate(w.call("void", f"hp_join{self.lanes}", t.address_of(self.output[place]), *values))

    def _tap(self, filters: Any, tap: int) -> Any:
        return self._all(self.weights[filters + tap])
