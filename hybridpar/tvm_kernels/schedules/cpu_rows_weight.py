"""The weight gradient of contiguous images: a sum per tap over rows, with SIMD over columns.

Level 1 is a strip of rows of one plane, whose input is copied into a padded tile in L1 that has the border (`planes`).
Level 2 is a group of taps, each with a vector of sums in registers, and some rows of the gradient that pass by at a
time: a value of the input is read once and multiplied with every row of the gradient that uses it. Sums stay vectors
over all images and are added up lane by lane once, at the end. The last vector of a row reaches back with what was
counted set to zero.

The work is cut into parts of images times groups of channels, each with a padded tile of its own in the scratch, which
threads share out. Each part leaves sums of its own and `merge` adds them in order, so the result does not depend on how
many threads there are. Arguments of all functions: addresses (first, second, third, out, scratch), then the range
(begin, end). First is the input, second the output's gradient, third is not used, out is the gradient (C, 1, KH, KW).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridpar.codegen.tir_writer import Writer
from hybridpar.tvm_kernels.schedules.geometry import ConvWriter, functions_of, pieces, share
from hybridpar.tvm_kernels.schedules.planes import empty, fill, padded_tile, shuffles, whole_lines
from hybridpar.tvm_kernels.shapes import ConvShape, Direction

#: No pass that turns schedules into loops is needed.
WRITTEN_OUT = True

#: Vectors of a row of the gradient that are gone through without a loop.
_WRITTEN_OUT = 4


def define(w: Writer, shape: str, direction: str, parameters: dict[str, int]) -> dict[str, Any]:
    """The functions of one kernel: `planes` makes the sums of parts, `merge` adds them up.

    Args:
        w: Writes them.
        shape: As `ConvShape.text`.
        direction: The weight gradient.
        parameters: lanes, tap_rows, tap_columns, tile_rows, strip, parts and groups.

    Returns:
        Functions of TIR by name.
    """
    assert Direction(direction) is Direction.WEIGHT_GRADIENT
    kernel = _RowsWeight(w, ConvShape.parse(shape), parameters)
    return functions_of(w, {"planes": kernel.planes, "merge": kernel.merge})


class _RowsWeight(ConvWriter):
    """Writes one kernel."""

    def __init__(self, w: Writer, shape: ConvShape, parameters: Mapping[str, int]) -> None:
        super().__init__(w, shape, Direction.WEIGHT_GRADIENT, parameters["lanes"])
        self.tap_rows, self.tap_columns = parameters["tap_rows"], parameters["tap_columns"]
        self.tile_rows, self.parts, self.groups = (parameters[one] for one in ("tile_rows", "parts", "groups"))
        self.strip = min(parameters["strip"], shape.out_height)
        self.padded = padded_tile(self.vertical, self.horizontal, self.strip)
        #: Floats of one part's sums; padded tiles lie behind those of all parts.
        self.sums = shape.channels * self.taps * self.lanes
        self.first_padded = whole_lines(self.parts * self.sums)

    def planes(self, first: Any, second: Any, scratch: Any, begin: Any, end: Any, **_: Any) -> None:
        """Make the sums of parts; the range counts groups of channels within parts."""
        w, t, shape = self.w, self.t, self.shape
        self.input, self.gradient, self.memory = self._views(first, second, scratch)
        with t.attr(0, "pragma_import_llvm", w.tvm.ir.StringImm(shuffles(self.lanes))):
            with t.serial(begin, end) as item:
                part = w.keep(t.floordiv(item, t.int64(self.groups)))
                group = w.keep(item - part * self.groups)
                low, high = share(w, group, shape.channels, self.groups)
                sums = w.keep(part * self.sums)
                each = self.taps * self.lanes
                with t.serial(low * each, high * each) as index:
                    w.store(self.memory, sums + index, t.float32(0))
                self.own = w.keep(self.first_padded + item * self.padded.places)
                empty(w, self.memory, self.own, self.padded.places)
                from_image, to_image = share(w, part, shape.batch, self.parts)
                with t.serial(from_image, to_image) as image:
                    with t.serial(low, high) as channel:
                        self._plane(w.keep(image * shape.channels + channel), w.keep(sums + channel * each))

    def merge(self, out: Any, scratch: Any, begin: Any, end: Any, **_: Any) -> None:
        """Add up the sums of all parts, then their lanes; the range counts channels."""
        w, t, lanes = self.w, self.t, self.lanes
        memory, result = self._views(scratch, out)
        total = w.local(lanes, "float32")
        whole = t.ramp(t.int64(0), 1, lanes)
        with t.serial(begin * self.taps, end * self.taps) as tap:
            w.store(total, whole, memory[t.ramp(tap * lanes, 1, lanes)])
            with t.serial(t.int64(1), t.int64(self.parts)) as part:
                more = memory[t.ramp(tap * lanes + part * self.sums, 1, lanes)]
                w.store(total, whole, total[whole] + more)
            w.store(result, tap, w.folded(total, lambda left, right: left + right, lanes))

    # -------------------------------------------------------------------------------------------------------- a plane

    def _plane(self, plane: Any, sums: Any) -> None:
        """All strips of one plane."""
        w, shape, padded = self.w, self.shape, self.padded
        image = w.keep(plane * (shape.height * shape.width))
        gradient = w.keep(plane * (shape.out_height * shape.out_width))
        for top, rows in pieces(w, shape.out_height, self.strip):
            first = w.keep(top * self.vertical.stride + padded.first)
            fill(w, self.input, image, self.memory, self.own, padded, shape.height, shape.width, first, self.lanes)
            self._strip(w.keep(gradient + top * shape.out_width), rows, sums)

    def _strip(self, gradient: Any, rows: int, sums: Any) -> None:
        """All taps, group by group."""
        tall, wide = self.shape.kernel
        for start in range(0, wide, self.tap_columns):
            columns = range(start, min(start + self.tap_columns, wide))
            for tap, count in pieces(self.w, tall, self.tap_rows):
                self._group(gradient, rows, sums, tap, count, columns)

    def _group(self, gradient: Any, rows: int, sums: Any, tap: Any, count: int, columns: range) -> None:
        """A group of taps over all rows of a strip; its sums are held in registers meanwhile."""
        w, t, lanes, wide = self.w, self.t, self.lanes, self.shape.kernel[1]
        held = w.local(count * len(columns) * lanes, "float32")
        places = {
            (r, column): t.ramp(t.int64((r * len(columns) + index) * lanes), 1, lanes)
            for r in range(count)
            for index, column in enumerate(columns)
        }

        def memory(r: int, column: int) -> Any:
            return t.ramp(sums + ((tap + r) * wide + column) * lanes, 1, lanes)

        for key, place in places.items():
            w.store(held, place, self.memory[memory(*key)])
        base = w.keep(self.own + tap * (self.vertical.dilation * self.padded.pitch))
        for row, size in pieces(w, rows, self.tile_rows):
            x = w.keep(base + row * (self.vertical.stride * self.padded.pitch))
            self._tile(held, places, x, w.keep(gradient + row * self.shape.out_width), size)
        for key, place in places.items():
            w.store(self.memory, memory(*key), held[place])

    def _tile(self, held: Any, places: dict[tuple[int, int], Any], x: Any, g: Any, size: int) -> None:
        """Some rows of the gradient, all their columns."""
        w, t, lanes, width = self.w, self.t, self.lanes, self.shape.out_width
        whole, rest = divmod(width, lanes)
        if whole > _WRITTEN_OUT:
            with t.serial(t.int64(0), t.int64(whole)) as index:
                start = w.keep(index * lanes)
                self._vector(held, places, w.keep(x + start), w.keep(g + start), size, 0)
        else:
            for index in range(whole):
                self._vector(held, places, x + index * lanes, g + index * lanes, size, 0)
        if rest:
            start = width - lanes
            self._vector(held, places, x + start, g + start, size, lanes - rest)

    def _vector(self, held: Any, places: dict[tuple[int, int], Any], x: Any, g: Any, size: int, counted: int) -> None:
        """A vector of columns of some rows of the gradient; the first ones may have been counted before."""
        w, t, lanes, padded = self.w, self.t, self.lanes, self.padded
        gradients = []
        for row in range(size):
            value = self.gradient[t.ramp(g + row * self.shape.out_width, 1, lanes)]
            if counted:
                fresh = t.ramp(t.int32(0), 1, lanes) >= t.broadcast(t.int32(counted), lanes)
                value = t.Select(fresh, value, t.broadcast(t.float32(0), lanes))
            gradients.append(w.keep(value))
        # Rows of the padded tile, each with the (row of the gradient, row of taps) that use it.
        joined: dict[int, list[tuple[int, int]]] = {}
        for row in range(size):
            for r in sorted({r for r, _ in places}):
                joined.setdefault(row * self.vertical.stride + r * self.vertical.dilation, []).append((row, r))
        new = {key: held[place] for key, place in places.items()}
        start = self.horizontal.unbounded(0)
        for down, pairs in sorted(joined.items()):
            for column in sorted({column for _, column in places}):
                at = x + (down * padded.pitch + padded.at(start[column][1]))
                value = w.keep(self.memory[t.ramp(at, 1, lanes)])
                for row, r in pairs:
                    new[r, column] = w.keep(new[r, column] + value * gradients[row])
        for key, total in new.items():
            w.store(held, places[key], total)
