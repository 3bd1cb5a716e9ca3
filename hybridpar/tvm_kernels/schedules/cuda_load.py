"""Loads an image's tile with its halo into shared memory, by all threads of a block.

Each thread loads some elements, a few at a time: all loads are issued before the first value is stored, as a GPU hides
the latency of memory by having many loads in flight. What is not in the image is zero, so no later loop asks where the
border is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hybridpar.codegen.cuda_writer import STORED, CudaWriter
from hybridpar.tvm_kernels.schedules.cuda_tile import Tile
from hybridpar.tvm_kernels.schedules.geometry import by_input

#: Loads that a thread has in flight.
BATCH = 8


class Places:
    """The place of a thread in its block's tile: its unit of `vector` channels, its column and its row."""

    def __init__(self, w: CudaWriter, tile: Tile, thread: Any) -> None:
        own, t = tile.parameters, w.t
        sizes = [("c", own["threads_c"]), ("x", own["threads_x"]), ("y", own["threads_y"])]
        order = sizes if tile.last else [*sizes[1:], sizes[0]]
        found: dict[str, Any] = {}
        rest = thread
        for name, size in order[:-1]:
            found[name] = w.keep(t.floormod(rest, size)) if size > 1 else 0
            rest = w.keep(t.floordiv(rest, size)) if size > 1 else rest
        found[order[-1][0]] = rest
        self.c, self.x, self.y = found["c"], found["x"], found["y"]


class TileWriter:
    """Base class of the schedules for GPUs: what a thread reads of its tile in shared memory."""

    shared: Any

    def __init__(self, w: CudaWriter, tile: Tile) -> None:
        self.w, self.t, self.tile = w, w.t, tile
        self.vector, self.dtype = tile.vector, tile.dtype
        self.columns = by_input(tile.horizontal.taps)
        self.whole_channels = tile.shape.channels % tile.channels == 0

    def _has(self, unit: Any) -> Any:
        """Whether a unit of channels is one of the image."""
        return True if self.whole_channels else unit < self.tile.shape.channels // self.vector

    def _load_tile(self, image: Any, thread: Any, number: Any, unit: Any, row: Any, column: Any) -> None:
        """Load the tile of an image whose first unit of channels, row of tiles and column of tiles are given."""
        down, across = self.tile.vertical, self.tile.horizontal
        origin = (number, unit, row * down.step + down.first, column * across.step + across.first)
        load_tile(self.w, self.tile, image, self.shared, thread, origin)

    def _load_unit(self, unit: Any, row: Any, spot: Any) -> list[Any]:
        """Channels of an element of the tile as float32."""
        w = self.w
        place = shared_unit(self.tile, unit, row, spot)
        if self.vector == 1 and not self.tile.weight:  # there it would be other machine code than was measured
            return [w.keep(w.widened(self.dtype, self.shared[place]))]
        stored = w.local(self.vector, STORED[self.dtype])
        w.store(stored, w.lanes(0, self.vector), self.shared[w.lanes(place, self.vector)])
        return [w.keep(w.widened(self.dtype, stored[lane])) for lane in range(self.vector)]


def load_tile(w: CudaWriter, tile: Tile, image: Any, into: Any, thread: Any, origin: tuple[Any, Any, Any, Any]) -> None:
    """Load an image's tile into shared memory."""
    t = w.t
    down, across = tile.vertical, tile.horizontal
    number, first_unit, top, left = origin
    units = -(-tile.shape.channels // tile.vector)
    pixels = down.reach * across.reach
    own_units = tile.parameters["threads_c"]
    total = pixels * own_units
    rounds = -(-total // tile.threads)
    staged = w.local(min(rounds, BATCH) * tile.vector, STORED[tile.dtype])
    whole_channels = tile.shape.channels % tile.channels == 0

    def split(item: Any) -> tuple[Any, Any, Any]:
        """Unit of channels, row and column of an item, in the order in which they lie in memory."""
        if tile.last:
            unit = t.floormod(item, own_units) if own_units > 1 else 0
            pixel = t.floordiv(item, own_units) if own_units > 1 else item
        else:
            unit = t.floordiv(item, pixels) if own_units > 1 else 0
            pixel = t.floormod(item, pixels) if own_units > 1 else item
        return unit, t.floordiv(pixel, across.reach), t.floormod(pixel, across.reach)

    def bring(index: int, item: Any) -> None:
        unit, row, column = split(item)
        y, x, c = w.keep(top + row), w.keep(left + column), w.keep(first_unit + unit)
        inside = w.both(
            *(y >= 0, y < down.along.size, x >= 0, x < across.along.size),
            True if whole_channels else c < units,
        )
        place = image_unit(tile, number, c, y, x, (down.along.size, across.along.size))
        to, value = w.lanes(index, tile.vector), image[w.lanes(place, tile.vector)]
        zero = w.zero(tile.dtype, tile.vector)
        w.either(inside, partial(w.store, staged, to, value), partial(w.store, staged, to, zero))

    def put(index: int, item: Any) -> None:
        unit, row, column = split(item)
        spot = t.floormod(column, across.phases) * across.per_phase + t.floordiv(column, across.phases)
        place = shared_unit(tile, unit, row, spot if across.phases > 1 else column)
        w.store(into, w.lanes(place, tile.vector), staged[w.lanes(index, tile.vector)])

    for begin in range(0, rounds, BATCH):
        batch = range(begin, min(begin + BATCH, rounds))
        items = [w.keep(thread + one * tile.threads) for one in batch]
        for action in (bring, put):
            for index, (one, item) in enumerate(zip(batch, items, strict=True)):
                exists: Any = True if (one + 1) * tile.threads <= total else item < total
                w.when(exists, partial(action, index, item))


def image_unit(tile: Tile, number: Any, unit: Any, row: Any, column: Any, size: tuple[int, int]) -> Any:
    """The number of a unit of `vector` elements in the images, in the order of memory."""
    if tile.last:
        units = tile.shape.channels // tile.vector
        return ((number * size[0] + row) * size[1] + column) * units + unit
    return ((number * tile.shape.channels + unit) * size[0] + row) * size[1] + column


def shared_unit(tile: Tile, unit: Any, row: Any, spot: Any) -> Any:
    """The number of a unit of `vector` elements in the tile in shared memory."""
    if tile.last:
        return (row * tile.pitch + spot) * tile.parameters["threads_c"] + unit
    return (unit * tile.vertical.reach + row) * tile.pitch + spot
