"""Forward and input gradient on a GPU: each block gathers from its tile in shared memory.

Tiles are those of `cuda_tile`. A thread reads an element once for all taps and results that use it; taps are held in
registers, all of them (`hold` = 1) or one row at a time. Sums are in float32 and always in the same order, so results
are the same bit for bit from run to run.

Arguments of the kernel: pointers to first, second, third, out. First is the input or the output's gradient, second the
weights (C, 1, KH, KW), third the bias or null.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hybridpar.codegen.cuda_writer import STORED, CudaWriter
from hybridpar.tvm_kernels.schedules.cuda_load import Places, TileWriter, image_unit
from hybridpar.tvm_kernels.schedules.cuda_tile import Tile
from hybridpar.tvm_kernels.schedules.geometry import by_input
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout


def define(
    w: CudaWriter, shape: str, direction: str, layout: str, dtype: str, parameters: dict[str, int]
) -> dict[str, Any]:
    """The kernel `rows`."""
    tile = Tile(ConvShape.parse(shape), Direction(direction), Layout(layout), dtype, parameters)
    stored = STORED[dtype]
    pointers = dict.fromkeys(("first", "second", "third", "out"), stored)
    body = _Gather(w, tile).body
    return {"rows": w.kernel("rows", pointers, tile.grid, tile.threads, body)}


class _Gather(TileWriter):
    """Writes one kernel."""

    def body(
        self,
        first: Any,
        second: Any,
        third: Any,
        out: Any,
        handles: dict[str, Any],
        block: tuple[Any, Any, Any],
        thread: Any,
    ) -> None:
        """The kernel."""
        w, t, tile = self.w, self.t, self.tile
        down, across = tile.vertical, tile.horizontal
        self.shared = w.shared(tile.input_elements, STORED[self.dtype])
        self.weights = w.shared(tile.taps * tile.channels, "float32")
        self.out = out
        at = Places(w, tile, thread)
        tile_row, tile_column = w.keep(t.floordiv(block[0], across.tiles)), w.keep(t.floormod(block[0], across.tiles))
        first_unit = w.keep(block[1] * tile.parameters["threads_c"])
        self._load_weights(second, thread, w.keep(block[1] * tile.channels))
        self._load_tile(first, thread, block[2], first_unit, tile_row, tile_column)
        w.sync()
        unit = w.keep(first_unit + at.c)
        inside = self._has(unit)
        starts = w.local(self.vector)
        for lane in range(self.vector):
            w.store(starts, lane, t.float32(0))
        if tile.direction is Direction.FORWARD:
            w.when(w.both(w.given(handles["third"]), inside), lambda: self._load_bias(third, starts, unit))
        taps = w.local(tile.taps * self.vector) if tile.parameters["hold"] else None
        if taps is not None:
            for tap in range(tile.taps):
                self._load_tap(taps, tap, tap, at.c)
        sums = w.local(down.register * across.register * self.vector)
        with t.serial(0, across.virtual) as virtual:
            column_unit = w.keep(virtual * across.threads + at.x) if across.virtual > 1 else at.x
            for index in range(down.register * across.register):
                for lane in range(self.vector):
                    w.store(sums, index * self.vector + lane, starts[lane])
            base = (at.c, at.y * down.unit_step, column_unit * across.unit_step)
            if taps is not None:
                self._all_taps(sums, taps, base)
            else:
                self._row_by_row(sums, base)
            row = w.keep(tile_row * down.tile + at.y * down.register)
            column = w.keep(tile_column * across.tile + column_unit * across.register)
            self._store(sums, block[2], unit, row, column, inside)

    def _load_weights(self, second: Any, thread: Any, channel: Any) -> None:
        """Turn the weights of the block's channels from (C, K) to (K, C)."""
        w, t, tile = self.w, self.t, self.tile
        total = tile.taps * tile.channels
        with t.serial(0, -(-total // tile.threads)) as step:
            item = w.keep(step * tile.threads + thread)
            own, tap = w.keep(t.floordiv(item, tile.taps)), t.floormod(item, tile.taps)
            inside = True if self.whole_channels else channel + own < tile.shape.channels

            def load() -> None:
                value = w.widened(self.dtype, second[channel * tile.taps + item])
                w.store(self.weights, tap * tile.channels + own, value)

            w.when(w.both(True if total % tile.threads == 0 else item < total, inside), load)

    def _load_bias(self, third: Any, starts: Any, unit: Any) -> None:
        for lane in range(self.vector):
            value = third[unit * self.vector + lane]
            self.w.store(starts, lane, self.w.widened(self.dtype, value))

    def _load_tap(self, into: Any, index: int, tap: Any, unit: Any) -> None:
        place = tap * self.tile.parameters["threads_c"] + unit
        self.w.store(into, self.w.lanes(index, self.vector), self.weights[self.w.lanes(place, self.vector)])

    def _load_row(self, row: int, base: tuple[Any, Any, Any]) -> list[list[Any]]:
        """The elements that a thread needs of one row of its tile: of each column, in order, each channel."""
        place = self.tile.horizontal.place
        return [self._load_unit(base[0], base[1] + row, base[2] + place(column)) for column, _ in self.columns]

    def _add(self, sums: Any, result_row: int, values: list[list[Any]], taps: Any, first_tap: int) -> None:
        """Add a row of elements, each times the taps that apply to it, to a row of results."""
        width = self.tile.horizontal.register
        for (_, uses), value in zip(self.columns, values, strict=True):
            for column, tap in uses:
                for lane in range(self.vector):
                    index = (result_row * width + column) * self.vector + lane
                    factor = taps[(first_tap + tap) * self.vector + lane]
                    self.w.store(sums, index, sums[index] + value[lane] * factor)

    def _all_taps(self, sums: Any, taps: Any, base: tuple[Any, Any, Any]) -> None:
        width = self.tile.shape.kernel[1]
        for row, uses in by_input(self.tile.vertical.taps):
            values = self._load_row(row, base)
            for result_row, tap_row in uses:
                self._add(sums, result_row, values, taps, tap_row * width)

    def _row_by_row(self, sums: Any, base: tuple[Any, Any, Any]) -> None:
        width = self.tile.shape.kernel[1]
        for tap_row in range(self.tile.shape.kernel[0]):
            taps = self.w.local(width * self.vector)
            for tap in range(width):
                self._load_tap(taps, tap, tap_row * width + tap, base[0])
            for result_row, own in enumerate(self.tile.vertical.taps):
                for tap, row in own:
                    if tap == tap_row:
                        self._add(sums, result_row, self._load_row(row, base), taps, 0)

    def _store(self, sums: Any, number: Any, unit: Any, row: Any, column: Any, inside: Any) -> None:
        w, tile = self.w, self.tile
        down, across = tile.vertical, tile.horizontal
        size = (down.along.out, across.along.out)
        whole = down.along.out % down.tile == 0, across.along.out % across.tile == 0
        for r in range(down.register):
            for c in range(across.register):
                y, x = w.keep(row + r), w.keep(column + c)
                exists = w.both(inside, True if whole[0] else y < size[0], True if whole[1] else x < size[1])
                index = (r * across.register + c) * self.vector
                place = image_unit(tile, number, unit, y, x, size)
                w.when(exists, partial(self._store_unit, sums, index, place))

    def _store_unit(self, sums: Any, index: int, place: Any) -> None:
        w, vector = self.w, self.vector
        narrow = w.local(vector, STORED[self.dtype])
        for lane in range(vector):
            w.store(narrow, lane, w.narrowed(self.dtype, sums[index + lane]))
        w.store(self.out, w.lanes(place, vector), narrow[w.lanes(0, vector)])
