"""The weight gradient in channels_last: sums of some taps stay in registers while images are read.

Level 1 is a strip of output rows, small enough that input and gradient of some lanes stay in L1 while each group of
taps passes over them. Level 2 is that group: taps x lanes sums in registers, and some columns of the gradient.

The work is cut into parts (of images and strips) times groups of channels, which threads share out. Each part leaves
sums of its own and `merge` adds them in order, so the result does not depend on how many threads there are.

This is TIR written out, since a schedule has no word for what it takes: a border that is split off so that its columns
have just the taps that meet the image, rows whose bounds are computed, and a range given by the caller.
Arguments of all functions: addresses (first, second, third, out, scratch), then the range (begin, end). First is the
input, second the output's gradient, third is not used, out is the gradient (C, 1, KH, KW).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridpar.codegen.tir_writer import Writer
from hybridpar.tvm_kernels.schedules import geometry, out_of_bounds
from hybridpar.tvm_kernels.schedules.geometry import ConvWriter, CpuTile, Span, by_input
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey

if TYPE_CHECKING:
    from hybridpar.tvm_kernels.machine import Machine


@dataclass(frozen=True, kw_only=True)
class Tile(CpuTile):
    """The parameters; columns of the gradient pass by some at a time.

    Attributes:
        tap_rows: Rows of taps whose sums are held in registers.
        tap_columns: Columns of them.
        parts: Units of work by images and strips.
        groups: Units of work by channels.
    """

    tap_rows: int
    tap_columns: int
    parts: int
    groups: int

    def check(self, key: KernelKey) -> str | None:
        """Why these parameters make no kernel."""
        if reason := super().check(key):
            return reason
        shape = key.shape
        bounds = {"tap_rows": shape.kernel[0], "tap_columns": shape.kernel[1]}
        bounds |= {"parts": shape.batch * -(-shape.out_height // self.strip)}
        bounds |= {"groups": -(-shape.channels // self.lanes)}
        if reason := out_of_bounds(self, **bounds):
            return reason
        written_out = self.tap_rows * shape.kernel[1] * self.tile_columns
        return "too much would be written out" if written_out > 4 * geometry.MOST_WRITTEN_OUT else None


def default(shape: ConvShape) -> dict[str, int]:
    """What is good on many CPUs; the candidate that is most like it is taken."""
    return {"lanes": 16, "tap_rows": shape.kernel[0], "tile_columns": 4, "strip": 4, "sweep": 1}


def candidates(key: KernelKey, machine: Machine) -> Iterator[dict[str, int]]:
    """Parameters that fit the registers of a CPU and give each thread enough to do."""
    shape = key.shape
    tall, wide = shape.kernel
    most = machine.registers - 2
    for lanes in geometry.lanes_to_try(key, machine):
        vectors = -(-lanes // machine.lanes)
        tap_columns = min(wide, most // vectors)  # all of a row, where they fit into registers
        blocks = -(-shape.channels // lanes)
        for tap_rows, columns in itertools.product(range(1, min(tall, 4) + 1), range(1, min(shape.out_width, 14) + 1)):
            if tap_rows * tap_columns * vectors > most or tap_rows * columns * tap_columns > geometry.MOST_WRITTEN_OUT:
                continue
            tile = {"lanes": lanes, "tap_rows": tap_rows, "tap_columns": tap_columns, "tile_columns": columns}
            for strip in sorted({rows for rows in (1, 2, 4, 8, 16) if rows < shape.out_height} | {shape.out_height}):
                for parts, groups in _units(key.threads, shape.batch * -(-shape.out_height // strip), blocks):
                    cut = {"strip": strip, "parts": parts, "groups": groups}
                    yield from (tile | cut | sweep for sweep in geometry.sweeps_to_try(key, shape.out_height, strip))


def _units(threads: int, parts: int, groups: int) -> list[tuple[int, int]]:
    """Ways to cut the work for some threads, into at most so many parts and groups; in one where that cannot be."""
    if threads == 1:
        return [(1, 1)]
    ways = [(threads, 1), (2 * threads, 1), (1, threads)]
    return [way for way in ways if way[0] <= parts and way[1] <= groups] or [(min(threads, parts), 1)]


def define(w: Writer, shape: str, direction: str, dtype: str, parameters: dict[str, int]) -> dict[str, Any]:
    """The functions of one kernel: `rows` makes the sums of parts, `merge` adds them up."""
    assert Direction(direction) is Direction.WEIGHT_GRADIENT
    kernel = Weight(w, ConvShape.parse(shape), Tile(**parameters), dtype)
    return kernel.functions(rows=kernel.rows, merge=kernel.merge)


def work(key: KernelKey, parameters: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """How far the ranges of the functions go, in the order in which these run, and the bytes of scratch memory."""
    shape = key.shape
    blocks = -(-shape.channels // parameters["lanes"])
    ranges = {"rows": parameters["parts"] * parameters["groups"], "merge": blocks}
    return ranges, 4 * parameters["parts"] * shape.kernel[0] * shape.kernel[1] * blocks * parameters["lanes"]


class Weight(ConvWriter):
    """Writes one kernel."""

    def __init__(self, w: Writer, shape: ConvShape, tile: Tile, dtype: str) -> None:
        super().__init__(w, shape, Direction.WEIGHT_GRADIENT, tile, dtype)
        self.tile, self.parts, self.groups = tile, tile.parts, tile.groups
        self.blocks = -(-shape.channels // self.lanes)
        self.pitch = self.blocks * self.lanes

    def rows(self, first: Any, second: Any, scratch: Any, begin: Any, end: Any, **_: Any) -> None:
        """Write the sums of parts into scratch memory."""
        w, t = self.w, self.t
        self.input, self.gradient = self._views(first, second)
        self.sums = w.view(scratch, "float32")
        strips = -(-self.vertical.out // self.strip)
        total = self.shape.batch * strips
        with t.serial(begin, end) as item:
            part = w.keep(t.floordiv(item, t.int64(self.groups)))
            group = w.keep(item - part * self.groups)
            base = w.keep(part * (self.taps * self.pitch))
            low, high = geometry.share(w, group, self.blocks, self.groups)
            with t.serial(t.int64(0), t.int64(self.taps)) as tap:
                with t.serial(low, high) as block:
                    w.store(self.sums, self._at(base + tap * self.pitch + block * self.lanes), self._all(t.float32(0)))
            from_strip, to_strip = geometry.share(w, part, total, self.parts)
            with t.serial(from_strip, to_strip) as index:
                image = w.keep(t.floordiv(index, t.int64(strips)))
                top = w.keep((index - image * strips) * self.strip)
                bottom = w.keep(t.min(top + self.strip, t.int64(self.vertical.out)))
                if self.sweep:  # what the strip before has not read
                    none = t.int64(0)
                    rows = (self.vertical.end(row, t) for row in (top, bottom))
                    self._sweep(self.input, *(w.keep(self._input_at(image, row, none)) for row in rows))
                    self._sweep(self.gradient, *(w.keep(self._gradient_at(image, row, none)) for row in (top, bottom)))
                with t.serial(low, high) as block:
                    self._strip(image, top, bottom, block, base)

    def merge(self, out: Any, scratch: Any, begin: Any, end: Any, **_: Any) -> None:
        """Add the sums of all parts."""
        w, t, lanes = self.w, self.t, self.lanes
        sums, (result,) = w.view(scratch, "float32"), self._views(out)
        total, rounded = w.local(lanes, "float32"), w.local(lanes, self.stored)
        vector = self._at(t.int64(0))
        with t.serial(begin, end) as block:
            channel = self._channel(block)
            with t.serial(t.int64(0), t.int64(self.taps)) as tap:
                index = w.keep(tap * self.pitch + block * lanes)
                w.store(total, vector, sums[self._at(index)])
                with t.serial(t.int64(1), t.int64(self.parts)) as part:
                    w.store(
                        total,
                        vector,
                        total[vector] + sums[self._at(index + part * (self.taps * self.pitch))],
                    )
                w.store(rounded, vector, self._narrow(total[vector]))
                with t.serial(t.int64(0), t.int64(lanes)) as lane:
                    w.store(result, (channel + lane) * self.taps + tap, rounded[lane])

    # -------------------------------------------------------------------------------------------------------- a strip

    def _strip(self, image: Any, top: Any, bottom: Any, block: Any, base: Any) -> None:
        """All taps of one strip and one block of lanes."""
        tall, wide = self.shape.kernel
        channel = self._channel(block)
        for start in range(0, wide, self.tile.tap_columns):
            columns = range(start, min(start + self.tile.tap_columns, wide))
            for tap, count in geometry.pieces(self.w, tall, self.tile.tap_rows):
                self._taps(image, top, bottom, channel, base + block * self.lanes, tap, count, columns)

    def _taps(
        self, image: Any, top: Any, bottom: Any, channel: Any, sums: Any, tap: Any, count: int, columns: range
    ) -> None:
        """Some rows of taps: together where all meet the image, else each on its own."""
        w, t = self.w, self.t
        (low, _), (_, last_high) = self._bounds(tap), self._bounds(tap + (count - 1))
        joint = w.keep(t.min(t.max(low, top), bottom))
        joint_end = w.keep(t.max(joint, t.min(last_high, bottom)))
        together = [(joint, joint_end)]
        w.when(joint < joint_end, lambda: self._accumulate(image, together, channel, sums, tap, count, columns))
        if count == 1:
            return

        def apart() -> None:
            with t.serial(tap, tap + count) as row:
                low, high = self._bounds(row)
                before = (w.keep(t.max(top, low)), w.keep(t.min(joint, high)))
                behind = (w.keep(t.max(joint_end, low)), w.keep(t.min(bottom, high)))
                self._accumulate(image, [before, behind], channel, sums, row, 1, columns)

        w.when(t.Or(top < joint, joint_end < bottom), apart)

    def _bounds(self, tap: Any) -> tuple[Any, Any]:
        """Output rows for which a row of taps lies in the image: from, to."""
        t, along = self.t, self.vertical
        offset = self.w.keep(along.padding - tap * along.dilation)
        stride = t.int64(along.stride)
        low = t.floordiv(t.max(offset, t.int64(0)) + (along.stride - 1), stride)
        high = t.min(t.int64(along.out), t.floordiv(t.max(along.size - 1 + offset + along.stride, t.int64(0)), stride))
        return self.w.keep(low), self.w.keep(high)

    def _accumulate(
        self, image: Any, bounds: list[tuple[Any, Any]], channel: Any, sums: Any, tap: Any, count: int, columns: range
    ) -> None:
        """Add output rows to the sums of some taps, which are held in registers meanwhile."""
        w, t, lanes, shape = self.w, self.t, self.lanes, self.shape
        held = w.local(count * len(columns) * lanes, "float32")
        sums_of = {
            (r, column): (self._at(t.int64((r * len(columns) + number) * lanes)), r * shape.kernel[1] + column)
            for r in range(count)
            for number, column in enumerate(columns)
        }

        def memory(offset: int) -> Any:
            return self._at(sums + (tap * shape.kernel[1] + offset) * self.pitch)

        for index, offset in sums_of.values():
            w.store(held, index, self.sums[memory(offset)])

        for low, high in bounds:
            with t.serial(low, high) as out_row:
                first = w.keep(out_row * self.vertical.stride - self.vertical.padding + tap * self.vertical.dilation)
                x = w.keep(self._input_at(image, first, channel))
                g = w.keep(self._gradient_at(image, out_row, channel))
                for span in self.columns:
                    if span.count == 1:
                        self._columns(held, sums_of, span, x, g + span.start * self.pixel, count)
                    else:
                        with t.serial(t.int64(0), t.int64(span.count)) as index:
                            tile_x = w.keep(x + index * (self.shift * self.pixel))
                            tile_g = w.keep(g + (index * span.width + span.start) * self.pixel)
                            self._columns(held, sums_of, span, tile_x, tile_g, count)
        for index, offset in sums_of.values():
            w.store(self.sums, memory(offset), held[index])

    def _columns(
        self, held: Any, sums_of: dict[tuple[int, int], tuple[Any, int]], span: Span, x: Any, g: Any, count: int
    ) -> None:
        """A tile of columns of one output row."""
        w, shape = self.w, self.shape
        gradients: dict[int, Any] = {}
        new: dict[tuple[int, int], Any] = {}
        down = self.vertical.dilation * shape.width
        for r in range(count):
            for column, uses in by_input(span.taps):
                wanted = [(out, tap) for out, tap in uses if (r, tap) in sums_of]
                if not wanted:
                    continue
                value = w.keep(self._load(self.input, x + (r * down + column) * self.pixel))
                for out, tap in wanted:
                    if out not in gradients:
                        gradients[out] = w.keep(self._load(self.gradient, g + out * self.pixel))
                    before = new[r, tap] if (r, tap) in new else held[sums_of[r, tap][0]]
                    new[r, tap] = w.keep(before + value * gradients[out])
        for key, total in new.items():
            w.store(held, sums_of[key][0], total)

    # ------------------------------------------------------------------------------------------------- what memory is

    def _input_at(self, image: Any, row: Any, channel: Any) -> Any:
        return (image * self.shape.height + row) * (self.shape.width * self.pixel) + channel

    def _gradient_at(self, image: Any, row: Any, channel: Any) -> Any:
        return (image * self.shape.out_height + row) * (self.shape.out_width * self.pixel) + channel
