"""The space of kernels for CPUs: which parameters each schedule allows, and which of them are tried.

Nothing that is not allowed is compiled. Tried are kernels that fit the registers of a CPU and give each thread work.
Parameters of both schedules, of images in channels_last:
    lanes: channels that are computed side by side; strip: output rows that are done before the next ones;
    sweep: 1 if the rows of a strip are read in order first, else left out.
Forward and input gradient (`schedules/cpu_gather.py`):
    tile_rows, tile_columns: outputs held in registers; unroll: 1 if rows of taps are written out where none crosses a
    border; columns_outer: 1 if all channels of a tile come before the next tile, as in some records, else 0; stream: 1
    if results are written past the caches, as those above `FAR` are.
Weight gradient (`schedules/cpu_weight.py`):
    tap_rows, tap_columns: taps whose sums are held in registers; tile_columns: columns of the gradient that pass by at
    a time; parts, groups: units of work, by images and strips and by channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from hybridpar.tvm_kernels.machine import FAR, Machine
from hybridpar.tvm_kernels.schedules.geometry import LINE, axis
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

GATHER = ("lanes", "tile_rows", "tile_columns", "strip", "columns_outer", "unroll", "stream")
WEIGHT = ("lanes", "tap_rows", "tap_columns", "tile_columns", "strip", "parts", "groups")

#: Multiply-adds of vectors that may be written out for a tile; compiling takes about a millisecond for each.
MOST_WRITTEN_OUT = 600
_MOST = 64
#: Bytes of a strip that stay in a core's second cache until its tiles are computed.
_NEAR = 512 << 10

#: Parameters whose values follow from those of others: rows of a strip from those of a tile, parts from the tiles.
FOLLOWING = ("strip", "parts")

Parameters = Mapping[str, int]


def outside(shape: ConvShape, direction: Direction) -> str | None:
    """Why there are no kernels for a convolution."""
    if not all(1 <= taps <= 31 for taps in shape.kernel) or max(shape.kernel) == 1:
        return "there are kernels for 2 to 31 taps a side only"
    if direction is Direction.INPUT_GRADIENT:
        for stride, dilation in zip(shape.stride, shape.dilation, strict=True):
            if stride > 2 or (stride > 1 and dilation > 1):
                return "there are no kernels for this input gradient's stride and dilation"
    return None


def reject(shape: ConvShape, direction: Direction, layout: Layout, parameters: Parameters) -> str | None:
    """Why parameters make no kernel; nothing else may be compiled."""
    if layout is not Layout.CHANNELS_LAST:
        return "kernels for CPUs are for channels_last"
    if reason := outside(shape, direction):
        return reason
    is_sum = direction is Direction.WEIGHT_GRADIENT
    names = WEIGHT if is_sum else GATHER
    if set(parameters) - {"sweep"} != set(names) or not all(type(value) is int for value in parameters.values()):
        return f"the parameters are {', '.join(names)}, all whole numbers"
    if parameters["lanes"] not in (1, 2, 4, 8, 16, 32, 64) or parameters["lanes"] > shape.channels:
        return f"lanes={parameters['lanes']} is no power of two, or more than {shape.channels}"
    if any(parameters.get(name, 0) not in (0, 1) for name in ("columns_outer", "unroll", "stream", "sweep")):
        return "columns_outer, unroll, stream and sweep are 0 or 1"
    return _reject_weight(shape, parameters) if is_sum else _reject_gather(shape, direction, parameters)


def _reject_gather(shape: ConvShape, direction: Direction, parameters: Parameters) -> str | None:
    rows, columns, strip = parameters["tile_rows"], parameters["tile_columns"], parameters["strip"]
    if reason := out_of_bounds(parameters, tile_rows=_MOST, tile_columns=_MOST, strip=1 << 20):
        return reason
    if parameters["stream"] and not _has_whole_lines(shape, parameters["lanes"]):
        return "only whole cache lines are written past the caches"  # a part of one costs more than all of it
    if strip % rows:
        return "a strip is not made of whole tiles"
    if rows > 1 and not parameters["unroll"]:
        return "tiles of several rows are only there with unroll=1"
    odd = columns % shape.stride[1] or (parameters["unroll"] and rows % shape.stride[0])
    if direction is Direction.INPUT_GRADIENT and odd:
        return "a tile is no multiple of the stride"
    if _gather_written_out(shape, direction, parameters) > 4 * MOST_WRITTEN_OUT:
        return "too much would be written out"
    return None


def _reject_weight(shape: ConvShape, parameters: Parameters) -> str | None:
    strips = -(-shape.out_height // max(parameters["strip"], 1))
    most = {"tap_rows": shape.kernel[0], "tap_columns": shape.kernel[1], "tile_columns": _MOST, "strip": 1 << 20}
    most |= {"parts": shape.batch * strips, "groups": -(-shape.channels // parameters["lanes"])}
    if reason := out_of_bounds(parameters, **most):
        return reason
    written = parameters["tap_rows"] * shape.kernel[1] * parameters["tile_columns"]
    return "too much would be written out" if written > 4 * MOST_WRITTEN_OUT else None


def out_of_bounds(parameters: Parameters, **most: int) -> str | None:
    """Which of some parameters is below 1 or above its bound."""
    for name, bound in most.items():
        if not 1 <= parameters[name] <= bound:
            return f"{name}={parameters[name]} is not between 1 and {bound}"
    return None


def _has_whole_lines(shape: ConvShape, lanes: int) -> bool:
    return lanes % LINE == 0 and shape.channels % lanes == 0


def _gather_written_out(shape: ConvShape, direction: Direction, parameters: Parameters) -> int:
    """Multiply-adds of one tile that are not in a loop, in vectors of all lanes."""
    skipped = shape.stride[0] * shape.stride[1] if direction is Direction.INPUT_GRADIENT else 1
    rows = parameters["tile_rows"] * shape.kernel[0] if parameters["unroll"] else 1
    return rows * parameters["tile_columns"] * shape.kernel[1] // skipped


# ---------------------------------------------------------------------------------------------------- what is tried


def candidates(shape: ConvShape, direction: Direction, threads: int, machine: Machine) -> Iterator[dict[str, int]]:
    """Parameters that fit the registers of a CPU and give each thread enough to do, for images in channels_last."""
    if outside(shape, direction) is not None:
        return
    if direction is Direction.WEIGHT_GRADIENT:
        found = _weight(shape, threads, machine)
    else:
        found = _gather(shape, direction, threads, machine)
    yield from (one for one in found if reject(shape, direction, Layout.CHANNELS_LAST, one) is None)


def _lanes(shape: ConvShape, machine: Machine) -> list[int]:
    """One vector of the CPU, two, and a cache line."""
    wanted = sorted({machine.lanes, 2 * machine.lanes, LINE})
    return [lanes for lanes in wanted if lanes <= shape.channels] or [1 << (shape.channels.bit_length() - 1)]


def _orders(shape: ConvShape, height: int, strip: int) -> list[dict[str, int]]:
    """Reading a strip in order first may be of use where it comes from memory and stays in the second cache."""
    is_swept = shape.least_bytes > FAR and shape.least_bytes / shape.batch / height * strip <= _NEAR
    return [{}, {"sweep": 1}] if is_swept else [{}]


def _gather(shape: ConvShape, direction: Direction, threads: int, machine: Machine) -> Iterator[dict[str, int]]:
    height, width = (axis(shape, direction, which).out for which in (0, 1))
    # Of such a result most has left the caches before it is read again, however it was written.
    large = 4 * shape.batch * shape.channels * height * width > FAR
    tiles = itertools.product(_lanes(shape, machine), range(1, 5), range(1, min(width, 16) + 1), (0, 1))
    for lanes, rows, columns, unroll in tiles:
        one = {"lanes": lanes, "tile_rows": rows, "tile_columns": columns, "columns_outer": 0, "unroll": unroll}
        one |= {"stream": int(large and _has_whole_lines(shape, lanes))}
        vectors = -(-lanes // machine.lanes)
        sums = rows * columns * vectors
        # At least one register is for an input and one for a tap; too few sums wait for each other.
        if sums + 2 * vectors > machine.registers or (sums < 4 and columns < width) or rows > height:
            continue
        if _gather_written_out(shape, direction, one) > MOST_WRITTEN_OUT:
            continue
        for strip in sorted({rows, *(-(-rows_of // rows) * rows for rows_of in (4, 8, 16, height))}):
            units = shape.batch * -(-height // strip)
            if strip < height + rows and (units >= threads or strip == rows):
                yield from (one | {"strip": strip} | order for order in _orders(shape, height, strip))


def _weight(shape: ConvShape, threads: int, machine: Machine) -> Iterator[dict[str, int]]:
    tall, wide = shape.kernel
    most = machine.registers - 2
    for lanes in _lanes(shape, machine):
        vectors = -(-lanes // machine.lanes)
        tap_columns = min(wide, most // vectors)  # all of a row, where they fit into registers
        blocks = -(-shape.channels // lanes)
        for tap_rows, columns in itertools.product(range(1, min(tall, 4) + 1), range(1, min(shape.out_width, 14) + 1)):
            if tap_rows * tap_columns * vectors > most or tap_rows * columns * tap_columns > MOST_WRITTEN_OUT:
                continue
            one = {"lanes": lanes, "tap_rows": tap_rows, "tap_columns": tap_columns, "tile_columns": columns}
            for strip in sorted({one for one in (1, 2, 4, 8, 16) if one < shape.out_height} | {shape.out_height}):
                for parts, groups in _units(threads, shape.batch * -(-shape.out_height // strip), blocks):
                    cut = {"strip": strip, "parts": parts, "groups": groups}
                    yield from (one | cut | order for order in _orders(shape, shape.out_height, strip))


def _units(threads: int, parts: int, groups: int) -> list[tuple[int, int]]:
    """Ways to cut the work for some threads, into at most so many parts and groups; in one where that cannot be."""
    if threads == 1:
        return [(1, 1)]
    ways = [(threads, 1), (2 * threads, 1), (1, threads)]
    return [way for way in ways if way[0] <= parts and way[1] <= groups] or [(min(threads, parts), 1)]


def neighbours(one: Parameters, among: list[dict[str, int]]) -> list[dict[str, int]]:
    """Of the candidates that differ in one parameter those that come next, with its value below and above.

    What follows from other parameters (`FOLLOWING`) may differ besides, and is then as near as it can be.
    """

    def apart(other: Parameters, name: str) -> float:
        return abs(math.log2((other.get(name, 0) + 1) / (one.get(name, 0) + 1)))

    found: dict[tuple[str, bool], tuple[tuple[float, float], dict[str, int]]] = {}
    for other in among:
        names = [name for name in {*one, *other} if one.get(name, 0) != other.get(name, 0)]
        (changed, *more) = [name for name in names if name not in FOLLOWING] or names or [""]
        if changed and not more:
            distance = apart(other, changed), sum(apart(other, name) for name in FOLLOWING)
            side = changed, other.get(changed, 0) > one.get(changed, 0)
            found[side] = min(found.get(side, (distance, other)), (distance, other), key=lambda pair: pair[0])
    return [other for _, other in found.values()]


def nearest(wanted: Parameters, among: list[dict[str, int]]) -> dict[str, int]:
    """The candidate that is most like some parameters, which may be of another shape, or of other vectors."""

    def distance(one: dict[str, int]) -> float:
        return sum(abs(math.log2((one.get(name, 0) + 1) / (value + 1))) for name, value in wanted.items())

    return min(among, key=distance)
