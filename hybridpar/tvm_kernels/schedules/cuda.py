"""Depthwise convolutions on a GPU, tiled on two levels by TVM's schedule primitives.

**First level**: a block of threads computes a tile of one image. Its input lies in shared memory, with the halo that
taps reach. **Second level**: a thread computes `rows` x `columns` x `vector` results in registers, for each of its
`virtual` **virtual threads**. Their results lie as far apart as all threads side by side are wide, so neighbouring
threads have neighbouring columns and read other **banks** of shared memory, though each has several results. At stride
2 they need every other column, so columns of one phase, those with the same remainder by the stride, lie side by side.
In channels_last neighbouring threads have neighbouring channels. How many **conflicts** of banks a tile has, and
which tiles a **search** tries, is in `cuda_space`.

Forward and input gradient gather: each result is a sum of input elements, each times a tap. The weight gradient sums up
tiles of all images in `split_k` blocks side by side, then what threads have, then what blocks have. Sums are in float32
and always in the same order, so results are the same bit for bit from run to run.

Kernels take pointers alone. Forward: input, weights, bias, result; input gradient: gradient, weights, result. Of the
weight gradient `MAIN` takes input, gradient, and float32 for the sums (parts, channels, taps); `MERGE` the result and
those sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybridpar.tvm_kernels.schedules import out_of_bounds, outside
from hybridpar.tvm_kernels.shapes import ITEM, ConvShape, Direction, KernelKey, Layout

#: The type of an element in memory: half precision is integers until a thread computes with it.
STORED = {"float32": "float32", "bfloat16": "uint16", "float16": "uint16"}

#: Names of the kernels, as TVM numbers them; and threads of a block of the second one: side by side, and for each sum.
MAIN, MERGE = "conv_kernel", "conv_kernel_1"
MERGE_THREADS, MERGE_SHARERS = 32, 8

WARP = 32
#: Multiply-adds that a thread's code may have, beside each other; NVRTC takes about two milliseconds for each.
MOST_WRITTEN_OUT = 3200
#: Static shared memory that a block may have on every GPU.
MOST_SHARED = 48 << 10
#: Loads that a thread has in flight: a GPU hides the latency of memory by many.
_IN_FLIGHT = 8
#: Registers for addresses and indices.
_OVERHEAD = 24
_MOST_GRID = 65535
#: Elements of a tensor: what indices of 32 bits reach.
_MOST_ELEMENTS = 1 << 31


@dataclass(frozen=True)
class Tile:
    """The parameters: what a block of threads computes, and how.

    Attributes:
        vector: Channels of a thread, read and written together; 1 in contiguous.
        threads_c: Threads of a block along channels.
        threads_x: Along columns.
        threads_y: Along rows.
        virtual: Virtual threads of a thread, along columns.
        columns: Results of a virtual thread side by side.
        rows: As many, one below the other.
        pad: 1 if rows in shared memory begin an odd number of columns apart, so that they begin in other banks.
        hold_taps: 1 if all taps are held in registers, 0 for one row of taps at a time; not of the weight gradient.
        tap_rows: Rows of taps whose sums a thread has; of the weight gradient alone.
        split_k: Blocks that share out the tiles of all images; of the weight gradient alone.
        phases: 0 if phases are mixed in shared memory, to see what it is worth that they are not.
    """

    vector: int
    threads_c: int
    threads_x: int
    threads_y: int
    virtual: int
    columns: int
    rows: int
    pad: int
    hold_taps: int = 1
    tap_rows: int = 1
    split_k: int = 1
    phases: int = 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.threads_c * self.threads_x * self.threads_y

    def check(self, key: KernelKey) -> str | None:
        """Why these parameters make no kernel."""
        shape = key.shape
        if self.vector not in (1, 2, 4) or shape.channels % self.vector:
            return f"vector={self.vector} is not 1, 2 or 4, or does not divide the channels"
        if key.layout is not Layout.CHANNELS_LAST and self.vector != 1:
            return "vectors are of channels, which are no neighbours in contiguous"
        if any(size < 1 or size & (size - 1) for size in (self.threads_c, self.threads_x, self.threads_y)):
            return "threads_c, threads_x and threads_y are powers of two"
        if reason := out_of_bounds(self, virtual=8, columns=32, rows=32, tap_rows=shape.kernel[0], split_k=4096):
            return reason
        if not WARP <= self.threads <= 1024:
            return f"{self.threads} threads are not between {WARP} and 1024"
        if {self.pad, self.hold_taps, self.phases} - {0, 1}:
            return "pad, hold_taps and phases are 0 or 1"
        odd = self.rows % shape.stride[0] or self.columns % shape.stride[1]
        if key.direction is Direction.INPUT_GRADIENT and odd:
            return "a thread's results are no multiple of the stride"
        return Tiling(key, self).check()


def why_none(key: KernelKey) -> str:
    """Why there are no kernels for a key; empty where there are some."""
    shape = key.shape
    if key.dtype not in ITEM:
        return f"there are no kernels for {key.dtype}"
    pixels = max(shape.height * shape.width, shape.out_height * shape.out_width)
    if shape.batch * shape.channels * pixels >= _MOST_ELEMENTS:
        return "the images are too large for indices of 32 bits"
    return outside(shape, key.direction)


def default(key: KernelKey) -> dict[str, int]:
    """What was the best most often on an H200 (`benchmarks/gpu/results/convolutions.csv`), of kernels with these tiles
    that were written out by hand.
    """
    is_sum, last = key.direction is Direction.WEIGHT_GRADIENT, key.layout is Layout.CHANNELS_LAST
    numbers = {
        (True, False): (2, 8, 4, 2, 2, 7, 4),
        (True, True): (2, 16, 2, 8, 1, 7, 1),
        (False, False): (1, 8, 8, 4, 4, 1, 7),
        (False, True): (1, 8, 8, 4, 1, 1, 7),
    }[last, is_sum]
    names = ("vector", "threads_c", "threads_x", "threads_y", "virtual", "columns", "rows")
    further = {"tap_rows": key.shape.kernel[0], "split_k": 64} if is_sum else {"hold_taps": 1}
    return {**dict(zip(names, numbers, strict=True)), "pad": 0, **further}


def _up(size: int, step: int) -> int:
    """The next multiple."""
    return -(-size // step) * step


class Tiling:
    """A tile of one direction of a convolution, and the sizes that follow. Pairs are of rows and columns."""

    def __init__(self, key: KernelKey, tile: Tile) -> None:
        shape, direction, layout = key.shape, key.direction, key.layout
        self.shape, self.direction, self.dtype, self.tile = shape, direction, key.dtype, tile
        #: Whether neighbours in memory are channels.
        self.channels_last = layout is Layout.CHANNELS_LAST
        self.is_sum = direction is Direction.WEIGHT_GRADIENT
        self.transposed = direction is Direction.INPUT_GRADIENT
        image, result = (shape.height, shape.width), (shape.out_height, shape.out_width)
        #: Elements to gather from, and to compute; those of the weight gradient are those of forward.
        self.size, self.out = (result, image) if self.transposed else (image, result)
        #: Results of a block of threads, and blocks below and beside each other.
        self.block = tile.threads_y * tile.rows, tile.threads_x * tile.virtual * tile.columns
        self.blocks = -(-self.out[0] // self.block[0]), -(-self.out[1] // self.block[1])
        #: Channels and rows of taps of all blocks, of which the last few may not exist.
        self.channels = _up(shape.channels, tile.threads_c * tile.vector)
        self.tap_rows = _up(shape.kernel[0], tile.tap_rows) if self.is_sum else shape.kernel[0]
        #: Phases of columns that lie apart in shared memory.
        self.phases = 1 if self.transposed or not tile.phases else shape.stride[1]
        rows, columns = (taps - 1 if self.transposed else 0 for taps in shape.kernel)
        #: The first element of the first tile; negative in the padding.
        self.first = self.input_index(0, 0, rows), self.input_index(1, 0, columns)

    def input_index(self, axis: int, out: Any, tap: Any) -> Any:
        """The element that a tap joins with a result, rounded down between two of them."""
        stride, padding, dilation = self.shape.stride[axis], self.shape.padding[axis], self.shape.dilation[axis]
        if self.transposed:
            return (out + padding - tap * dilation) // stride
        return out * stride + tap * dilation - padding

    def extent(self, rows: int, columns: int, tap_rows: int) -> tuple[int, int]:
        """Elements that results and taps reach; columns are whole sets of phases."""
        tall, wide = (0, 0) if self.transposed else (tap_rows - 1, self.shape.kernel[1] - 1)
        down = self.input_index(0, rows - 1, tall) - self.first[0]
        across = self.input_index(1, columns - 1, wide) - self.first[1]
        return down + 1, _up(across + 1, self.phases)

    @cached_property
    def shared(self) -> tuple[int, int]:
        """Rows and columns of a tile in shared memory, the unused column of skewed rows included."""
        taps = self.tile.tap_rows if self.is_sum else self.shape.kernel[0]
        rows, columns = self.extent(*self.block, taps)
        return rows, columns | 1 if self.tile.pad else columns

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a block, at most."""
        tile, (tall, wide) = self.tile, self.shape.kernel
        channels = tile.threads_c * tile.vector
        image = ITEM[self.dtype] * self.shared[0] * self.shared[1] * channels
        if not self.is_sum:
            return image + 4 * tall * wide * channels
        added = 4 * wide * tile.threads * tile.vector
        return image if added <= image else image + added  # what threads add lies where the image was, if it can

    @property
    def scratch_bytes(self) -> int:
        """Global memory that a call needs: sums of each part."""
        return 4 * self.tile.split_k * self.channels * self.tap_rows * self.shape.kernel[1] if self.is_sum else 0

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of threads."""
        groups = self.channels // (self.tile.threads_c * self.tile.vector)
        if self.is_sum:
            return groups, self.tile.split_k, self.tap_rows // self.tile.tap_rows
        return self.blocks[0] * self.blocks[1], groups, self.shape.batch

    @property
    def launches(self) -> list[tuple[str, int, tuple[int, int, int], tuple[int, int, int]]]:
        """Kernels in the order in which they run, each with how many pointers it takes, its blocks and threads."""
        tile = self.tile
        pixels = tile.threads_x * tile.threads_y
        threads = (tile.threads_c, pixels, 1) if self.channels_last else (pixels, tile.threads_c, 1)
        main = (MAIN, 4 if self.direction is Direction.FORWARD else 3, self.grid, threads)
        if not self.is_sum:
            return [main]
        blocks = -(-self.channels * self.tap_rows * self.shape.kernel[1] // MERGE_THREADS)
        return [main, (MERGE, 2, (blocks, 1, 1), (MERGE_THREADS, MERGE_SHARERS, 1))]

    @cached_property
    def registers(self) -> int:
        """An estimate of what a thread needs."""
        tile, (tall, wide) = self.tile, self.shape.kernel
        row = self.extent(1, tile.columns, 1)[1]
        if self.is_sum:
            return (tile.tap_rows * wide + tile.columns + min(row, 4)) * tile.vector + _OVERHEAD
        taps = tall * wide if tile.hold_taps else wide
        return (tile.virtual * (tile.rows * tile.columns + min(row, 8)) + taps) * tile.vector + _OVERHEAD

    @property
    def written_out(self) -> int:
        """Multiply-adds of a thread beside each other."""
        tile, (tall, wide) = self.tile, self.shape.kernel
        skipped = self.shape.stride[0] * self.shape.stride[1] if self.transposed else 1
        return (
            tile.virtual * tile.rows * tile.columns * (tile.tap_rows if self.is_sum else tall) * wide * tile.vector
        ) // skipped

    def check(self) -> str | None:
        """Why there is no kernel of this size."""
        if self.shared_bytes > MOST_SHARED:
            return f"{self.shared_bytes} bytes of shared memory are more than {MOST_SHARED}"
        if self.written_out > MOST_WRITTEN_OUT:
            return "too much would be written out"
        if self.registers > 255:
            return "a thread would need more than 255 registers"
        if max(self.grid[1:]) > _MOST_GRID:
            return f"there would be more than {_MOST_GRID} blocks along an axis"
        return None


def define(w: Any, shape: str, direction: str, layout: str, dtype: str, parameters: dict[str, int]) -> dict[str, Any]:
    """The function whose loops become the kernels."""
    # The code depends on no device.
    key = KernelKey(Direction(direction), ConvShape.parse(shape), Layout(layout), 1, "", dtype)
    tiling = Tiling(key, Tile(**parameters))
    writer = _Writer(w.tvm, tiling)
    return {"conv": writer.weight_gradient() if tiling.is_sum else writer.gather()}


class _Writer:
    """Writes what is computed as TVM's tensor expressions, and schedules it."""

    def __init__(self, tvm: Any, tiling: Tiling) -> None:
        self.te, self.tir, self.schedule = tvm.te, tvm.tirx, tvm.s_tir.Schedule
        self.tiling, self.tile, self.shape = tiling, tiling.tile, tiling.shape
        #: Results of all blocks, of which the last few may not exist.
        self.padded = tiling.blocks[0] * tiling.block[0], tiling.blocks[1] * tiling.block[1]

    # ------------------------------------------------------------------------------------------------ what is computed

    def _axes(self, n: Any, c: Any, y: Any, x: Any) -> tuple[Any, ...]:
        """Indices in the order of memory."""
        return (n, y, x, c) if self.tiling.channels_last else (n, c, y, x)

    def _named(self, *axes: Any) -> tuple[Any, ...]:
        """Indices in the order of memory as image, channel, row and column."""
        return (axes[0], axes[3], axes[1], axes[2]) if self.tiling.channels_last else axes

    def _wide(self, value: Any) -> Any:
        """A value of memory as float32."""
        dtype = self.tiling.dtype
        return value if dtype == "float32" else self.tir.call_extern("float32", f"hp_from_{dtype}", value)

    def _narrow(self, value: Any) -> Any:
        """A float32 as memory has it."""
        dtype = self.tiling.dtype
        return value if dtype == "float32" else self.tir.call_extern("uint16", f"hp_to_{dtype}", value)

    def _placeholder(self, name: str, sizes: tuple[int, ...]) -> Any:
        return self.te.placeholder(sizes, STORED[self.tiling.dtype], name=name)

    def _with_zeros(self, image: Any, name: str, sizes: tuple[int, int, int], start: Callable[[Any], Any]) -> Any:
        """Tiles of images, each from a start on, with zeros around images and for those that do not exist."""
        batch, channels, height, width = self._named(*image.shape)
        vector, zero = self.tile.vector, self.tir.const(0, STORED[self.tiling.dtype])

        def value(*axes: Any) -> Any:
            number, c, row, column = self._named(*axes)
            n, top, left = start(number)
            y, x = top + row, left + column
            # All channels of a vector exist or none, so that they are loaded together.
            exists = self.te.all(n < batch, c // vector < channels // vector, y >= 0, y < height, x >= 0, x < width)
            return self.te.if_then_else(exists, image[self._axes(n, c, y, x)], zero)

        return self.te.compute(self._axes(sizes[0], self.tiling.channels, *sizes[1:]), value, name=name)

    def gather(self) -> Any:
        """Forward or input gradient."""
        te, tiling, shape = self.te, self.tiling, self.shape
        image = self._placeholder("operand_0", self._axes(shape.batch, shape.channels, *tiling.size))
        weights = self._placeholder("operand_1", (shape.channels, *shape.kernel))
        bias = self._placeholder("operand_2", (shape.channels,))
        sizes = shape.batch, *tiling.extent(*self.padded, shape.kernel[0])
        tile = self._with_zeros(image, "tile", sizes, lambda n: (n, *tiling.first))
        taps = te.compute(
            (tiling.channels, *shape.kernel),
            lambda c, r, s: te.if_then_else(c < shape.channels, self._wide(weights[c, r, s]), 0.0),
            name="taps",
        )
        r, s = (te.reduce_axis((0, size), name) for name, size in zip("rs", shape.kernel, strict=True))

        def total(*axes: Any) -> Any:
            n, c, y, x = self._named(*axes)
            row, column = tiling.input_index(0, y, r) - tiling.first[0], tiling.input_index(1, x, s) - tiling.first[1]
            product = self._wide(tile[self._axes(n, c, row, column)]) * taps[c, r, s]
            if tiling.transposed:
                product = te.if_then_else(te.all(self._meets(0, y, r), self._meets(1, x, s)), product, 0.0)
            return te.sum(product, axis=[r, s])

        def result(*axes: Any) -> Any:
            c = self._named(*axes)[1]
            if tiling.transposed:
                return self._narrow(sums[axes])
            start = self.tir.call_intrin("handle", "tirx.address_of", bias[0])  # null where there is no bias
            stored = self.tir.call_extern(STORED[tiling.dtype], "hp_or_zero", start, c)
            return self._narrow(sums[axes] + te.if_then_else(c < shape.channels, self._wide(stored), 0.0))

        sums = te.compute(self._axes(shape.batch, tiling.channels, *self.padded), total, name="sums")
        rounded = te.compute(sums.shape, result, name="rounded")
        out_sizes = self._axes(shape.batch, shape.channels, *tiling.out)
        out = te.compute(out_sizes, lambda *axes: rounded[axes], name="result")
        operands = [image, weights] if tiling.transposed else [image, weights, bias]
        return self._schedule_gather(self.schedule(te.create_prim_func([*operands, out])))

    def _meets(self, axis: int, out: Any, tap: Any) -> Any:
        """Whether a result of the input gradient has a share in an element: at stride 2 in every other one."""
        shape = self.shape
        return (out + shape.padding[axis] - tap * shape.dilation[axis]) % shape.stride[axis] == 0

    def weight_gradient(self) -> Any:
        """The weight gradient, in two kernels."""
        te, tiling, shape, tile = self.te, self.tiling, self.shape, self.tile
        image = self._placeholder("operand_0", self._axes(shape.batch, shape.channels, *tiling.size))
        gradient = self._placeholder("operand_1", self._axes(shape.batch, shape.channels, *tiling.out))
        down, across = tiling.blocks
        tiles = _up(shape.batch * down * across, tile.split_k)

        def start(number: Any, steps: tuple[int, int], first: tuple[int, int] = (0, 0)) -> tuple[Any, Any, Any]:
            y, x = number // across % down, number % across
            return number // (down * across), y * steps[0] + first[0], x * steps[1] + first[1]

        reach = tiling.extent(*tiling.block, tiling.tap_rows)
        steps = tiling.block[0] * shape.stride[0], tiling.block[1] * shape.stride[1]
        images = self._with_zeros(image, "tile", (tiles, *reach), lambda number: start(number, steps, tiling.first))
        block = tiling.block
        gradients = self._with_zeros(gradient, "gradients", (tiles, *block), lambda number: start(number, block))
        number, h, w = (te.reduce_axis((0, size), name) for name, size in zip("nhw", (tiles, *block), strict=True))

        def total(c: Any, r: Any, s: Any) -> Any:
            row, column = tiling.input_index(0, h, r) - tiling.first[0], tiling.input_index(1, w, s) - tiling.first[1]
            product = self._wide(images[self._axes(number, c, row, column)])
            product = product * self._wide(gradients[self._axes(number, c, h, w)])
            # Where there is no gradient the input must not count even if it is infinite.
            n, y, x = start(number, tiling.block)
            exists = te.all(n < shape.batch, y + h < tiling.out[0], x + w < tiling.out[1])
            return te.sum(te.if_then_else(exists, product, 0.0), axis=[number, h, w])

        sums = te.compute((tiling.channels, tiling.tap_rows, shape.kernel[1]), total, name="sums")
        out = te.compute((shape.channels, *shape.kernel), lambda *axes: self._narrow(sums[axes]), name="result")
        sch = self.schedule(te.create_prim_func([image, gradient, out]))
        self._schedule_sums(sch)
        self._schedule_merge(sch)
        return sch.mod["main"]

    # -------------------------------------------------------------------------------------------------- how it is done

    def _schedule_gather(self, sch: Any) -> Any:
        tiling, tile = self.tiling, self.tile
        image, taps, sums, rounded, out = map(sch.get_sblock, ("tile", "taps", "sums", "rounded", "result"))
        *axes, r, s = sch.get_loops(sums)
        n, c, h, w = self._named(*axes)
        c_block, c_thread, lane = sch.split(c, [None, tile.threads_c, tile.vector])
        h_block, h_thread, row = sch.split(h, [None, tile.threads_y, tile.rows])
        w_block, virtual, w_thread, column = sch.split(w, [None, tile.virtual, tile.threads_x, tile.columns])
        threads = (h_thread, w_thread, c_thread) if tiling.channels_last else (c_thread, h_thread, w_thread)
        sch.reorder(n, c_block, h_block, w_block, virtual, *threads, r, row, s, column, lane)
        block, pixel = sch.fuse(h_block, w_block), sch.fuse(h_thread, w_thread)
        for axis, loop in zip("xyz", (block, c_block, n), strict=True):
            sch.bind(loop, f"blockIdx.{axis}")
        sch.bind(virtual, "vthread.x")
        self._bind_threads(sch, c_thread, pixel)
        thread = c_thread if tiling.channels_last else pixel
        self._load_tile(sch, image, block)
        sch.set_scope(taps, 0, "shared")
        sch.transform_layout(taps, ("write", 0), lambda c, r, s: (r, s, c))
        sch.compute_at(taps, block, preserve_unit_loops=True)
        self._share_out(sch, taps, block, vector=1)
        held, read = sch.cache_read(sums, 1, "local"), sch.cache_read(sums, 0, "local")
        sch.compute_at(held, thread if tile.hold_taps else r, preserve_unit_loops=True)
        sch.compute_at(read, row, preserve_unit_loops=True)
        for local in (sums, rounded):
            sch.set_scope(local, 0, "local")
        for later in (rounded, out):
            sch.reverse_compute_at(later, thread, preserve_unit_loops=True)
        start = sch.decompose_reduction(sums, r)
        for local, at in ((start, thread), (held, thread if tile.hold_taps else r), (read, row), (rounded, thread)):
            self._write_out(sch, local, at, vector=local in (held, read))
        self._write_out(sch, out, thread, vector=True)
        for loop in (r, row, s, column, lane):
            sch.unroll(loop)
        if tiling.transposed and max(self.shape.stride) > 1:  # TVM leaves out the taps that meet nothing
            sch.annotate(r, "pragma_unroll_explicit", 1)
        return sch.mod["main"]

    def _schedule_sums(self, sch: Any) -> None:
        tile = self.tile
        image, gradients, sums = map(sch.get_sblock, ("tile", "gradients", "sums"))
        c, r, s, number, h, w = sch.get_loops(sums)
        c_block, c_thread, lane = sch.split(c, [None, tile.threads_c, tile.vector])
        r_block, r = sch.split(r, [None, tile.tap_rows])
        h_thread, row = sch.split(h, [tile.threads_y, tile.rows])
        virtual, w_thread, column = sch.split(w, [tile.virtual, tile.threads_x, tile.columns])
        step, part = sch.split(number, [None, tile.split_k])
        block, thread = (part, c_block, r_block), (c_thread, h_thread, w_thread)
        sch.reorder(*block, *thread, step, virtual, row, r, s, column, lane)
        sch.fuse(h_thread, w_thread)
        # Blocks sum up parts of the tiles, and threads parts of those.
        of_blocks = sch.rfactor(part, 0)
        of_threads = sch.rfactor(sch.get_loops(of_blocks)[4], 0)
        sch.set_scope(of_threads, 0, "local")
        part, c_block, r_block, c_thread, pixel, step, virtual, row, r, s, column, lane = sch.get_loops(of_threads)
        for axis, loop in zip("xyz", (c_block, part, r_block), strict=True):
            sch.bind(loop, f"blockIdx.{axis}")
        self._bind_threads(sch, c_thread, pixel)
        self._add_threads(sch, of_blocks, r_block)
        self._load_tile(sch, image, step)
        sch.set_scope(gradients, 0, "local")
        sch.compute_at(gradients, row, preserve_unit_loops=True)
        read = sch.cache_read(of_threads, 0, "local")
        sch.compute_at(read, r, preserve_unit_loops=True)
        start = sch.decompose_reduction(of_threads, step)
        for local, at in ((start, pixel), (gradients, row), (read, r)):
            self._write_out(sch, local, at, vector=local is not start)
        for loop in (virtual, row, r, s, column, lane):
            sch.unroll(loop)

    def _add_threads(self, sch: Any, of_blocks: Any, r_block: Any) -> None:
        """Add what threads of the same channels have, through shared memory, one row of taps at a time."""
        tile = self.tile
        sch.reverse_compute_at(of_blocks, r_block, preserve_unit_loops=True)
        pixel, _, c, r, s = self._within(sch, of_blocks, r_block)
        sch.reorder(r, s, c, pixel)
        self._share_out_item(sch, sch.fuse(s, c))
        given = sch.cache_read(of_blocks, 0, "shared")
        sch.compute_at(given, r, preserve_unit_loops=True)
        pixel, _, c, *_ = self._within(sch, given, r)
        self._bind_threads(sch, sch.split(c, [tile.threads_c, tile.vector])[0], pixel)
        sch.decompose_reduction(of_blocks, sch.get_loops(of_blocks)[-1])

    def _schedule_merge(self, sch: Any) -> None:
        """Add the parts: some threads share each sum."""
        sums, out = sch.get_sblock("sums"), sch.get_sblock("result")
        part, *loops = sch.get_loops(sums)
        block, thread = sch.split(sch.fuse(*loops), [None, MERGE_THREADS])
        step, sharer = sch.split(part, [None, MERGE_SHARERS])
        sch.reorder(block, thread, sharer, step)
        for loop, axis in ((block, "blockIdx.x"), (thread, "threadIdx.x"), (sharer, "threadIdx.y")):
            sch.bind(loop, axis)
        sch.set_scope(sums, 0, "local")
        sch.reverse_compute_at(out, thread)

    def _bind_threads(self, sch: Any, channel: Any, pixel: Any) -> None:
        """Neighbouring threads have what lies side by side in memory."""
        for axis, loop in zip("xy", (channel, pixel) if self.tiling.channels_last else (pixel, channel), strict=True):
            sch.bind(loop, f"threadIdx.{axis}")

    def _load_tile(self, sch: Any, image: Any, at: Any) -> None:
        """First level: the input of a block's tile in shared memory."""
        tiling, tile = self.tiling, self.tile
        sch.set_scope(image, 0, "shared")
        if tiling.phases > 1:

            def apart(*axes: Any) -> list[Any]:
                n, c, y, x = self._named(*axes)
                columns = [x % tiling.phases, x // tiling.phases]
                return [n, y, *columns, c] if tiling.channels_last else [n, c, y, *columns]

            sch.transform_layout(image, ("write", 0), apart)
        if tile.pad:
            channels = tile.threads_c * tile.vector if tiling.channels_last else 1
            sch.storage_align(image, 0, 1 if tiling.channels_last else 2, 2 * channels, channels)
        sch.compute_at(image, at, preserve_unit_loops=True)
        self._share_out(sch, image, at, tile.vector)

    def _share_out(self, sch: Any, block: Any, at: Any, vector: int) -> None:
        """Have all threads load, neighbours what lies side by side in memory, each several values at a time."""
        *loops, innermost = self._within(sch, block, at)
        units, lane = sch.split(innermost, [None, vector])
        step = self._share_out_item(sch, sch.fuse(*loops, units))
        if vector > 1:
            sch.vectorize(lane)
        if sch.get(step).extent > _IN_FLIGHT:
            _, step = sch.split(step, [None, _IN_FLIGHT])
        sch.unroll(step)

    def _share_out_item(self, sch: Any, item: Any) -> Any:
        """Divide a loop among all threads; returns the steps that each takes."""
        threads = [self.tile.threads_x * self.tile.threads_y, self.tile.threads_c]
        step, *threads = sch.split(item, [None, *(threads if self.tiling.channels_last else reversed(threads))])
        self._bind_threads(sch, *(reversed(threads) if self.tiling.channels_last else threads))
        return step

    def _within(self, sch: Any, block: Any, at: Any) -> list[Any]:
        """The loops of a block within another loop."""
        loops, outer = sch.get_loops(block), sch.get(at)
        depth = next(i for i, loop in enumerate(loops) if sch.get(loop).same_as(outer))
        return list(loops[depth + 1 :])

    def _write_out(self, sch: Any, local: Any, at: Any, *, vector: bool) -> None:
        """Second level: what is in registers has no loops, and is a vector along channels."""
        *loops, innermost = self._within(sch, local, at)
        for loop in loops:
            sch.unroll(loop)
        if vector and self.tile.vector > 1:
            sch.vectorize(innermost)
        else:
            sch.unroll(innermost)
