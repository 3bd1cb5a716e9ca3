"""Why: rules say what is not worth compiling, and check a record's parameters before they become code.

Parameters of forward and input gradient in channels_last (`schedules/cpu_gather.py`):
    lanes: channels that are computed side by side; tile_rows, tile_columns: outputs held in registers;
    strip: output rows that one unit of work has; columns_outer: 1 if all channels of a tile come before the next tile;
    unroll: 1 if rows of taps are written out where none meets a border.
Of the weight gradient (`schedules/cpu_weight.py`):
    lanes: as above; tap_rows, tap_columns: taps whose sums are held in registers; tile_columns: columns of the gradient
    that pass by at a time; strip: output rows for which all taps are done before the next ones;
    parts, groups: units of work, by images and strips and by channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from hybridpar.tvm_kernels.machine import Machine
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

GATHER = ("lanes", "tile_rows", "tile_columns", "strip", "columns_outer", "unroll")
WEIGHT = ("lanes", "tap_rows", "tap_columns", "tile_columns", "strip", "parts", "groups")

#: Multiply-adds of vectors that may be written out for a tile; compiling takes about a millisecond for each.
MOST_WRITTEN_OUT = 600
_MOST_LANES = 64
_MOST = 64


def outside(shape: ConvShape, direction: Direction, layout: Layout) -> str | None:
    """Why there are no kernels for a convolution, or None."""
    if layout is not Layout.CHANNELS_LAST:
        return f"there are no kernels for the layout {layout}"
    if not all(1 <= taps <= 31 for taps in shape.kernel) or max(shape.kernel) == 1:
        return "there are kernels for 2 to 31 taps a side only"
    if direction is Direction.INPUT_GRADIENT:
        for stride, dilation in zip(shape.stride, shape.dilation, strict=True):
            if stride > 2 or (stride > 1 and dilation > 1):
                return "there are no kernels for this input gradient's stride and dilation"
    return None


def reject(shape: ConvShape, direction: Direction, layout: Layout, parameters: Mapping[str, int]) -> str | None:
    """Why parameters make no kernel, or None; nothing else may be compiled.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        layout: Of the images.
        parameters: By name.
    """
    reason = outside(shape, direction, layout)
    if reason is not None:
        return reason
    weight = direction is Direction.WEIGHT_GRADIENT
    names = WEIGHT if weight else GATHER
    if set(parameters) != set(names) or not all(type(value) is int for value in parameters.values()):
        return f"the parameters are {', '.join(names)}, all whole numbers"
    lanes = parameters["lanes"]
    if lanes not in (1, 2, 4, 8, 16, 32, _MOST_LANES) or lanes > shape.channels:
        return f"lanes={lanes} is no power of two, or more than the channels"
    rule = _reject_weight if weight else _reject_gather
    return rule(shape, direction, parameters)


def _reject_gather(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> str | None:
    rows, columns, strip = parameters["tile_rows"], parameters["tile_columns"], parameters["strip"]
    if not (1 <= rows <= _MOST and 1 <= columns <= _MOST and 1 <= strip <= (1 << 20)):
        return "a tile or strip is empty or too large"
    if parameters["columns_outer"] not in (0, 1) or parameters["unroll"] not in (0, 1):
        return "columns_outer and unroll are 0 or 1"
    if strip % rows:
        return "a strip is not made of whole tiles"
    if rows > 1 and not parameters["unroll"]:
        return "tiles of several rows are only there with unroll=1"
    odd = columns % shape.stride[1] or (parameters["unroll"] and rows % shape.stride[0])
    if direction is Direction.INPUT_GRADIENT and odd:
        return "a tile is no multiple of the stride"
    if _written_out(shape, direction, parameters) > 4 * MOST_WRITTEN_OUT:
        return "too much would be written out"
    return None


def _reject_weight(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> str | None:
    del direction
    strips = -(-shape.out_height // max(parameters["strip"], 1))
    most = {
        "tap_rows": shape.kernel[0],
        "tap_columns": shape.kernel[1],
        "tile_columns": _MOST,
        "strip": 1 << 20,
        "parts": shape.batch * strips,
        "groups": -(-shape.channels // parameters["lanes"]),
    }
    for name, bound in most.items():
        if not 1 <= parameters[name] <= bound:
            return f"{name}={parameters[name]} is not between 1 and {bound}"
    written = parameters["tap_rows"] * shape.kernel[1] * parameters["tile_columns"]
    return "too much would be written out" if written > 4 * MOST_WRITTEN_OUT else None


def _written_out(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> int:
    """Multiply-adds of one tile without loops, in vectors of all lanes."""
    skipped = shape.stride[0] * shape.stride[1] if direction is Direction.INPUT_GRADIENT else 1
    rows = parameters["tile_rows"] * shape.kernel[0] if parameters["unroll"] else 1
    return rows * parameters["tile_columns"] * shape.kernel[1] // skipped


def candidates(
    shape: ConvShape, direction: Direction, layout: Layout, threads: int, machine: Machine
) -> Iterator[dict[str, int]]:
    """Parameters worth a thought: those that fit the registers of a machine and give each thread enough to do.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        layout: Of the images.
        threads: That will share the work.
        machine: The CPU.
    """
    if outside(shape, direction, layout) is not None:
        return
    make = _weight if direction is Direction.WEIGHT_GRADIENT else _gather
    for parameters in make(shape, direction, threads, machine):
        if reject(shape, direction, layout, parameters) is None:
            yield parameters


def _lanes(shape: ConvShape, machine: Machine) -> list[int]:
    wanted = [machine.lanes, 2 * machine.lanes, 4 * machine.lanes]
    fitting = [lanes for lanes in wanted if lanes <= min(shape.channels, _MOST_LANES)]
    return fitting or [1 << (shape.channels.bit_length() - 1)]


def _gather(shape: ConvShape, direction: Direction, threads: int, machine: Machine) -> Iterator[dict[str, int]]:
    image = (shape.height, shape.width)
    height, width = image if direction is Direction.INPUT_GRADIENT else (shape.out_height, shape.out_width)
    tiles = itertools.product(_lanes(shape, machine), range(1, 5), range(1, min(width, 16) + 1), (0, 1), (0, 1))
    for lanes, rows, columns, columns_outer, unroll in tiles:
        own = {"lanes": lanes, "tile_rows": rows, "tile_columns": columns}
        own |= {"columns_outer": columns_outer, "unroll": unroll}
        vectors = -(-lanes // machine.lanes)
        sums = rows * columns * vectors
        # At least one register is for an input and one for a tap; too few sums wait for each other.
        if sums + 2 * vectors > machine.registers or (sums < 4 and columns < width) or rows > height:
            continue
        if _written_out(shape, direction, own) > MOST_WRITTEN_OUT:
            continue
        for strip in sorted({rows, *(-(-rows_of // rows) * rows for rows_of in (4, 8, 16, height))}):
            units = shape.batch * -(-height // strip)
            if strip < height + rows and (units >= threads or strip == rows) and not (columns_outer and strip > rows):
                yield own | {"strip": strip}


def _weight(shape: ConvShape, direction: Direction, threads: int, machine: Machine) -> Iterator[dict[str, int]]:
    del direction
    tall, wide = shape.kernel
    most = machine.registers - 2
    for lanes in _lanes(shape, machine):
        vectors = -(-lanes // machine.lanes)
        blocks = -(-shape.channels // lanes)
        wides = [wide] if wide * vectors <= most else sorted({max(1, most // vectors), -(-wide // 2)})
        for tap_rows, tap_columns in itertools.product(range(1, min(tall, 4) + 1), wides):
            if tap_rows * tap_columns * vectors > most or tap_columns > wide:
                continue
            for columns in range(1, min(shape.out_width, 14) + 1):
                if tap_rows * columns * tap_columns > MOST_WRITTEN_OUT:
                    continue
                for strip in sorted({1, 2, 4, 8, 16, shape.out_height}):
                    own = {"lanes": lanes, "tap_rows": tap_rows, "tap_columns": tap_columns}
                    own |= {"tile_columns": columns, "strip": strip}
                    most_parts = shape.batch * -(-shape.out_height // strip)
                    for parts, groups in _units(threads, most_parts, blocks):
                        if strip <= shape.out_height:
                            yield own | {"parts": parts, "groups": groups}


def _units(threads: int, parts: int, groups: int) -> list[tuple[int, int]]:
    """Ways to cut the work for some threads, into at most so many parts and groups; in one where that cannot be."""
    if threads == 1:
        return [(1, 1)]
    ways = [(threads, 1), (2 * threads, 1), (1, threads)]
    return [way for way in ways if way[0] <= parts and way[1] <= groups] or [(min(threads, parts), 1)]


def neighbours(one: Mapping[str, int], among: list[dict[str, int]]) -> list[dict[str, int]]:
    """Candidates that differ in one parameter, by one step of the values that occur; or in strip together with rows."""
    found = []
    steps = {name: sorted({other[name] for other in among}) for name in one}
    for other in among:
        changed = [name for name in one if one[name] != other[name]]
        if changed and set(changed) <= {"strip", "tile_rows"} and len(changed) == 2:
            changed = ["tile_rows"]
        if len(changed) == 1:
            (name,) = changed
            values = steps[name]
            if one[name] in values and abs(values.index(one[name]) - values.index(other[name])) == 1:
                found.append(other)
    return found
