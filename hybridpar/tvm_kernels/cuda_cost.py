"""Predicts what a candidate costs on a GPU, from the work that it would do.

Counted are: bytes that move between memory and the SMs, with the halo that neighbouring tiles read twice and the unused
parts of 32-byte sectors; instructions; accesses of shared memory, each as many times as lanes of a
warp need different words of one bank; and how many blocks an SM holds at a time, by threads, registers and shared
memory. It is about which candidate is better than which, not about milliseconds.

Bank conflicts come from the schedule's own index expressions (`cuda_load.shared_unit`), evaluated for a warp.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from hybridpar.tvm_kernels.cuda_space import registers, written_out
from hybridpar.tvm_kernels.machine import Gpu
from hybridpar.tvm_kernels.schedules.cuda_load import BATCH, shared_unit
from hybridpar.tvm_kernels.schedules.cuda_tile import ITEM, WARP, Tile
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

_BANKS, _WORD, _SECTOR = 32, 4, 32
#: Bytes that must be under way to keep memory busy, seconds that it takes to answer.
_LATENCY = 6e-7
#: How many times as fast as memory the last cache is, cycles of a barrier and a block's beginning, seconds of a launch.
_LEVEL2, _START, _LAUNCH = 2.2, 600.0, 2e-6
#: Instructions for the place of an element that is brought into shared memory.
_PLACE = 14.0


def wavefronts(addresses: Iterable[int], width: int) -> int:
    """How many times shared memory is accessed for one access of a warp.

    Wide accesses go half by half (8 bytes) or quarter by quarter (16). Lanes of a part that want the same word share
    it; those that want different words of one bank wait for each other.

    Args:
        addresses: In bytes, of each lane, multiples of `width`.
        width: Bytes of each lane.

    Returns:
        Number of accesses.
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
    """Where each lane of a warp reads from shared memory first.

    Args:
        tile: Of the candidate.
        warp: Number of the warp in its block.

    Returns:
        Bytes from the start of the input's tile, of each lane.
    """
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
    """How often shared memory is accessed for one access of a warp, relative to an access without conflicts.

    Args:
        tile: Of the candidate.

    Returns:
        1 without conflicts, else more.
    """
    width = tile.vector * ITEM[tile.dtype]
    return _wavefronts(tuple(lane_addresses(tile)), width) / max(1, WARP * width // (_BANKS * _WORD))


_wavefronts = functools.lru_cache(4096)(wavefronts)


def resident_blocks(tile: Tile, gpu: Gpu) -> int:
    """How many blocks an SM holds at a time.

    Args:
        tile: Of the candidate.
        gpu: That it runs on.

    Returns:
        Number of blocks; 0 where it cannot hold one.
    """
    per_warp = -(-registers(tile) * WARP // 256) * 256  # registers are given out by 256 to a warp
    limits = (
        gpu.blocks,
        gpu.threads // tile.threads,
        gpu.registers // (per_warp * tile.threads // WARP),
        gpu.shared_bytes // (tile.shared_bytes + 1024),  # the system keeps a kilobyte of each
    )
    return min(limits)


def estimate(
    shape: ConvShape, direction: Direction, layout: Layout, dtype: str, parameters: Mapping[str, int], gpu: Gpu
) -> float:
    """Predict how long a call takes.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        layout: Of the images.
        dtype: Of all tensors.
        parameters: Of the candidate.
        gpu: That it runs on.

    Returns:
        Seconds; infinite where an SM cannot hold a block.
    """
    tile = Tile(shape, direction, layout, dtype, parameters)
    blocks = tile.grid[0] * tile.grid[1] * tile.grid[2]
    resident = resident_blocks(tile, gpu)
    if not resident:
        return float("inf")
    # Tiles of the image, each brought once for each group of rows of taps.
    tiles = shape.batch * tile.channel_blocks * tile.vertical.tiles * tile.horizontal.tiles
    tiles *= tile.tap_groups if tile.weight else 1
    held = min(resident, -(-blocks // gpu.processors))
    memory_s = _memory(tile, tiles, blocks, held, gpu)
    instructions, accesses = _work(tile)
    # Blocks come in waves; the last one takes as long as the others.
    waves = -(-blocks // (gpu.processors * resident)) * gpu.processors * resident / blocks
    tail = max(1.0, min(waves, 2.0)) if blocks > gpu.processors else gpu.processors / blocks
    per_second = gpu.processors * gpu.clock
    warps = tile.threads / WARP
    arithmetic_s = tail * tiles * warps * instructions * WARP / 128 / per_second
    # With few warps an instruction waits for the one before it.
    arithmetic_s *= max(1.0, 8 / (held * warps))
    shared_s = tail * tiles * warps * accesses / per_second
    parts = sorted((memory_s, arithmetic_s, shared_s))
    start = -(-blocks // (gpu.processors * resident)) * _START / gpu.clock
    launches = 2 if tile.weight else 1
    merged = 8.0 * tile.scratch_bytes / 4 / gpu.bandwidth
    return parts[2] + 0.35 * (parts[0] + parts[1]) + start + merged + launches * _LAUNCH


def _sectors(run: int, aligned: bool) -> float:
    """Bytes that are moved for a run of so many, on average."""
    if aligned:
        return float(-(-run // _SECTOR) * _SECTOR)
    return float(run + _SECTOR - 1)


def _memory(tile: Tile, tiles: int, blocks: int, held: int, gpu: Gpu) -> float:
    """Seconds of traffic."""
    shape, item = tile.shape, ITEM[tile.dtype]
    down, across = tile.vertical, tile.horizontal
    if tile.last:
        run = min(tile.channels, shape.channels) * item
        brought = tiles * down.reach * across.reach * _sectors(run, shape.channels * item % _SECTOR == 0)
        written_run, per_tile = run, down.tile * across.tile
    else:
        run = across.reach * item
        brought = tiles * down.reach * tile.channels * _sectors(run, aligned=False)
        # Lanes that hold several columns write each with a gap to their neighbours', so a sector goes several times.
        written_run, per_tile = across.tile * item * min(across.register, _SECTOR // item), down.tile * tile.channels
    other = tiles * per_tile * _sectors(written_run, tile.last and written_run % _SECTOR == 0)
    source = shape.batch * shape.channels * down.along.size * across.along.size * item
    result = shape.batch * shape.channels * down.along.out * across.along.out * item
    from_memory = (source + result) / gpu.bandwidth
    through_cache = (brought + other) / (_LEVEL2 * gpu.bandwidth)
    # A block has so many bytes under way; with too few of them memory waits for requests.
    wanted = gpu.bandwidth * _LATENCY / gpu.processors
    under_way = held * min(tile.threads * BATCH * tile.vector * item, tile.input_elements * item)
    busy = min(1.0, under_way / wanted) * min(1.0, blocks / gpu.processors)
    return max(from_memory, through_cache) / max(busy, 0.05)


def _work(tile: Tile) -> tuple[float, float]:
    """Of a thread and a tile: instructions, accesses of shared memory, and what conflicts multiplied those by."""
    down, across, vector = tile.vertical, tile.horizontal, tile.vector
    per_lane = tile.vector * ITEM[tile.dtype]
    least = max(1, WARP * per_lane // (_BANKS * _WORD))
    conflicts = bank_conflicts(tile)
    row, uses = across.used, down.uses
    if tile.weight:
        loads = float(tile.parameters["tap_rows"] * down.register * row)
    elif tile.parameters["hold"]:
        loads = float(down.used * row)
    else:
        loads = float(uses * row)
    loads *= across.virtual
    taps = 0.0 if tile.weight else tile.taps * (across.virtual if not tile.parameters["hold"] else 1)
    multiply_adds = written_out(tile) * across.virtual
    brought = down.reach * across.reach * tile.channels / vector / tile.threads
    results = down.register * across.register * across.virtual
    widen = 0.0 if tile.dtype == "float32" else 1.0
    instructions = multiply_adds + loads * (1 + widen * vector) + taps + brought * _PLACE
    instructions += results * (4 + widen * vector) + 60
    accesses = loads * least * conflicts + taps * max(1, vector) + brought * least
    return instructions, accesses
