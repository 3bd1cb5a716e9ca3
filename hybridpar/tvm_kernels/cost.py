"""Cost model of kernels for CPUs: predicts the cycles of a candidate, since compiling and timing one takes a second.

The model adds up, per register tile, multiply-adds, loads and stores, and the loads that a lack of registers adds; or
counts the latency of sums that depend on themselves, where that is more. To that it adds how often cache lines move
from L2 into L1, by which rows of which channels fit there, and the traffic with memory; for contiguous images also the
time to copy and transpose them. It is made to order candidates, not to predict milliseconds;
`benchmarks.kernels.ranking` compares its order with measurements.

Loads and stores count beside multiply-adds, and not only where they are the bottleneck: measured times are told far
better by the weighted sum than by the busiest port. Weights are fitted to times of CPUs with AVX2 and with AVX-512.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from hybridpar.tvm_kernels.machine import FAR, Machine
from hybridpar.tvm_kernels.schedules.geometry import Axis, Span, axis, by_input, interior, spans
from hybridpar.tvm_kernels.schedules.planes import PaddedTile, padded_tile, turned_tile
from hybridpar.tvm_kernels.shapes import ConvShape, Direction

_LATENCY = 4
#: What a load and a store of a vector count, in multiply-adds, of which a core does 64 bytes a cycle.
_LOAD, _STORE, _BYTES = 0.6, 1.4, 64
_LINE = 64
#: Sets of a common L1, between which lines are shared out by their address.
_SETS = 64
#: Cycles for a line from L2 to L1, in parts of planes and in channels_last.
_IN_ORDER, _IN_STEPS = 3.0, 0.5
#: Cycles around each tile for addresses and loops, and for a loop whose length varies.
_TILE, _MISPREDICTED = 2.0, 14.0
#: Cycles of a byte from the last cache, from memory in steps, and of one that is read or written in order.
_PER_NEAR_BYTE, _PER_BYTE, _PER_STREAMED_BYTE = 0.12, 0.25, 0.1
#: Cycles to copy a vector and to copy two apart, around a padded tile, a row and a plane, and to transpose a vector.
_COPY, _SPLIT, _PADDED, _ROW, _PLANE, _TURN = 1.2, 2.5, 3.0, 2.5, 20.0, 5.0
#: Of the weight gradient in channels_last, fitted to candidates of an AVX-512 CPU whose tensors were in no cache: what
#: a load counts, and what a lacking register; registers that the compiler takes; cycles around a row and a pass, and of
#: a vector of sums that is fetched and put back; cycles of a byte from the last cache, from memory in order and not in
#: order, and more of one that is read in steps.
_TAP_LOAD, _SPILL, _TAKEN, _TAP_ROW, _SUM = 0.3, 3.0, 4, 2.0, 8.0
_PER_NEAR_TAP_BYTE, _PER_SWEPT_BYTE, _PER_UNSWEPT_BYTE, _PER_STEP_BYTE = 0.4, 0.37, 0.45, 0.16
#: Cycles for a line from L2 from some planes at a time, and of a vector of sums that is folded.
_PLANES_CYCLES, _FOLD = 6.0, 8.0


@dataclass(frozen=True)
class Cost:
    """Cycles of all the work on one thread.

    Attributes:
        compute: In the register tiles.
        lines: For lines that come from L2.
        memory: For what comes from behind the caches.
        share: Of all that, what the busiest thread does.
    """

    compute: float
    lines: float
    memory: float
    share: float

    @property
    def cycles(self) -> float:
        """Until the last thread is done: what overlaps partly counts partly."""
        parts = sorted((self.compute + 0.5 * self.lines, self.memory))
        return self.share * (parts[1] + 0.4 * parts[0])


def _cycles(
    machine: Machine, multiply_adds: float, loads: float, stores: float, sums: float, live: float, held: float
) -> float:
    """Cycles of code without branches.

    Where registers are too few, taps or gradients that should be held are read again for each use, and beyond that sums
    are stored and loaded.

    Args:
        machine: The CPU.
        multiply_adds: Vectors that are multiplied and added.
        loads: Vectors that are loaded.
        stores: Vectors that are stored.
        sums: Sums that do not depend on each other.
        live: Vectors that are needed at a time.
        held: Taps or gradients among them.
    """
    lacking = live - machine.registers
    if lacking > 0:
        loads += multiply_adds * min(1.0, lacking / max(held, 1)) + max(0.0, lacking - held) * 2
    issued = machine.lanes * 4 / _BYTES * (multiply_adds + _LOAD * loads + _STORE * stores)
    return max(issued, multiply_adds * _LATENCY / max(sums, 1))


def _memory_cycles(shape: ConvShape, machine: Machine, own: Mapping[str, int], written: float = 0.0) -> float:
    """Cycles for what comes from behind the caches of a core, and for what is written there."""
    size = shape.least_bytes
    if size <= (512 << 10):
        return 0.0
    if size <= FAR:
        return size * _PER_NEAR_BYTE
    streamed = written * bool(own.get("stream"))
    swept = (size - written) * bool(own.get("sweep"))
    return (streamed + swept) * _PER_STREAMED_BYTE + (size - streamed - swept) * _PER_BYTE


def _share_of(units: int, threads: int) -> float:
    """The part of all work that the busiest of some threads does, where the work is cut into equal units."""
    return -(-units // threads) / units


# ------------------------------------------------------------------------------------- forward and input gradient


def gather_cost(shape: ConvShape, direction: Direction, own: Mapping[str, int], threads: int, machine: Machine) -> Cost:
    """Forward or input gradient in channels_last.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        own: Parameters of the candidate.
        threads: That share the work.
        machine: The CPU.

    Returns:
        The cost.
    """
    vertical, horizontal = axis(shape, direction, 0), axis(shape, direction, 1)
    rows, strip = own["tile_rows"], own["strip"]
    vectors = -(-own["lanes"] // machine.lanes)
    blocks = -(-shape.channels // own["lanes"])
    columns = spans(horizontal, own["tile_columns"])
    inner = interior(vertical, rows) if own["unroll"] else None
    tiles = inner.count if inner else 0
    compute = 0.0
    for span in columns:
        if inner is not None:
            compute += tiles * span.count * _whole_tile(inner, span, vectors, machine)
        compute += span.count * _border_rows(vertical, inner, span, vectors, machine)
    compute *= shape.batch * blocks
    lines = _lines(shape, vertical, horizontal, own, machine)
    turned = shape.channels * shape.kernel[0] * shape.kernel[1] * 2.0
    strips = -(-vertical.out // strip)
    written = 4 * shape.batch * shape.channels * vertical.out * horizontal.out
    memory = _memory_cycles(shape, machine, own, written)
    return Cost(compute + turned, shape.batch * lines * _IN_STEPS, memory, _share_of(shape.batch * strips, threads))


def _whole_tile(inner: Span, span: Span, vectors: int, machine: Machine) -> float:
    """A tile without loops."""
    multiply_adds = loads = taps = 0
    input_columns = by_input(span.taps)
    column_uses = sum(len(uses) for _, uses in input_columns)
    for _, row_uses in by_input(inner.taps):
        own = len({tap for _, tap in row_uses}) * len({tap for _, uses in input_columns for _, tap in uses})
        loads += len(input_columns) + own
        multiply_adds += len(row_uses) * column_uses
        taps = max(taps, own)
    sums = inner.width * span.width
    work = multiply_adds * vectors
    live, held, sums = (sums + taps + 1) * vectors, taps * vectors, sums * vectors
    return _cycles(machine, work, loads * vectors + sums, sums, sums, live, held) + _TILE


def _border_rows(vertical: Axis, inner: Span | None, span: Span, vectors: int, machine: Machine) -> float:
    """All rows that go row of taps by row of taps."""
    input_columns = by_input(span.taps)
    work = sum(len(uses) for _, uses in input_columns) * vectors
    taps = len({tap for _, uses in input_columns for _, tap in uses})
    loads, live = (len(input_columns) + taps) * vectors, (span.width + taps + 1) * vectors
    step = _cycles(machine, work, loads, 0, span.width * vectors, live, taps * vectors) + 3
    first, last = (inner.start, inner.start + inner.count * inner.width) if inner else (0, 0)
    outside = [row for row in range(vertical.out) if not first <= row < last]
    steps = sum(len(vertical.bounded(row)) for row in outside)
    return steps * step + len(outside) * (span.width * vectors + _TILE + _MISPREDICTED)


def _lines(shape: ConvShape, vertical: Axis, horizontal: Axis, own: Mapping[str, int], machine: Machine) -> float:
    """Lines of one image's input that come from L2."""
    rows, strip, pixel = own["tile_rows"], own["strip"], max(1.0, own["lanes"] * 4 / _LINE)
    down, across = _reach(vertical, rows), _reach(horizontal, own["tile_columns"])
    tiles_down, tiles_across = -(-vertical.out // rows), -(-horizontal.out // own["tile_columns"])
    if own["columns_outer"]:
        kept = down * across * shape.channels * 4 <= 0.75 * (32 << 10)
        columns = horizontal.size if kept else across * tiles_across
        return tiles_down * down * columns * shape.channels * 4 / _LINE
    room = _room(shape, own["lanes"], machine)
    strips, blocks = -(-vertical.out // strip), -(-shape.channels // own["lanes"])
    if (down * horizontal.size + rows * horizontal.out) * pixel <= room:
        return strips * blocks * _reach(vertical, strip) * horizontal.size * pixel
    columns = horizontal.size if down * across * pixel <= room else across * tiles_across
    return blocks * tiles_down * down * columns * pixel


def _reach(along: Axis, count: int) -> int:
    """Input elements that so many output elements use."""
    used = [place for out in range(min(count, along.out)) for _, place in along.unbounded(out)]
    return min(along.size, max(used) - min(used) + 1) if used else 0


def _room(shape: ConvShape, lanes: int, machine: Machine) -> float:
    """Lines of a block of channels that L1 keeps: pixels some powers of two apart share its few sets."""
    step = shape.channels * 4 // _LINE
    apart = math.gcd(step, _SETS) if shape.channels * 4 % _LINE == 0 else 1
    return 0.75 * (32 << 10) / _LINE * min(1.0, max(1.0, lanes * 4 / _LINE) / apart)


# --------------------------------------------------------------------------------------------------- weight gradient


def weight_cost(shape: ConvShape, direction: Direction, own: Mapping[str, int], threads: int, machine: Machine) -> Cost:
    """The weight gradient in channels_last. Measured, its work and its memory traffic do not overlap.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        own: Parameters of the candidate.
        threads: That share the work.
        machine: The CPU.

    Returns:
        The cost.
    """
    size = shape.least_bytes
    per_byte = 0.0 if size <= (512 << 10) else _PER_NEAR_TAP_BYTE
    if size > FAR:
        per_byte = _PER_SWEPT_BYTE if own.get("sweep") else _PER_UNSWEPT_BYTE
        per_byte += _PER_STEP_BYTE * (not own.get("sweep") and own["lanes"] < shape.channels)
    cycles = _tap_sums(shape, own, machine) + per_byte * size
    return Cost(cycles, 0.0, 0.0, _share_of(own["parts"] * own["groups"], threads))


def _tap_sums(shape: ConvShape, own: Mapping[str, int], machine: Machine) -> float:
    """Cycles to add up the taps' sums from images in a cache."""
    vertical, horizontal = axis(shape, Direction.FORWARD, 0), axis(shape, Direction.FORWARD, 1)
    lanes, tap_columns = own["lanes"], own["tap_columns"]
    vectors = -(-lanes // machine.lanes)
    blocks = -(-shape.channels // lanes)
    groups_across = -(-shape.kernel[1] // tap_columns)
    columns = [(span, by_input(span.taps)) for span in spans(horizontal, own["tile_columns"])]

    def row(tap_rows: int) -> float:
        """An output row for some rows of taps."""
        sums, cycles = tap_rows * tap_columns * vectors, float(_TAP_ROW)
        for span, inputs in columns:
            adds = sum(len(uses) for _, uses in inputs) * tap_rows * vectors / groups_across
            loads = float((span.width + len(inputs) * tap_rows) * vectors)
            # A single row of taps is done with a gradient as soon as its columns have passed.
            held = (span.width if tap_rows > 1 else min(span.width, shape.kernel[1])) * vectors
            lacking = sums + held + vectors - (machine.registers - _TAKEN)
            if lacking > 0:
                loads += _SPILL * (adds * min(1.0, lacking / held) + max(0, lacking - held))
            issued = machine.lanes * 4 / _BYTES * (adds + _TAP_LOAD * loads)
            cycles += span.count * max(issued, adds * _LATENCY / sums)
        return cycles

    image = 0.0
    for tap_rows, rows, passes in _passes(vertical, shape.kernel[0], own["tap_rows"], own["strip"]):
        image += rows * row(tap_rows) + passes * (_SUM * tap_rows * tap_columns * vectors + _TAP_ROW)
    taps = shape.kernel[0] * shape.kernel[1]
    merged = own["parts"] * taps * blocks * vectors * 2 + taps * shape.channels * 2.0
    return shape.batch * blocks * groups_across * image + merged


@functools.cache
def _passes(vertical: Axis, taps: int, together: int, strip: int) -> tuple[tuple[int, int, int], ...]:
    """Passes over the strips of an image: (rows of taps, output rows, passes).

    Rows of taps that all meet the image share a pass; at a border each has one of its own.
    """
    rows_of: list[set[int]] = [set() for _ in range(taps)]
    for row in range(vertical.out):
        for tap, _ in vertical.bounded(row):
            rows_of[tap].add(row)
    found: dict[int, list[int]] = {}
    for first in range(0, taps, together):
        group = rows_of[first : first + together]
        joint = set.intersection(*group)
        for top in range(0, vertical.out, strip):
            own = set(range(top, min(top + strip, vertical.out)))
            shared = [(len(group), own & joint)] if own & joint else []
            apart = [(1, (rows & own) - joint) for rows in group] if len(group) > 1 and own - joint else []
            for count, rows in shared + apart:
                total = found.setdefault(count, [0, 0])
                total[0] += len(rows)
                total[1] += 1
    return tuple((count, rows, passes) for count, (rows, passes) in found.items())


# ------------------------------------------------------------------------------------------- contiguous images


def _fill(padded: PaddedTile, lanes: int, machine: Machine) -> float:
    """Copying the rows of a padded tile, the border too, in vectors of the machine."""
    pieces = max(1.0, lanes / machine.lanes)
    if padded.phases == 1:
        one = (padded.columns // lanes * pieces or padded.columns) * _COPY + (padded.columns % lanes > 0)
    else:
        pairs = padded.columns // 2
        one = (pairs // lanes * pieces or padded.columns) * _SPLIT + (pairs % lanes > 0) * _SPLIT
    return padded.rows * (one + _ROW)


def rows_cost(shape: ConvShape, direction: Direction, own: Mapping[str, int], threads: int, machine: Machine) -> Cost:
    """Forward or input gradient over columns.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        own: Parameters of the candidate.
        threads: That share the work.
        machine: The CPU.

    Returns:
        The cost.
    """
    vertical, horizontal = axis(shape, direction, 0), axis(shape, direction, 1)
    lanes, rows, strip = own["lanes"], own["tile_rows"], own["strip"]
    whole, phases = vertical.whole, horizontal.whole
    padded = padded_tile(vertical, horizontal, strip)
    strips = -(-(-(-vertical.out // whole) * whole) // strip)
    tiles_down = -(-strip // rows)
    count = -(-horizontal.out // (lanes * phases))
    column_uses = by_input(tuple(horizontal.unbounded(phase) for phase in range(phases)))
    row_uses = by_input(tuple(vertical.unbounded(row) for row in range(rows)))
    per_vector_adds = sum(len(uses) for _, uses in row_uses) * sum(len(uses) for _, uses in column_uses)
    per_vector_loads = len(row_uses) * len(column_uses)
    taps = shape.kernel[0] * shape.kernel[1]

    def tile(vectors: int) -> float:
        sums = rows * vectors * phases
        adds = per_vector_adds * vectors
        held = taps if taps <= 9 else shape.kernel[1]
        loads = per_vector_loads * vectors + (0 if taps <= 9 else taps)
        stored = sums * (1 if phases == 1 else 2)
        return _cycles(machine, adds, loads, stored, sums, sums + held + 1, held) + 0.5 * stored + _PADDED

    whole_tiles, rest = divmod(count, own["tile_vectors"])
    compute = tiles_down * (whole_tiles * tile(own["tile_vectors"]) + (tile(rest) if rest else 0.0))
    planes = shape.batch * shape.channels
    total = planes * (_PLANE + strips * (compute + _fill(padded, lanes, machine)))
    moved = 0.0  # where a padded tile fits into L1 it stays there
    if padded.places * 4 > 0.75 * (32 << 10):
        moved = planes * strips * padded.places * 4 / _LINE * _IN_ORDER * 2
    return Cost(total, moved, _memory_cycles(shape, machine, own), _share_of(own["parts"], threads))


def rows_weight_cost(
    shape: ConvShape, direction: Direction, own: Mapping[str, int], threads: int, machine: Machine
) -> Cost:
    """The weight gradient over columns.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        own: Parameters of the candidate.
        threads: That share the work.
        machine: The CPU.

    Returns:
        The cost.
    """
    vertical, horizontal = axis(shape, direction, 0), axis(shape, direction, 1)
    lanes, rows, strip = own["lanes"], own["tile_rows"], own["strip"]
    padded = padded_tile(vertical, horizontal, strip)
    groups = -(-shape.kernel[0] // own["tap_rows"]) * -(-shape.kernel[1] // own["tap_columns"])
    sums = own["tap_rows"] * own["tap_columns"]
    met = (rows - 1) * vertical.stride + (own["tap_rows"] - 1) * vertical.dilation + 1
    met = min(met, rows * own["tap_rows"])
    loads = met * own["tap_columns"] + rows
    vector = _cycles(machine, rows * sums, loads, 0, sums, sums + rows + 1, rows) + 1
    count = -(-shape.out_width // lanes)
    passes = shape.out_height / rows * count * vector + shape.out_height / rows * _ROW
    held = -(-shape.out_height // strip) * groups * (2 * sums + _PADDED)
    planes = shape.batch * shape.channels
    strips = shape.out_height / strip
    total = planes * (_PLANE + groups * passes + held + strips * _fill(padded, lanes, machine))
    total += own["parts"] * shape.channels * shape.kernel[0] * shape.kernel[1] * _FOLD
    moved = 0.0
    if (padded.places + strip * shape.out_width) * 4 > 0.75 * (32 << 10):
        lines = (padded.places + strip * shape.out_width) * 4 / _LINE
        moved = planes * strips * lines * groups * _IN_ORDER
    memory = _memory_cycles(shape, machine, own)
    return Cost(total, moved, memory, _share_of(own["parts"] * own["groups"], threads))


def turned_cost(shape: ConvShape, direction: Direction, own: Mapping[str, int], threads: int, machine: Machine) -> Cost:
    """All directions over channels that are transposed first.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        own: Parameters of the candidate.
        threads: That share the work.
        machine: The CPU.

    Returns:
        The cost.
    """
    vertical, horizontal = axis(shape, direction, 0), axis(shape, direction, 1)
    lanes = own["lanes"]
    strip = min(own["strip"], vertical.out)
    vectors = max(1.0, lanes / machine.lanes)
    blocks = -(-shape.channels // lanes)
    _, padded = turned_tile(vertical, horizontal, strip, lanes)
    units = own["parts"]
    if direction is Direction.WEIGHT_GRADIENT:
        inner = _tap_sums(shape, own, machine)
        units *= own["groups"]
    else:
        inner = gather_cost(shape, direction, {**own, "columns_outer": 0}, 1, machine).compute
    strips = -(-vertical.out // strip)
    pixels = padded / lanes * strips * shape.batch * blocks
    total = inner + pixels * vectors * _TURN
    # Planes are read and written some at a time, each for a few lines only, which prefetchers hardly follow.
    lines = padded * 4 / _LINE * strips * shape.batch * blocks
    moved = lines * _PLANES_CYCLES
    if padded * 4 > 0.75 * (32 << 10):
        moved += 2 * lines * _IN_ORDER
    return Cost(total, moved, _memory_cycles(shape, machine, own), _share_of(units, threads))
