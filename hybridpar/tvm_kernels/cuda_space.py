"""The space of kernels for a GPU: which parameters are allowed, and which of them are tried.

Tried are those that keep an SM busy and whose lanes hardly wait for each other's banks of shared memory. Bank conflicts
come from the schedule's own index expressions (`cuda_load.shared_unit`), evaluated for a warp.

Parameters of all directions (`schedules/cuda_tile.py`):
    vector: channels of a thread, read and written together; 1 in contiguous;
    threads_c, threads_x, threads_y: threads of a block along channels, columns and rows;
    columns, rows: results that a thread holds in registers; virtual: how often it does that along columns;
    skew: columns in shared memory that are not used, so that rows begin in other banks.
Of forward and input gradient:
    hold: 1 if all taps are held in registers, 0 for one row of taps at a time.
Of the weight gradient:
    tap_rows: rows of taps whose sums a block has; parts: blocks that share out the tiles of all images.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping

from hybridpar.tvm_kernels import space
from hybridpar.tvm_kernels.machine import Gpu
from hybridpar.tvm_kernels.schedules.cuda_load import shared_unit
from hybridpar.tvm_kernels.schedules.cuda_tile import ITEM, WARP, Tile
from hybridpar.tvm_kernels.schedules.geometry import axis
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

_COMMON = ("vector", "threads_c", "threads_x", "threads_y", "virtual", "columns", "rows", "skew")
GATHER = (*_COMMON, "hold")
WEIGHT = (*_COMMON, "tap_rows", "parts")

#: Multiply-adds that may be written out for a thread; NVRTC takes about two milliseconds for each.
MOST_WRITTEN_OUT = 1600
#: Static shared memory that a block may have on every GPU.
MOST_SHARED = 48 << 10
#: Registers that a thread may be estimated to need; 255 is the architecture's limit, beyond which they spill.
MOST_REGISTERS = 168
#: Registers for addresses and indices.
_OVERHEAD = 24
#: Accesses of shared memory for each one without conflicts, and threads that an SM holds: no better kernel was found
#: beyond these (`benchmarks/gpu/results/convolutions.csv`).
MOST_CONFLICTS, LEAST_THREADS = 2.0, 256
_BANKS, _WORD = 32, 4
_MOST_GRID, _MOST_PARTS = 65535, 4096
#: Elements of a tensor: what indices of 32 bits reach.
_MOST_ELEMENTS = 1 << 31


def outside(shape: ConvShape, direction: Direction, dtype: str) -> str | None:
    """Why there are no kernels for a convolution."""
    if dtype not in ITEM:
        return f"there are no kernels for {dtype}"
    if reason := space.outside(shape, direction):
        return reason
    pixels = max(shape.height * shape.width, shape.out_height * shape.out_width)
    if shape.batch * shape.channels * pixels >= _MOST_ELEMENTS:
        return "the images are too large for indices of 32 bits"
    return None


def registers(tile: Tile) -> int:
    """Estimate the registers of a thread."""
    down, across, vector = tile.vertical, tile.horizontal, tile.vector
    row = across.used
    if tile.weight:
        sums = tile.parameters["tap_rows"] * tile.shape.kernel[1] * vector
        return sums + (across.register + min(row, 4)) * vector + _OVERHEAD
    taps = tile.taps if tile.parameters["hold"] else tile.shape.kernel[1]
    return (down.register * across.register + taps + min(row, 8)) * vector + _OVERHEAD


def written_out(tile: Tile) -> int:
    """Count the multiply-adds of a thread that are not in a loop."""
    rows = tile.vertical.register * tile.parameters["tap_rows"] if tile.weight else tile.vertical.uses
    return rows * tile.horizontal.uses * tile.vector


def reject(
    shape: ConvShape, direction: Direction, layout: Layout, dtype: str, parameters: Mapping[str, int]
) -> str | None:
    """Why parameters make no kernel; nothing else may be compiled."""
    if reason := outside(shape, direction, dtype):
        return reason
    names = WEIGHT if direction is Direction.WEIGHT_GRADIENT else GATHER
    if set(parameters) != set(names) or not all(type(value) is int for value in parameters.values()):
        return f"the parameters are {', '.join(names)}, all whole numbers"
    if reason := _reject_numbers(shape, direction, layout, parameters):
        return reason
    tile = Tile(shape, direction, layout, dtype, parameters)
    if tile.shared_bytes > MOST_SHARED:
        return f"{tile.shared_bytes} bytes of shared memory are more than {MOST_SHARED}"
    if written_out(tile) > 2 * MOST_WRITTEN_OUT:
        return "too much would be written out"
    if registers(tile) > 255:
        return "a thread would need more than 255 registers"
    if max(tile.grid[1:]) > _MOST_GRID:
        return f"there would be more than {_MOST_GRID} blocks along an axis"
    return None


def _reject_numbers(shape: ConvShape, direction: Direction, layout: Layout, own: Mapping[str, int]) -> str | None:
    """What needs no tile to be seen."""
    if own["vector"] not in (1, 2, 4) or shape.channels % own["vector"]:
        return f"vector={own['vector']} is not 1, 2 or 4, or does not divide the channels"
    if layout is not Layout.CHANNELS_LAST and own["vector"] != 1:
        return "vectors are of channels, which are no neighbours in contiguous"
    for name in ("threads_c", "threads_x", "threads_y"):
        if own[name] < 1 or own[name] & (own[name] - 1):
            return f"{name}={own[name]} is no power of two"
    threads = own["threads_c"] * own["threads_x"] * own["threads_y"]
    if not WARP <= threads <= 1024:
        return f"{threads} threads are not between {WARP} and 1024"
    if reason := space.out_of_bounds(own, virtual=8, columns=32, rows=32):
        return reason
    if not 0 <= own["skew"] <= 32:
        return "skew is between 0 and 32"
    if direction is Direction.WEIGHT_GRADIENT:
        return space.out_of_bounds(own, tap_rows=shape.kernel[0], parts=_MOST_PARTS)
    if own["hold"] not in (0, 1):
        return "hold is 0 or 1"
    if direction is Direction.INPUT_GRADIENT and (own["rows"] % shape.stride[0] or own["columns"] % shape.stride[1]):
        return "a thread's results are no multiple of the stride"
    return None


def candidates(
    shape: ConvShape, direction: Direction, layout: Layout, dtype: str, gpu: Gpu
) -> Iterator[dict[str, int]]:
    """Parameters that fit into registers and shared memory and keep a GPU busy, by what lanes wait for."""
    if outside(shape, direction, dtype) is not None:
        return
    for block in _blocks(shape, direction, layout):
        conflicts: float | None = None
        for further in _further(shape, direction, block, gpu):
            parameters = block | further
            if reject(shape, direction, layout, dtype, parameters) is not None:
                continue
            tile = Tile(shape, direction, layout, dtype, parameters)
            if registers(tile) > MOST_REGISTERS or written_out(tile) > MOST_WRITTEN_OUT:
                continue
            conflicts = bank_conflicts(tile) if conflicts is None else conflicts
            if conflicts <= MOST_CONFLICTS and resident_blocks(tile, gpu) * tile.threads >= LEAST_THREADS:
                yield parameters


def default(shape: ConvShape, direction: Direction, layout: Layout) -> dict[str, int]:
    """What was the best most often on an H200 (`benchmarks/gpu/results/convolutions.csv`)."""
    is_sum = direction is Direction.WEIGHT_GRADIENT
    if layout is Layout.CHANNELS_LAST:
        common = {"vector": 2, "threads_c": 8, "threads_x": 4, "threads_y": 2, "virtual": 2, "columns": 7, "rows": 4}
        common |= {"threads_c": 16, "threads_x": 2, "threads_y": 8, "virtual": 1, "rows": 1} if is_sum else {}
    else:
        common = {"vector": 1, "threads_c": 8, "threads_x": 8, "threads_y": 4, "columns": 1, "rows": 7}
        common |= {"virtual": 1 if is_sum else 4}
    return common | {"skew": 0} | ({"tap_rows": shape.kernel[0], "parts": 64} if is_sum else {"hold": 1})


def _blocks(shape: ConvShape, direction: Direction, layout: Layout) -> Iterator[dict[str, int]]:
    """What a block is, for all directions."""
    last = layout is Layout.CHANNELS_LAST
    if last:
        # Fewer than four threads side by side read less than a sector, so there are as few only for as few channels.
        least = min(4, shape.channels)
        widest = [one for one in (4, 2, 1) if shape.channels % one == 0 and least * one < 2 * shape.channels][:2]
        few = shape.channels < 4
        along = ([1, 2] if few else [4, 8, 16, 32], [4, 8, 16, 32] if few else [1, 2, 4, 8], [1, 2, 4, 8], [1, 2], [0])
    else:
        widest = [1]
        along = ([1, 2, 4, 8], [4, 8, 16, 32], [1, 2, 4, 8, 16], [1, 2, 4], [0, 1])
    transposed = direction is Direction.INPUT_GRADIENT
    columns = [one for one in (1, 2, 4, 7, 8) if not transposed or one % shape.stride[1] == 0]
    rows = [one for one in (1, 2, 4, 7, 8) if not transposed or one % shape.stride[0] == 0]
    for (c, x, y, virtual, skew), vector, column, row in itertools.product(
        itertools.product(*along), widest, columns, rows
    ):
        threads = c * x * y
        if not 64 <= threads <= 256 or c * vector >= 2 * shape.channels:
            continue
        if not last and column > (2 if transposed else 1) * shape.stride[1]:
            continue  # neighbouring threads would write far apart
        if not (
            _fits(axis(shape, direction, 0).out, row, y) and _fits(axis(shape, direction, 1).out, column * virtual, x)
        ):
            continue
        own = {"vector": vector, "threads_c": c, "threads_x": x, "threads_y": y}
        yield own | {"virtual": virtual, "columns": column, "rows": row, "skew": skew}


def _further(shape: ConvShape, direction: Direction, own: Mapping[str, int], gpu: Gpu) -> Iterator[dict[str, int]]:
    """What only some directions have."""
    if direction is not Direction.WEIGHT_GRADIENT:
        yield from ({"hold": hold} for hold in (0, 1))
        return
    groups = -(-shape.channels // (own["threads_c"] * own["vector"]))
    tiles = _tiles(shape.out_height, own["rows"] * own["threads_y"])
    tiles *= _tiles(shape.out_width, own["columns"] * own["threads_x"] * own["virtual"])
    for tap_rows in {shape.kernel[0], -(-shape.kernel[0] // 2)}:
        blocks = groups * -(-shape.kernel[0] // tap_rows)
        wanted = {max(1, round(waves * gpu.processors / blocks)) for waves in (2, 4, 8)}
        for parts in sorted({min(one, shape.batch * tiles, 512) for one in wanted}):
            yield {"tap_rows": tap_rows, "parts": parts}


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def _fits(size: int, own: int, threads: int) -> bool:
    """Whether less than half of an axis' threads have nothing to do."""
    return threads == 1 or _tiles(size, own * threads) * own * threads < 2 * size


