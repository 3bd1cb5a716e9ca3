"""Forward and input gradient in channels_last: each tile of outputs is held in registers.

Level 1 is a strip of output rows of one image, which threads share out; inside, either all of a strip is done for some
channels before the next ones (its input then stays in L1), or all channels of a tile before the next tile (memory is
then read in order). Level 2 is a tile of rows x columns x lanes, SIMD over channels. An input element is read once per
tile and multiplied with every tap that applies to it.

This is TIR written out, since a schedule has no word for what it takes: a border that is split off so that each of its
tiles has just the taps that meet the image, input rows whose bounds are computed, and a range given by the caller.
Arguments of all functions: addresses (first, second, third, out, scratch), then the range (begin, end). First is the
input or the output's gradient, second the weights (C, 1, KH, KW), third the bias or 0. Scratch is float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridpar.codegen.tir_writer import Writer
from hybridpar.tvm_kernels.schedules import FAR, geometry, out_of_bounds
from hybridpar.tvm_kernels.schedules.geometry import ConvWriter, CpuTile, Span, by_input
from hybridpar.tvm_kernels.shapes import ITEM, ConvShape, Direction, KernelKey

if TYPE_CHECKING:
    from hybridpar.tvm_kernels.machine import Machine


@dataclass(frozen=True, kw_only=True)
class Tile(CpuTile):
    """The parameters; columns of outputs are held in registers, as rows are.

    Attributes:
        tile_rows: Rows of outputs held in registers.
        columns_outer: 1 if all channels of a tile come before the next tile, else 0.
        unroll: 1 if rows of taps are written out where none crosses a border.
        stream: 1 if results are written past the caches, as those above `FAR` are.
    """

    tile_rows: int
    columns_outer: int
    unroll: int
    stream: int

    def check(self, key: KernelKey) -> str | None:
        """Why these parameters make no kernel."""
        shape, direction = key.shape, key.direction
        if {self.columns_outer, self.unroll, self.stream} - {0, 1}:
            return "columns_outer, unroll and stream are 0 or 1"
        if reason := super().check(key) or out_of_bounds(self, tile_rows=geometry.MOST_IN_TILE):
            return reason
        if self.stream and not _fills_lines(key, self.lanes, self.columns_outer):
            return "only whole cache lines are written past the caches"  # a part of one costs more than all of it
        if self.strip % self.tile_rows:
            return "a strip is not made of whole tiles"
        if self.tile_rows > 1 and not self.unroll:
            return "tiles of several rows are only there with unroll=1"
        odd = self.tile_columns % shape.stride[1] or (self.unroll and self.tile_rows % shape.stride[0])
        if direction is Direction.INPUT_GRADIENT and odd:
            return "a tile is no multiple of the stride"
        if self.written_out(shape, direction) > 4 * geometry.MOST_WRITTEN_OUT:
            return "too much would be written out"
        return None

    def written_out(self, shape: ConvShape, direction: Direction) -> int:
        """Multiply-adds of one tile that are not in a loop, in vectors of all lanes."""
        skipped = shape.stride[0] * shape.stride[1] if direction is Direction.INPUT_GRADIENT else 1
        rows = self.tile_rows * shape.kernel[0] if self.unroll else 1
        return rows * self.tile_columns * shape.kernel[1] // skipped


def _fills_lines(key: KernelKey, lanes: int, columns_outer: int) -> bool:
    """Whether stores are cache lines, or halves that are soon followed by the others."""
    part = geometry.LINE // (2 if columns_outer else 1)
    return lanes * ITEM[key.dtype] % part == 0 and key.shape.channels % lanes == 0


def default(_: ConvShape) -> dict[str, int]:
    """What is good on many CPUs; the candidate that is most like it is taken."""
    tile = {"lanes": 16, "tile_rows": 1, "tile_columns": 4, "strip": 4}
    return {**tile, "columns_outer": 1, "unroll": 1, "sweep": 1}


def candidates(key: KernelKey, machine: Machine) -> Iterator[dict[str, int]]:
    """Parameters that fit the registers of a CPU and give each thread enough to do."""
    shape, direction = key.shape, key.direction
    height, width = (geometry.axis(shape, direction, which).out for which in (0, 1))
    # Of such a result most has left the caches before it is read again, however it was written.
    large = ITEM[key.dtype] * shape.batch * shape.channels * height * width > FAR
    # Of float32 the records say 0 everywhere.
    orders = (0,) if key.dtype == "float32" else (0, 1)
    lanes_to_try, columns_to_try = geometry.lanes_to_try(key, machine), range(1, min(width, 16) + 1)
    tiles = itertools.product(lanes_to_try, range(1, 5), columns_to_try, (0, 1), orders)
    for lanes, rows, columns, unroll, outer in tiles:
        vectors = -(-lanes // machine.lanes)
        sums = rows * columns * vectors
        # At least one register is for an input and one for a tap; too few sums wait for each other.
        if sums + 2 * vectors > machine.registers or (sums < 4 and columns < width) or rows > height:
            continue
        tile = {"lanes": lanes, "tile_rows": rows, "tile_columns": columns, "columns_outer": outer, "unroll": unroll}
        tile |= {"stream": int(large and _fills_lines(key, lanes, outer))}
        if Tile(**tile, strip=rows).written_out(shape, direction) > geometry.MOST_WRITTEN_OUT:
            continue
        for strip in sorted({rows, *(-(-rows_of // rows) * rows for rows_of in (4, 8, 16, height))}):
            units = shape.batch * -(-height // strip)
            if strip < height + rows and (units >= key.threads or strip == rows):
                yield from (tile | {"strip": strip} | sweep for sweep in geometry.sweeps_to_try(key, height, strip))


def define(w: Writer, shape: str, direction: str, dtype: str, parameters: dict[str, int]) -> dict[str, Any]:
    """The functions of one kernel: `prepare` turns the weights, `rows` computes strips."""
    kernel = Gather(w, ConvShape.parse(shape), Direction(direction), Tile(**parameters), dtype)
    return kernel.functions(prepare=kernel.prepare, rows=kernel.rows)


def work(key: KernelKey, parameters: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """How far the ranges of the functions go, in the order in which these run, and the bytes of scratch memory."""
    shape = key.shape
    units = shape.batch * -(-geometry.axis(shape, key.direction, 0).out // parameters["strip"])
    ranges = {"prepare": -(-shape.channels // geometry.PREPARED), "rows": units}
    return ranges, 4 * (shape.kernel[0] * shape.kernel[1] + 1) * shape.channels


class Gather(ConvWriter):
    """Writes one kernel."""

    def __init__(self, w: Writer, shape: ConvShape, direction: Direction, tile: Tile, dtype: str) -> None:
        super().__init__(w, shape, direction, tile, dtype)
        self.tile_rows = tile.tile_rows
        self.stream, self.columns_outer = tile.stream, tile.columns_outer
        self.inner = geometry.interior(self.vertical, self.tile_rows) if tile.unroll else None

    def prepare(self, second: Any, third: Any, scratch: Any, begin: Any, end: Any, **_: Any) -> None:
        """Write the transpose of the weights, from (C, K) to (K, C), and the bias behind it into scratch memory."""
        w, t, channels = self.w, self.t, self.shape.channels
        transpose = w.view(scratch, "float32")
        weights, bias = self._views(second, third)
        with t.serial(begin, end) as block:
            first = w.keep(block * geometry.PREPARED)
            with t.serial(first, t.min(first + geometry.PREPARED, t.int64(channels))) as channel:
                index = channel
                if self.in_halves:
                    half = w.keep(t.floordiv(channel, t.int64(2)))
                    index = w.keep(half + (channel - half * 2) * (channels // 2))
                with t.serial(t.int64(0), t.int64(self.taps)) as tap:
                    w.store(transpose, tap * channels + index, self._wide(weights[channel * self.taps + tap]))
                if self.bias:
                    index = w.keep(index + self.taps * channels)
                    w.either(
                        third == t.int64(0),
                        lambda: w.store(transpose, index, t.float32(0)),
                        lambda: w.store(transpose, index, self._wide(bias[channel])),
                    )

    def _wide(self, value: Any) -> Any:
        """One value of a tensor as float32."""
        if self.stored == "float32":
            return value
        bits = self.t.shift_left(self.t.Cast("uint32", value), self.t.uint32(16))
        return self.t.reinterpret("float32", bits)

    def rows(self, first: Any, out: Any, scratch: Any, begin: Any, end: Any, **_: Any) -> None:
        """Compute strips of output rows."""
        w, t = self.w, self.t
        self.input, self.output = self._views(first, out)
        self.weights = w.view(scratch, "float32")
        strips = -(-self.vertical.out // self.strip)
        with t.serial(begin, end) as item:
            image = w.keep(t.floordiv(item, t.int64(strips)))
            top = w.keep((item - image * strips) * self.strip)
            bottom = w.keep(t.min(top + self.strip, t.int64(self.vertical.out)))
            if self.sweep:  # what the strip before has not read
                none = t.int64(0)
                rows = (self.vertical.end(row, t) for row in (top, bottom))
                self._sweep(self.input, *(w.keep(self._input_at(image, row, none, none)) for row in rows))
            if self.columns_outer:
                for row in self._tile_rows(top, bottom):
                    for span, moved in self._tile_columns():
                        for channel in self._blocks():
                            self._tile(image, row, bottom, span, moved, channel)
            else:
                for channel in self._blocks():
                    for row in self._tile_rows(top, bottom):
                        for span, moved in self._tile_columns():
                            self._tile(image, row, bottom, span, moved, channel)
        if self.stream:
            t.evaluate(w.call("int32", "hp_fence"))

    # Each of the next three writes a loop around what its caller writes next, or several where their parts differ.

    def _blocks(self) -> Iterator[Any]:
        """First channels of blocks of lanes; the last block reaches back where channels do not fill it."""
        t, blocks = self.t, -(-self.shape.channels // self.lanes)
        if blocks == 1:
            yield t.int64(0)
            return
        with t.serial(t.int64(0), t.int64(blocks)) as block:
            yield self._channel(block)

    def _tile_rows(self, top: Any, bottom: Any) -> Iterator[Any]:
        """First rows of a strip's tiles."""
        t = self.t
        if self.strip == self.tile_rows:
            yield top
            return
        count = t.floordiv(bottom - top + (self.tile_rows - 1), t.int64(self.tile_rows))
        with t.serial(t.int64(0), self.w.keep(count)) as index:
            yield self.w.keep(top + index * self.tile_rows)

    def _tile_columns(self) -> Iterator[tuple[Span, Any]]:
        """Tiles of a row: which kind, and how many of that kind lie before it."""
        t = self.t
        for span in self.columns:
            if span.count == 1:
                yield span, t.int64(0)
            else:
                with t.serial(t.int64(0), t.int64(span.count)) as index:
                    yield span, self.w.keep(index)

    # ------------------------------------------------------------------------------------------------------- the tile

    def _tile(self, image: Any, row: Any, bottom: Any, span: Span, moved: Any, channel: Any) -> None:
        """One tile: all taps written out where no row of taps crosses a border, else row by row."""
        w, t = self.w, self.t

        def apart() -> None:
            if self.tile_rows == 1:
                self._row(image, row, span, moved, channel)
                return
            with t.serial(row, t.min(row + self.tile_rows, bottom)) as one:
                self._row(image, w.keep(one), span, moved, channel)

        inner = self.inner
        if inner is None:
            apart()
        elif inner.count * inner.width == self.vertical.out:
            self._whole(image, row, span, moved, channel)
        else:
            inside = t.And(row >= t.int64(inner.start), row < t.int64(inner.start + inner.count * inner.width))
            w.either(inside, lambda: self._whole(image, row, span, moved, channel), apart)

    def _whole(self, image: Any, row: Any, span: Span, moved: Any, channel: Any) -> None:
        """A tile whose taps cross no border above or below, all of it written out."""
        w, t = self.w, self.t
        inner = self.inner
        assert inner is not None
        along = self.vertical
        # Where the tile's input begins, as if the first tile of the run were at row 0 of the input.
        steps = row - inner.start
        origin = t.floordiv(steps, t.int64(along.stride)) if along.transposed else steps * along.stride
        base = w.keep(self._input_at(image, origin, moved * self.shift, channel))
        sums = {(r, c): self._start(channel) for r in range(inner.width) for c in range(span.width)}
        for input_row, row_uses in by_input(inner.taps):
            taps: dict[tuple[int, int], Any] = {}
            for input_column, column_uses in by_input(span.taps):
                value = w.keep(self._load(self.input, base + self._offset(input_row, input_column)))
                for r, row_tap in row_uses:
                    for c, column_tap in column_uses:
                        tap = (row_tap, column_tap)
                        if tap not in taps:
                            taps[tap] = w.keep(self._tap(t.int64(row_tap), column_tap, channel))
                        sums[r, c] = w.keep(sums[r, c] + value * taps[tap])
        at = w.keep(self._output_at(image, row, moved * span.width + span.start, channel))
        for (r, c), total in sums.items():
            self._store(at + (r * self.horizontal.out + c) * self.pixel, total)

    def _row(self, image: Any, row: Any, span: Span, moved: Any, channel: Any) -> None:
        """One row of a tile, with a loop over the rows of taps that meet the image."""
        w, t, lanes = self.w, self.t, self.lanes
        sums = w.local(span.width * lanes, "float32")
        for c in range(span.width):
            w.store(sums, self._at(t.int64(c * lanes)), self._start(channel))
        low, high, tap_of, place_of = self._bounds(row)
        with t.serial(low, high) as step:
            tap = w.keep(tap_of(step))
            base = w.keep(self._input_at(image, place_of(step), moved * self.shift, channel))
            new = [sums[self._at(t.int64(c * lanes))] for c in range(span.width)]
            taps: dict[int, Any] = {}
            for input_column, uses in by_input(span.taps):
                value = w.keep(self._load(self.input, base + self._offset(0, input_column)))
                for c, column_tap in uses:
                    if column_tap not in taps:
                        taps[column_tap] = w.keep(self._tap(tap, column_tap, channel))
                    new[c] = w.keep(new[c] + value * taps[column_tap])
            for c, total in enumerate(new):
                w.store(sums, self._at(t.int64(c * lanes)), total)
        at = w.keep(self._output_at(image, row, moved * span.width + span.start, channel))
        for c in range(span.width):
            self._store(at + c * self.pixel, sums[self._at(t.int64(c * lanes))])

    def _bounds(self, row: Any) -> tuple[Any, Any, Callable[[Any], Any], Callable[[Any], Any]]:
        """The loop over taps of an output row: from, to, and of a step the tap and the input row."""
        w, t, along = self.w, self.t, self.vertical
        none, d = t.int64(0), along.dilation
        if not along.transposed:
            first = w.keep(row * along.stride - along.padding)
            low = t.floordiv(t.max(none, d - 1 - first), t.int64(d))
            high = t.min(t.int64(along.taps), t.floordiv(t.max(none, along.size - 1 - first + d), t.int64(d)))
            return w.keep(low), w.keep(high), lambda step: step, lambda step: first + step * d
        # Every `stride`-th tap meets an input row, which is `dilation` rows higher for each; one of the two is 1.
        place = w.keep(t.floordiv(row + along.padding, t.int64(along.stride)))
        phase = w.keep(row + along.padding - place * along.stride)
        low = t.floordiv(t.max(none, place - (along.size - 1) + (d - 1)), t.int64(d))
        most = t.floordiv(along.taps - 1 - phase + along.stride, t.int64(along.stride))
        high = t.min(most, t.floordiv(place, t.int64(d)) + 1)
        return w.keep(low), w.keep(high), lambda step: phase + step * along.stride, lambda step: place - step * d

    # ------------------------------------------------------------------------------------------------- what memory is

    def _store(self, start: Any, value: Any) -> None:
        w, value = self.w, self._narrow(value)
        if self.stream:
            place = self.t.address_of(self.output[start])
            self.t.evaluate(w.call("void", "hp_past", place, value))
        else:
            w.store(self.output, self._at(start), value)

    def _input_at(self, image: Any, row: Any, column: Any, channel: Any) -> Any:
        return ((image * self.vertical.size + row) * self.horizontal.size + column) * self.pixel + channel

    def _offset(self, row: int, column: int) -> int:
        return (row * self.horizontal.size + column) * self.pixel

    def _output_at(self, image: Any, row: Any, column: Any, channel: Any) -> Any:
        return ((image * self.vertical.out + row) * self.horizontal.out + column) * self.pixel + channel

    def _tap(self, row: Any, column: int, channel: Any) -> Any:
        return self._prepared(row * self.shape.kernel[1] + column, channel)

    def _prepared(self, row: Any, channel: Any) -> Any:
        """A vector of a row of scratch memory, in the order that vectors of a tensor have in registers."""
        t, channels = self.t, self.shape.channels
        if not self.in_halves:
            return self.weights[self._at(row * channels + channel)]
        start, some = row * channels + t.floordiv(channel, t.int64(2)), self.lanes // 2
        halves = (self.weights[t.ramp(start + half, 1, some)] for half in (0, channels // 2))
        return self.w.call(self._vector("float32"), "hp_join", *halves)

    def _start(self, channel: Any) -> Any:
        """What a sum starts from: the bias, or zero."""
        if self.bias:
            return self.w.keep(self._prepared(self.taps, channel))
        return self.w.keep(self._all(self.t.float32(0)))
