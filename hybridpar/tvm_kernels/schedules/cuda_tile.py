"""Tiles of a GPU: what follows from a candidate's parameters, for schedule, space and launcher.

A block of threads computes a tile of one image: some channels, rows and columns of the result. Its input, with the halo
that taps reach, lies in shared memory (level 1). Each thread computes `rows` x `columns` x `vector` results at a time
in registers (level 2), and that `virtual` times, at columns that are as far apart as all threads side by side are wide:
so neighbouring threads have neighbouring columns, and read other banks, though each has several.

In shared memory the columns of one phase, those with the same remainder by the stride, lie side by side: at stride 2
neighbouring threads need every other column, which would be in the same banks two by two.

In channels_last neighbouring threads have neighbouring channels, in contiguous neighbouring columns, as memory has.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hybridpar.tvm_kernels.schedules.geometry import Axis, Taps, axis
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

#: Bytes of one element.
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
WARP = 32


@dataclass(frozen=True)
class Side:
    """Rows or columns of a block's tile.

    Attributes:
        along: The axis.
        register: Results side by side in a thread.
        threads: Threads side by side.
        virtual: How often each thread does that.
        split: Whether phases lie apart in shared memory.
    """

    along: Axis
    register: int
    threads: int
    virtual: int
    split: bool

    @property
    def tile(self) -> int:
        """Results of a block."""
        return self.register * self.threads * self.virtual

    @property
    def tiles(self) -> int:
        """Blocks."""
        return -(-self.along.out // self.tile)

    @property
    def step(self) -> int:
        """Input elements from one tile to the next."""
        return self.along.shift(self.tile)

    @cached_property
    def first(self) -> int:
        """The first input element of the first tile; negative in the padding."""
        return min(place for out in range(self.register) for _, place in self.along.unbounded(out))

    @cached_property
    def reach(self) -> int:
        """Input elements of a tile."""
        last = range(self.tile - self.register, self.tile)
        return max(place for out in last for _, place in self.along.unbounded(out)) - self.first + 1

    @cached_property
    def taps(self) -> tuple[Taps, ...]:
        """Of each result of a thread, tap and input element, counted from the first element of the thread."""
        own = (self.along.unbounded(out) for out in range(self.register))
        return tuple(tuple((tap, place - self.first) for tap, place in one) for one in own)

    @cached_property
    def used(self) -> int:
        """Input elements that one thread reads."""
        return len({place for own in self.taps for _, place in own})

    @cached_property
    def uses(self) -> int:
        """Pairs of a thread's results and taps."""
        return sum(len(own) for own in self.taps)

    @cached_property
    def phases(self) -> int:
        """Phases that lie apart."""
        return self.along.stride if self.split and not self.along.transposed else 1

    @cached_property
    def per_phase(self) -> int:
        """Elements of one phase."""
        return -(-self.reach // self.phases)

    @property
    def pitch(self) -> int:
        """Elements in shared memory."""
        return self.phases * self.per_phase

    @property
    def unit_step(self) -> int:
        """Places in shared memory from what one thread begins at to the next one's."""
        return self.along.shift(self.register) // self.phases

    def place(self, offset: int) -> int:
        """Where an element lies, from where the thread's first one does."""
        return offset % self.phases * self.per_phase + offset // self.phases


@functools.lru_cache(4096)
def _side(shape: ConvShape, direction: Direction, which: int, register: int, threads: int, virtual: int) -> Side:
    """Sides are few, and tiles that are weighed against each other many."""
    forward = Direction.FORWARD if direction is Direction.WEIGHT_GRADIENT else direction
    return Side(axis(shape, forward, which), register, threads, virtual, split=which == 1)


@dataclass(frozen=True)
class Tile:
    """What a block of threads computes, and how.

    Attributes:
        shape: The convolution.
        direction: Which of its three directions.
        layout: Of the images.
        dtype: Of all tensors: float32, bfloat16 or float16.
        parameters: vector, threads_c, threads_x, threads_y, virtual, columns, rows, skew; and `hold` of forward and
            input gradient, `tap_rows` and `parts` of the weight gradient.
    """

    shape: ConvShape
    direction: Direction
    layout: Layout
    dtype: str
    parameters: Mapping[str, int]

    @property
    def weight(self) -> bool:
        """Whether it is the weight gradient."""
        return self.direction is Direction.WEIGHT_GRADIENT

    @property
    def last(self) -> bool:
        """Whether neighbours in memory are channels."""
        return self.layout is Layout.CHANNELS_LAST

    @cached_property
    def vertical(self) -> Side:
        """Rows."""
        own = self.parameters
        return _side(self.shape, self.direction, 0, own["rows"], own["threads_y"], 1)

    @cached_property
    def horizontal(self) -> Side:
        """Columns."""
        own = self.parameters
        return _side(self.shape, self.direction, 1, own["columns"], own["threads_x"], own["virtual"])

    @property
    def vector(self) -> int:
        """Channels of a thread, which are read and written together."""
        return self.parameters["vector"]

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.parameters["threads_c"] * self.parameters["threads_x"] * self.parameters["threads_y"]

    @property
    def channels(self) -> int:
        """Of a block."""
        return self.parameters["threads_c"] * self.vector

    @property
    def channel_blocks(self) -> int:
        """Blocks that share out the channels."""
        return -(-self.shape.channels // self.channels)

    @property
    def taps(self) -> int:
        """Of a filter."""
        return self.shape.kernel[0] * self.shape.kernel[1]

    @property
    def pitch(self) -> int:
        """Columns from one row in shared memory to the next; `skew` of them are not used."""
        return self.horizontal.pitch + self.parameters["skew"]

    @property
    def input_elements(self) -> int:
        """Elements of the input's tile in shared memory."""
        return self.vertical.reach * self.pitch * self.channels

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks."""
        if self.weight:
            return self.channel_blocks, self.parameters["parts"], self.tap_groups
        return self.vertical.tiles * self.horizontal.tiles, self.channel_blocks, self.shape.batch

    # ------------------------------------------------------------------------------------------- the weight gradient

    @property
    def tap_groups(self) -> int:
        """Blocks that share out the rows of taps."""
        return -(-self.shape.kernel[0] // self.parameters["tap_rows"])

    @property
    def lanes_added(self) -> tuple[int, ...]:
        """Bits of a lane's number by which lanes of the same channel differ."""
        if self.last:
            return tuple(bit for bit in (1, 2, 4, 8, 16) if bit >= self.parameters["threads_c"])
        pixels = self.parameters["threads_x"] * self.parameters["threads_y"]
        return tuple(bit for bit in (1, 2, 4, 8, 16) if bit < pixels)

    @property
    def sharers(self) -> int:
        """Threads whose sums of the same taps are added through shared memory."""
        return self.threads // self.parameters["threads_c"] // (1 << len(self.lanes_added))

    @property
    def added_elements(self) -> int:
        """Float32 in shared memory for that: of one row of taps."""
        return 0 if self.sharers == 1 else self.sharers * self.shape.kernel[1] * self.channels

    @property
    def scratch_bytes(self) -> int:
        """Global memory that a call needs: sums of each part."""
        return 4 * self.parameters["parts"] * self.shape.channels * self.taps if self.weight else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block of the main kernel."""
        return ITEM[self.dtype] * self.input_elements + 4 * (
            self.added_elements if self.weight else self.taps * self.channels
        )
