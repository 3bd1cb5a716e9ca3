"""Cost of schedules for contiguous images, which are copied or transposed before they are computed.

Counted as in `cost_channels`: multiply-adds, loads, stores and latency of a tile, and lines that move between caches.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridpar.tvm_kernels.cost_channels import (
    Cost,
    cycles_of,
    gather_cost,
    memory_cycles,
    share_of,
    spilled,
    weight_cost,
)
from hybridpar.tvm_kernels.machine import Machine
from hybridpar.tvm_kernels.schedules.geometry import axis, by_input
from hybridpar.tvm_kernels.schedules.planes import PaddedTile, padded_tile, turned_tile
from hybridpar.tvm_kernels.shapes import ConvShape, Direction

#: Cycles to copy a vector and to copy two apart, around a tile, a row and a plane, and to turn a vector.
_COPY, _SPLIT, _TILE, _ROW, _PLANE, _TURN = 1.2, 2.5, 3.0, 2.5, 20.0, 5.0
#: Cycles for a line from L2 in order, and from some planes at a time, and of a vector of sums that is folded.
_LINE_CYCLES, _PLANES_CYCLES, _FOLD = 3.0, 6.0, 8.0
_LINE = 64


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
        extra = spilled(sums + held + 1, adds, held, machine)
        loads = per_vector_loads * vectors + (0 if taps <= 9 else taps) + extra
        stored = sums * (1 if phases == 1 else 2)
        return cycles_of(adds, loads, stored, sums) + 0.5 * stored + _TILE

    whole_tiles, rest = divmod(count, own["tile_vectors"])
    compute = tiles_down * (whole_tiles * tile(own["tile_vectors"]) + (tile(rest) if rest else 0.0))
    planes = shape.batch * shape.channels
    total = planes * (_PLANE + strips * (compute + _fill(padded, lanes, machine)))
    moved = 0.0
    if padded.places * 4 > 0.75 * machine.level1:
        moved = planes * strips * padded.places * 4 / _LINE * _LINE_CYCLES * 2
    return Cost(total, moved, memory_cycles(shape, machine), share_of(own["parts"], threads))


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
    """
    vertical, horizontal = axis(shape, direction, 0), axis(shape, direction, 1)
    lanes, rows, strip = own["lanes"], own["tile_rows"], own["strip"]
    padded = padded_tile(vertical, horizontal, strip)
    groups = -(-shape.kernel[0] // own["tap_rows"]) * -(-shape.kernel[1] // own["tap_columns"])
    sums = own["tap_rows"] * own["tap_columns"]
    met = (rows - 1) * vertical.stride + (own["tap_rows"] - 1) * vertical.dilation + 1
    met = min(met, rows * own["tap_rows"])
    extra = spilled(sums + rows + 1, rows * sums, rows, machine)
    vector = cycles_of(rows * sums, met * own["tap_columns"] + rows + extra, 0, sums) + 1
    count = -(-shape.out_width // lanes)
    passes = shape.out_height / rows * count * vector + shape.out_height / rows * _ROW
    held = -(-shape.out_height // strip) * groups * (2 * sums + _TILE)
    planes = shape.batch * shape.channels
    strips = shape.out_height / strip
    total = planes * (_PLANE + groups * passes + held + strips * _fill(padded, lanes, machine))
    total += own["parts"] * shape.channels * shape.kernel[0] * shape.kernel[1] * _FOLD
    moved = 0.0
    if (padded.places + strip * shape.out_width) * 4 > 0.75 * machine.level1:
        lines = (padded.places + strip * shape.out_width) * 4 / _LINE
        moved = planes * strips * lines * groups * _LINE_CYCLES
    memory = memory_cycles(shape, machine)
    return Cost(total, moved, memory, share_of(own["parts"] * own["groups"], threads))


def turned_cost(shape: ConvShape, direction: Direction, own: Mapping[str, int], threads: int, machine: Machine) -> Cost:
    """All directions over channels that are transposed first.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        own: Parameters of the candidate.
        threads: That share the work.
        machine: The CPU.
    """
    vertical, horizontal = axis(shape, direction, 0), axis(shape, direction, 1)
    lanes = own["lanes"]
    strip = min(own["strip"], vertical.out)
    vectors = max(1.0, lanes / machine.lanes)
    blocks = -(-shape.channels // lanes)
    _, padded = turned_tile(vertical, horizontal, strip, lanes)
    units = own["parts"]
    if direction is Direction.WEIGHT_GRADIENT:
        inner = weight_cost(shape, direction, own, 1, machine).compute
        units *= own["groups"]
    else:
        inner = gather_cost(shape, direction, {**own, "columns_outer": 0}, 1, machine).compute
    strips = -(-vertical.out // strip)
    pixels = padded / lanes * strips * shape.batch * blocks
    total = inner + pixels * vectors * _TURN
    # Planes are read and written some at a time, each for a few lines only, which prefetchers hardly follow.
    lines = padded * 4 / _LINE * strips * shape.batch * blocks
    moved = lines * _PLANES_CYCLES
    if padded * 4 > 0.75 * machine.level1:
        moved += 2 * lines * _LINE_CYCLES
    return Cost(total, moved, memory_cycles(shape, machine), share_of(units, threads))
