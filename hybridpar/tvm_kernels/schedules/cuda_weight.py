"""The weight gradient on a GPU: blocks sum up tiles of all images side by side, then the sums are added.

Tiles are those of `cuda_tile`. The tiles of all images are dealt out to `parts` blocks for each group of channels, so
there are enough blocks for few channels too. A thread keeps sums of `tap_rows` x KW taps in registers over all tiles of
its block; then lanes and threads of the same channel add theirs, and the block writes them down (`rows`). The second
kernel adds the parts (`merge`). All of it is in float32 and always in the same order, so the result is the same bit for
bit from run to run.

Arguments of `rows`: pointers to first, second, third, out: input, output's gradient, null, and float32 for the sums,
(parts, C, KH, KW). Of `merge`: those sums, and the gradient of the weights (C, 1, KH, KW).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hybridpar.codegen.cuda_writer import STORED, CudaWriter
from hybridpar.tvm_kernels.schedules.cuda_load import Places, TileWriter, image_unit
from hybridpar.tvm_kernels.schedules.cuda_tile import WARP, Tile
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

#: Of `merge`: weights of a block, and threads that share the parts of each.
MERGE_THREADS, MERGE_PARTS = 32, 8


def define(
    w: CudaWriter, shape: str, direction: str, layout: str, dtype: str, parameters: dict[str, int]
) -> dict[str, Any]:
    """The kernels `rows` and `merge`."""
    tile = Tile(ConvShape.parse(shape), Direction(direction), Layout(layout), dtype, parameters)
    writes = _Weight(w, tile)
    stored = STORED[dtype]
    pointers = {"first": stored, "second": stored, "third": stored, "out": "float32"}
    blocks = -(-tile.shape.channels * tile.taps // MERGE_THREADS)
    return {
        "rows": w.kernel("rows", pointers, tile.grid, tile.threads, writes.rows),
        "merge": w.kernel(
            "merge", {"sums": "float32", "out": stored}, (blocks, 1, 1), MERGE_THREADS * MERGE_PARTS, writes.merge
        ),
    }


class _Weight(TileWriter):
    """Writes the kernels."""

    def __init__(self, w: CudaWriter, tile: Tile) -> None:
        super().__init__(w, tile)
        self.width, self.tap_rows = tile.shape.kernel[1], tile.parameters["tap_rows"]

    # -------------------------------------------------------------------------------------------------- the main kernel

    def rows(self, first: Any, second: Any, out: Any, block: tuple[Any, Any, Any], thread: Any, **_: Any) -> None:
        """Sums of each part."""
        w, t, tile = self.w, self.t, self.tile
        down, across, own = tile.vertical, tile.horizontal, tile.parameters
        self.shared = w.shared(tile.input_elements, STORED[self.dtype])
        at = Places(w, tile, thread)
        first_unit = w.keep(block[0] * own["threads_c"])
        unit = w.keep(first_unit + at.c)
        sums = w.local(self.tap_rows * self.width * self.vector)
        for index in range(self.tap_rows * self.width * self.vector):
            w.store(sums, index, t.float32(0))
        tiles = down.tiles * across.tiles
        items = tile.shape.batch * tiles
        with t.serial(0, -(-items // own["parts"])) as step:
            item = w.keep(step * own["parts"] + block[1])

            def one() -> None:
                number = w.keep(t.floordiv(item, tiles))
                place = w.keep(t.floormod(item, tiles))
                tile_row, tile_column = w.keep(t.floordiv(place, across.tiles)), w.keep(t.floormod(place, across.tiles))
                w.sync()  # the tile before is done with
                self._load_tile(first, thread, number, first_unit, tile_row, tile_column)
                w.sync()
                row = w.keep(tile_row * down.tile + at.y * down.register)
                column = w.keep(tile_column * across.tile + at.x * across.register)
                self._tile(sums, second, number, (at, unit), row, column, block[2])

            w.when(True if items % own["parts"] == 0 else item < items, one)
        self._finish(sums, out, at, thread, block)

    def _tile(
        self, sums: Any, second: Any, number: Any, channel: tuple[Any, Any], row: Any, column: Any, group: Any
    ) -> None:
        """Add a tile's products."""
        w, t, tile = self.w, self.t, self.tile
        down, across = tile.vertical, tile.horizontal
        at, unit = channel
        size = (down.along.out, across.along.out)
        inside = self._has(unit)
        gradient = w.local(across.register * self.vector, STORED[self.dtype])
        with t.serial(0, across.virtual) as virtual:
            further = virtual * (across.threads * across.register) if across.virtual > 1 else 0
            spot = (
                (virtual * across.threads + at.x) * across.unit_step if across.virtual > 1 else at.x * across.unit_step
            )
            for r in range(down.register):
                y = w.keep(row + r)
                exists = w.both(inside, True if down.along.out % down.tile == 0 else y < size[0])

                def one_row(r: int = r, y: Any = y) -> None:
                    columns = [w.keep(column + further + c) for c in range(across.register)]
                    whole = size[1] % across.tile == 0
                    there = [True if whole else x < size[1] for x in columns]
                    for c, x in enumerate(columns):
                        own = w.lanes(c, self.vector)
                        value = second[w.lanes(image_unit(tile, number, unit, y, x, size), self.vector)]
                        zero = w.zero(self.dtype, self.vector)
                        load, clear = (partial(w.store, gradient, own, one) for one in (value, zero))
                        w.either(there[c], load, clear)
                    values = [w.keep(w.widened(self.dtype, gradient[i])) for i in range(across.register * self.vector)]
                    for tap_row in range(self.tap_rows):
                        self._row(sums, values, there, (at, spot), r, tap_row, group)

                w.when(exists, one_row)

    def _row(
        self, sums: Any, values: list[Any], there: list[Any], place: tuple[Any, Any], r: int, tap_row: int, group: Any
    ) -> None:
        """Products of a row of the gradient with the input's row that one row of taps joins it with."""
        w, tile = self.w, self.tile
        down, across = tile.vertical, tile.horizontal
        at, spot = place
        tap = tap_row if tile.tap_groups == 1 else w.keep(group * self.tap_rows + tap_row)
        row = at.y * down.unit_step + r * down.along.stride + tap * down.along.dilation

        def products() -> None:
            for column, uses in self.columns:
                own = self._load_unit(at.c, row, spot + across.place(column))
                for c, tap_column in uses:
                    # Where there is no gradient the input must not count even if it is infinite.
                    w.when(there[c], partial(add, c, tap_column, own))

        def add(c: int, tap_column: int, own: list[Any]) -> None:
            for lane in range(self.vector):
                index = (tap_row * self.width + tap_column) * self.vector + lane
                w.store(sums, index, sums[index] + own[lane] * values[c * self.vector + lane])

        whole = tile.shape.kernel[0] % self.tap_rows == 0 or tile.tap_groups == 1
        w.when(True if whole else tap < tile.shape.kernel[0], products)

    # ------------------------------------------------------------------------------------------------- adding them up

    def _finish(self, sums: Any, out: Any, at: Places, thread: Any, block: tuple[Any, Any, Any]) -> None:
        """Add what threads of the same channels have, and write it down."""
        w, t, tile = self.w, self.t, self.tile
        for index in range(self.tap_rows * self.width * self.vector):
            for bit in tile.lanes_added:
                w.store(sums, index, w.add_lanes(sums[index], bit))
        # One lane of those that have the same sums goes on.
        adds: Any = True
        if tile.lanes_added:
            mask = sum(tile.lanes_added)
            adds = t.bitwise_and(thread, mask) == 0
        if tile.sharers == 1:
            for tap_row in range(self.tap_rows):
                for tap in range(self.width):
                    for lane in range(self.vector):
                        index = (tap_row * self.width + tap) * self.vector + lane
                        channel = at.c * self.vector + lane
                        w.when(adds, partial(self._write, out, sums[index], channel, tap_row, tap, block))
            return
        added = w.shared(tile.added_elements, "float32")
        sharer = self._sharer(at, thread)
        total = self.width * tile.channels
        for tap_row in range(self.tap_rows):
            w.sync()

            def give(tap_row: int = tap_row) -> None:
                for tap in range(self.width):
                    for lane in range(self.vector):
                        value = sums[(tap_row * self.width + tap) * self.vector + lane]
                        channel = at.c * self.vector + lane
                        w.store(added, (sharer * self.width + tap) * tile.channels + channel, value)

            w.when(adds, give)
            w.sync()
            with t.serial(0, -(-total // tile.threads)) as step:
                item = w.keep(step * tile.threads + thread)

                def take(tap_row: int = tap_row, item: Any = item) -> None:
                    sum_of = w.local(1)
                    w.store(sum_of, 0, added[item])
                    with t.serial(1, tile.sharers) as other:
                        w.store(sum_of, 0, sum_of[0] + added[other * total + item])
                    channel, tap = t.floormod(item, tile.channels), t.floordiv(item, tile.channels)
                    self._write(out, sum_of[0], channel, tap_row, tap, block)

                w.when(True if total % tile.threads == 0 else item < total, take)

    def _sharer(self, at: Places, thread: Any) -> Any:
        """The number of a thread among those of the same channels that are left."""
        t, tile = self.t, self.tile
        if tile.last:
            return t.floordiv(thread, max(tile.parameters["threads_c"], WARP))
        pixels = tile.parameters["threads_x"] * tile.parameters["threads_y"]
        return t.floordiv(t.floormod(thread, pixels), WARP)

    def _write(self, out: Any, value: Any, channel: Any, tap_row: Any, tap: Any, block: tuple[Any, Any, Any]) -> None:
        """One sum of a part; channel counts in the block."""
        w, tile = self.w, self.tile
        real = w.keep(block[0] * tile.channels + channel)
        row = w.keep(block[2] * self.tap_rows + tap_row)
        place = ((block[1] * tile.shape.channels + real) * tile.shape.kernel[0] + row) * self.width + tap
        exists = w.both(
            True if self.whole_channels else real < tile.shape.channels,
            True if tile.shape.kernel[0] % self.tap_rows == 0 else row < tile.shape.kernel[0],
        )
        w.when(exists, lambda: w.store(out, place, value))

    def merge(self, sums: Any, out: Any, block: tuple[Any, Any, Any], thread: Any, **_: Any) -> None:
        """Add the parts: each thread every eighth, then one of them the eight."""
        w, t, tile = self.w, self.t, self.tile
        parts, count = tile.parameters["parts"], tile.shape.channels * tile.taps
        shared = w.shared(MERGE_THREADS * MERGE_PARTS, "float32")
        own, share = w.keep(t.floormod(thread, MERGE_THREADS)), w.keep(t.floordiv(thread, MERGE_THREADS))
        weight = w.keep(block[0] * MERGE_THREADS + own)
        exists: Any = True if count % MERGE_THREADS == 0 else weight < count
        total = w.local(1)
        w.store(total, 0, t.float32(0))
        with t.serial(0, -(-parts // MERGE_PARTS)) as step:
            part = w.keep(step * MERGE_PARTS + share)
            there = w.both(exists, True if parts % MERGE_PARTS == 0 else part < parts)
            w.when(there, lambda: w.store(total, 0, total[0] + sums[part * count + weight]))
        w.store(shared, thread, total[0])
        w.sync()

        def finish() -> None:
            with t.serial(1, MERGE_PARTS) as other:
                w.store(total, 0, total[0] + shared[other * MERGE_THREADS + own])
            w.store(out, weight, w.narrowed(self.dtype, total[0]))

        w.when(w.both(share == 0, exists), finish)