# --------------------------------------------------------------------------------------- shared memory and occupancy


def wavefronts(addresses: Iterable[int], width: int) -> int:
    """How many times shared memory is accessed for one access of a warp.

    Wide accesses go half by half (8 bytes) or quarter by quarter (16). Lanes of a part that want the same word share
    it; those that want different words of one bank wait for each other.
    """
    places = list(addresses)
    together = WARP * _WORD // max(width, _WORD)
    count = 0
    for begin in range(0, len(places), together):
        words = {
            word
            for place in places[begin : begin + together]
            for word in range(place // _WORD, (place + width - 1) // _WORD + 1)
        }
        banks = [word % _BANKS for word in words]
        count += max(banks.count(bank) for bank in set(banks))
    return count


def lane_addresses(tile: Tile, warp: int = 0) -> list[int]:
    """Where each lane of a warp reads from shared memory first."""
    own = tile.parameters
    sizes = {"c": own["threads_c"], "x": own["threads_x"], "y": own["threads_y"]}
    order = ("c", "x", "y") if tile.last else ("x", "y", "c")
    found = []
    for lane in range(WARP):
        rest, at = warp * WARP + lane, {}
        for name in order:
            at[name], rest = rest % sizes[name], rest // sizes[name]
        unit = shared_unit(tile, at["c"], at["y"] * tile.vertical.unit_step, at["x"] * tile.horizontal.unit_step)
        found.append(int(unit) * tile.vector * ITEM[tile.dtype])
    return found


def bank_conflicts(tile: Tile) -> float:
    """How often shared memory is accessed for one access of a warp, relative to an access without conflicts."""
    width = tile.vector * ITEM[tile.dtype]
    return _wavefronts(tuple(lane_addresses(tile)), width) / max(1, WARP * width // (_BANKS * _WORD))


_wavefronts = functools.lru_cache(4096)(wavefronts)


def resident_blocks(tile: Tile, gpu: Gpu) -> int:
    """How many blocks an SM holds at a time."""
    per_warp = -(-registers(tile) * WARP // 256) * 256  # registers are given out by 256 to a warp
    limits = (
        gpu.blocks,
        gpu.threads // tile.threads,
        gpu.registers // (per_warp * tile.threads // WARP),
        gpu.shared_bytes // (tile.shared_bytes + 1024),  # the system keeps a kilobyte of each
    )
    return min(limits)
