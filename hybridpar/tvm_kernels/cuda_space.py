"""Which kernels are tried on a GPU: those that keep an SM busy, and whose lanes hardly wait for each other.

Bank conflicts are counted from where the lanes of a warp read in shared memory first, as the schedule has it
(`schedules/cuda.py`); a test compares that with the generated source.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from hybridpar.tvm_kernels.machine import Gpu
from hybridpar.tvm_kernels.schedules.cuda import WARP, Tile, Tiling
from hybridpar.tvm_kernels.shapes import ITEM, Direction, KernelKey, Layout

#: Multiply-adds beside each other; registers that a thread may be estimated to need, as beyond 255 they spill; accesses
#: of shared memory for each one without conflicts; and threads that an SM holds. Of kernels written out by
#: hand no better one was found beyond (`benchmarks/gpu/results/convolutions.csv`).
MOST_WRITTEN_OUT, MOST_REGISTERS, MOST_CONFLICTS, LEAST_THREADS = 1600, 168, 2.0, 256
_BANKS, _WORD = 32, 4


def candidates(key: KernelKey, gpu: Gpu) -> Iterator[dict[str, int]]:
    """All parameters that are worth a try; a search can climb from each to the next."""
    for parameters in _tiles(key):
        conflicts: float | None = None  # they hardly follow from the rest
        for further in _further(key, parameters, gpu):
            tiling = Tiling(key, Tile(**parameters, **further))
            if tiling.registers > MOST_REGISTERS or tiling.written_out > MOST_WRITTEN_OUT or tiling.check():
                continue
            conflicts = bank_conflicts(tiling) if conflicts is None else conflicts
            if conflicts <= MOST_CONFLICTS and resident_blocks(tiling, gpu) * tiling.tile.threads >= LEAST_THREADS:
                yield parameters | further


def _tiles(key: KernelKey) -> Iterator[dict[str, int]]:
    """What all directions have."""
    shape = key.shape
    last, transposed = key.layout is Layout.CHANNELS_LAST, key.direction is Direction.INPUT_GRADIENT
    few = shape.channels < 4
    if last:
        # Fewer than four threads side by side read less than a sector, so there are as few only for as few channels.
        vectors = [size for size in (4, 2, 1) if shape.channels % size == 0 and (few or 4 * size < 2 * shape.channels)]
        sizes = ([1, 2] if few else [4, 8, 16, 32], [4, 8, 16, 32] if few else [1, 2, 4, 8], [1, 2, 4, 8], [1, 2], [0])
    else:
        vectors = [1]
        sizes = ([1, 2, 4, 8], [4, 8, 16, 32], [1, 2, 4, 8, 16], [1, 2, 4], [0, 1])
    height, width = (shape.height, shape.width) if transposed else (shape.out_height, shape.out_width)
    steps = shape.stride if transposed else (1, 1)
    rows, columns = ([size for size in (1, 2, 4, 7, 8) if size % step == 0] for step in steps)
    names = ("vector", "rows", "columns", "threads_c", "threads_x", "threads_y", "virtual", "pad")
    for numbers in itertools.product(vectors[:2], rows, columns, *sizes):
        tile = dict(zip(names, numbers, strict=True))
        channels = tile["threads_c"] * tile["vector"]
        if not 64 <= tile["threads_c"] * tile["threads_x"] * tile["threads_y"] <= 256 or channels >= 2 * shape.channels:
            continue
        if not last and tile["columns"] > (2 if transposed else 1) * shape.stride[1]:
            continue  # neighbouring threads would write far apart
        if _fits(height, tile["rows"], tile["threads_y"]) and _fits(
            width, tile["columns"] * tile["virtual"], tile["threads_x"]
        ):
            yield tile


def _further(key: KernelKey, parameters: dict[str, int], gpu: Gpu) -> Iterator[dict[str, int]]:
    """What only some directions have."""
    if key.direction is not Direction.WEIGHT_GRADIENT:
        yield from ({"hold_taps": hold} for hold in (0, 1))
        return
    taps = key.shape.kernel[0]
    for tap_rows in sorted({taps, -(-taps // 2)}):
        tiling = Tiling(key, Tile(**parameters, tap_rows=tap_rows))
        tiles = key.shape.batch * tiling.blocks[0] * tiling.blocks[1]
        blocks = tiling.grid[0] * tiling.grid[2]
        wanted = {max(1, round(waves * gpu.processors / blocks)) for waves in (2, 4, 8)}
        for parts in sorted({min(number, tiles, 512) for number in wanted}):
            yield {"tap_rows": tap_rows, "split_k": parts}


def _fits(size: int, results: int, threads: int) -> bool:
    """Whether less than half of an axis' threads have nothing to do."""
    return threads == 1 or -(-size // (results * threads)) * results * threads < 2 * size


# --------------------------------------------------------------------------------------- shared memory and occupancy


@functools.lru_cache(4096)
def wavefronts(addresses: tuple[int, ...], width: int) -> int:
    """How many times shared memory is accessed for one access of a warp.

    Wide accesses go half by half (8 bytes) or quarter by quarter (16). Lanes of a part that want the same word share
    it; those that want different words of one bank wait for each other.
    """
    together = WARP * _WORD // max(width, _WORD)
    count = 0
    for begin in range(0, len(addresses), together):
        words = {
            word
            for address in addresses[begin : begin + together]
            for word in range(address // _WORD, (address + width - 1) // _WORD + 1)
        }
        banks = [word % _BANKS for word in words]
        count += max(banks.count(bank) for bank in set(banks))
    return count


def lane_addresses(tiling: Tiling) -> tuple[int, ...]:
    """Where each lane of a block's first warp reads from the tile in shared memory first, in bytes."""
    tile, (height, width) = tiling.tile, tiling.shared
    pixels = tile.threads_x * tile.threads_y
    down = tiling.input_index(0, tile.rows, 0) - tiling.input_index(0, 0, 0)
    across = (tiling.input_index(1, tile.columns, 0) - tiling.input_index(1, 0, 0)) // tiling.phases

    def element(lane: int) -> int:
        if tiling.channels_last:
            pixel, c = divmod(lane, tile.threads_c)
        else:
            c, pixel = divmod(lane, pixels)
        row, column = pixel // tile.threads_x * down, pixel % tile.threads_x * across
        if tiling.channels_last:
            return int((row * width + column) * tile.threads_c + c) * tile.vector
        return int((c * height + row) * width + column)

    return tuple(element(lane) * ITEM[tiling.dtype] for lane in range(WARP))


def bank_conflicts(tiling: Tiling) -> float:
    """How often shared memory is accessed for one access of a warp, relative to an access without conflicts."""
    width = tiling.tile.vector * ITEM[tiling.dtype]
    return wavefronts(lane_addresses(tiling), width) / max(1, WARP * width // (_BANKS * _WORD))


def resident_blocks(tiling: Tiling, gpu: Gpu) -> int:
    """How many blocks an SM holds at a time."""
    per_warp = -(-tiling.registers * WARP // 256) * 256  # registers are given out by 256 to a warp
    limits = (
        gpu.blocks,
        gpu.threads // tiling.tile.threads,
        gpu.registers // (per_warp * tiling.tile.threads // WARP),
        gpu.shared_bytes // (tiling.shared_bytes + 1024),  # the system keeps a kilobyte of each
    )
    return min(limits)
