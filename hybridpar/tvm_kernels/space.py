"""The space of kernels for CPUs: which parameters each schedule allows, and which of them are tried.

Nothing that is not allowed is compiled. Tried are kernels that fit the registers of a CPU and give each thread work.
Contiguous images are computed over columns or over transposed channels, and either may be the faster, so there are
candidates of both kinds. What the parameters mean is in `hybridpar.tvm_kernels.families`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from hybridpar.tvm_kernels.machine import FAR, Machine
from hybridpar.tvm_kernels.schedules.geometry import LINE, axis
from hybridpar.tvm_kernels.shapes import ConvShape, Direction

#: Multiply-adds of vectors that may be written out for a tile; compiling takes about a millisecond for each.
MOST_WRITTEN_OUT = 600
MOST_LANES = 64
#: More lanes leave too few registers for sums of different pixels.
_MOST_TRIED = 32
_MOST = 64
#: Rows that a tile over columns has at most: a value of the room is used for each.
_TALLEST = 6
#: Rows of the gradient that may pass by at a time.
_PASSING = (1, 2, 3, 4, 7)
#: Bytes of a strip that stay in a core's second cache until its tiles are computed.
_NEAR = 512 << 10
#: Least lanes that are worth a vector.
_LEAST_LANES = 4


def outside(shape: ConvShape, direction: Direction) -> str | None:
    """Why there are no kernels for a convolution.

    Args:
        shape: The convolution.
        direction: Which of its three directions.

    Returns:
        A reason in words; None where there are kernels.
    """
    if not all(1 <= taps <= 31 for taps in shape.kernel) or max(shape.kernel) == 1:
        return "there are kernels for 2 to 31 taps a side only"
    if direction is Direction.INPUT_GRADIENT:
        for stride, dilation in zip(shape.stride, shape.dilation, strict=True):
            if stride > 2 or (stride > 1 and dilation > 1):
                return "there are no kernels for this input gradient's stride and dilation"
    return None


def reject_rows(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> str | None:
    """Why a kernel of `cpu_rows` cannot have these parameters, or None.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: By name.

    Returns:
        A reason in words; None where they are allowed.
    """
    vertical, horizontal = axis(shape, direction, 0), axis(shape, direction, 1)
    whole = vertical.whole
    height = -(-vertical.out // whole) * whole
    planes, rows = shape.batch * shape.channels, min(height, _MOST)
    if reason := _out_of_bounds(parameters, tile_rows=rows, tile_vectors=_MOST, strip=height, parts=planes):
        return reason
    if horizontal.stride > 2:
        return "columns more than two apart are only gathered over channels"
    if parameters["tile_rows"] % whole or parameters["strip"] % whole:
        return "a tile or strip is no multiple of the stride"
    if parameters["strip"] < parameters["tile_rows"]:
        return "a strip is less than a tile"
    return "too much would be written out" if rows_written_out(shape, parameters) > 4 * MOST_WRITTEN_OUT else None


def rows_written_out(shape: ConvShape, parameters: Mapping[str, int]) -> int:
    """Count the multiply-adds of one tile over columns; an upper bound where a gradient skips taps.

    Args:
        shape: The convolution.
        parameters: By name.

    Returns:
        Their number, in vectors of all lanes.
    """
    return parameters["tile_rows"] * parameters["tile_vectors"] * shape.kernel[0] * shape.kernel[1]


def reject_rows_weight(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> str | None:
    """Why a kernel of `cpu_rows_weight` cannot have these parameters, or None.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: By name.

    Returns:
        A reason in words; None where they are allowed.
    """
    del direction
    most = {"tap_rows": shape.kernel[0], "tap_columns": shape.kernel[1], "tile_rows": min(parameters["strip"], _MOST)}
    most |= {"strip": shape.out_height, "parts": shape.batch, "groups": shape.channels}
    if reason := _out_of_bounds(parameters, **most):
        return reason
    if shape.stride[1] > 2:
        return "columns more than two apart are only gathered over channels"
    written = 4 * parameters["tap_rows"] * parameters["tap_columns"] * parameters["tile_rows"]
    return "too much would be written out" if written > 4 * MOST_WRITTEN_OUT else None


def _out_of_bounds(parameters: Mapping[str, int], **most: int) -> str | None:
    for name, bound in most.items():
        if not 1 <= parameters[name] <= bound:
            return f"{name}={parameters[name]} is not between 1 and {bound}"
    return None


def reject_turned(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> str | None:
    """Why a kernel of `cpu_turned` cannot have these parameters, or None.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: By name.

    Returns:
        A reason in words; None where they are allowed.
    """
    if reason := _out_of_bounds(parameters, parts=shape.batch * -(-shape.channels // parameters["lanes"])):
        return reason
    if direction is Direction.INPUT_GRADIENT and parameters["strip"] % shape.stride[0]:
        return "a strip is no multiple of the stride"
    return reject_gather(shape, direction, {**parameters, "columns_outer": 0, "stream": 0})


def reject_gather(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> str | None:
    """Why a kernel of `cpu_gather` cannot have these parameters, or None.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: By name.

    Returns:
        A reason in words; None where they are allowed.
    """
    rows, columns, strip = parameters["tile_rows"], parameters["tile_columns"], parameters["strip"]
    if not (1 <= rows <= _MOST and 1 <= columns <= _MOST and 1 <= strip <= (1 << 20)):
        return "a tile or strip is empty or too large"
    if any(parameters.get(name, 0) not in (0, 1) for name in ("columns_outer", "unroll", "stream", "sweep")):
        return "columns_outer, unroll, stream and sweep are 0 or 1"
    if parameters["stream"] and (parameters["lanes"] % LINE or shape.channels % parameters["lanes"]):
        return "only whole cache lines are written past the caches"  # a part of one costs more than all of it
    if strip % rows:
        return "a strip is not made of whole tiles"
    if rows > 1 and not parameters["unroll"]:
        return "tiles of several rows are only there with unroll=1"
    odd = columns % shape.stride[1] or (parameters["unroll"] and rows % shape.stride[0])
    if direction is Direction.INPUT_GRADIENT and odd:
        return "a tile is no multiple of the stride"
    if gather_written_out(shape, direction, parameters) > 4 * MOST_WRITTEN_OUT:
        return "too much would be written out"
    return None


def reject_weight(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> str | None:
    """Why a kernel of `cpu_weight` cannot have these parameters, or None.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: By name.

    Returns:
        A reason in words; None where they are allowed.
    """
    del direction
    strips = -(-shape.out_height // max(parameters["strip"], 1))
    most = {"tap_rows": shape.kernel[0], "tap_columns": shape.kernel[1], "tile_columns": _MOST, "strip": 1 << 20}
    most |= {"parts": shape.batch * strips, "groups": -(-shape.channels // parameters["lanes"])}
    if reason := _out_of_bounds(parameters, **most):
        return reason
    if parameters.get("sweep", 0) not in (0, 1):
        return "sweep is 0 or 1"
    written = parameters["tap_rows"] * shape.kernel[1] * parameters["tile_columns"]
    return "too much would be written out" if written > 4 * MOST_WRITTEN_OUT else None


def gather_written_out(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> int:
    """Count the multiply-adds of one tile that are not in a loop.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: By name.

    Returns:
        Their number, in vectors of all lanes.
    """
    skipped = shape.stride[0] * shape.stride[1] if direction is Direction.INPUT_GRADIENT else 1
    rows = parameters["tile_rows"] * shape.kernel[0] if parameters["unroll"] else 1
    return rows * parameters["tile_columns"] * shape.kernel[1] // skipped


# ---------------------------------------------------------------------------------------------------- what is tried


def turned(shape: ConvShape, direction: Direction, threads: int, machine: Machine) -> Iterator[dict[str, int]]:
    """Candidates of `cpu_turned`: those of `cpu_gather` that have neither `columns_outer` nor `stream`.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        threads: That share the work.
        machine: The CPU.

    Yields:
        Parameters by name.
    """
    for own in gather(shape, direction, threads, machine):
        if not own["columns_outer"] and not own["stream"] and "sweep" not in own:
            del own["columns_outer"], own["stream"]
            yield own | {"parts": min(threads, shape.batch * -(-shape.channels // own["lanes"]))}


def _lanes(shape: ConvShape, machine: Machine) -> list[int]:
    wanted = [machine.lanes, 2 * machine.lanes, 4 * machine.lanes]
    fitting = [lanes for lanes in wanted if lanes <= min(shape.channels, _MOST_TRIED)]
    return fitting or [1 << (shape.channels.bit_length() - 1)]


def _is_swept(shape: ConvShape, height: int, strip: int) -> bool:
    """Whether reading a strip in order first may be of use: it comes from memory, and stays in L2."""
    return shape.least_bytes > FAR and shape.least_bytes / shape.batch / height * strip <= _NEAR


def gather(shape: ConvShape, direction: Direction, threads: int, machine: Machine) -> Iterator[dict[str, int]]:
    """Candidates of `cpu_gather`; some of them may not be allowed.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        threads: That share the work.
        machine: The CPU.

    Yields:
        Parameters by name.
    """
    height, width = (axis(shape, direction, which).out for which in (0, 1))
    # Of such a result most has left the caches before it is read again, however it was written.
    large = 4 * shape.batch * shape.channels * height * width > FAR
    orders = [{"stream": 0}, *([{"stream": 1}] if large else [])]
    swept = [{**orders[-1], "sweep": 1}]
    tiles = itertools.product(_lanes(shape, machine), range(1, 5), range(1, min(width, 16) + 1), (0, 1), (0, 1))
    for lanes, rows, columns, columns_outer, unroll in tiles:
        own = {"lanes": lanes, "tile_rows": rows, "tile_columns": columns}
        own |= {"columns_outer": columns_outer, "unroll": unroll}
        vectors = -(-lanes // machine.lanes)
        sums = rows * columns * vectors
        # At least one register is for an input and one for a tap; too few sums wait for each other.
        if sums + 2 * vectors > machine.registers or (sums < 4 and columns < width) or rows > height:
            continue
        if gather_written_out(shape, direction, own) > MOST_WRITTEN_OUT:
            continue
        for strip in sorted({rows, *(-(-rows_of // rows) * rows for rows_of in (4, 8, 16, height))}):
            units = shape.batch * -(-height // strip)
            if strip < height + rows and (units >= threads or strip == rows) and not (columns_outer and strip > rows):
                for order in orders + swept * _is_swept(shape, height, strip):
                    yield own | {"strip": strip} | order


def weight(shape: ConvShape, direction: Direction, threads: int, machine: Machine) -> Iterator[dict[str, int]]:
    """Candidates of `cpu_weight`; some of them may not be allowed.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        threads: That share the work.
        machine: The CPU.

    Yields:
        Parameters by name.
    """
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
                            yield (one := own | {"parts": parts, "groups": groups})
                            if _is_swept(shape, shape.out_height, strip):
                                yield one | {"sweep": 1}


def _units(threads: int, parts: int, groups: int) -> list[tuple[int, int]]:
    """Ways to cut the work for some threads, into at most so many parts and groups; in one where that cannot be."""
    if threads == 1:
        return [(1, 1)]
    ways = [(threads, 1), (2 * threads, 1), (1, threads)]
    return [way for way in ways if way[0] <= parts and way[1] <= groups] or [(min(threads, parts), 1)]


def _row_lanes(columns: int, machine: Machine) -> list[int]:
    """Widths of vectors that fit into a row; a narrower one where it leaves fewer lanes of the last vector idle."""
    found = [lanes for lanes in (machine.lanes, machine.lanes // 2) if _LEAST_LANES <= lanes <= columns]
    if len(found) == 2 and -(-columns // found[0]) * found[0] <= -(-columns // found[1]) * found[1]:
        found.pop()
    return found


def strips_of(height: int, whole: int, least: int) -> list[int]:
    """Heights of strips that divide an image about evenly.

    Args:
        height: Rows of the image.
        whole: What strips are multiples of.
        least: Rows of the lowest strip.

    Returns:
        Heights, in rising order.
    """
    found = {height, *(-(-height // pieces) for pieces in (2, 3, 4, 7, 8, 14))}
    return sorted({strip for one in found if (strip := -(-one // whole) * whole) >= least})


def rows(shape: ConvShape, direction: Direction, threads: int, machine: Machine) -> Iterator[dict[str, int]]:
    """Candidates of `cpu_rows`; some of them may not be allowed.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        threads: That share the work.
        machine: The CPU.

    Yields:
        Parameters by name.
    """
    vertical, horizontal = axis(shape, direction, 0), axis(shape, direction, 1)
    height = -(-vertical.out // vertical.whole) * vertical.whole
    phases = horizontal.whole
    for lanes in _row_lanes(horizontal.out // phases, machine):
        count = -(-horizontal.out // (lanes * phases))
        tiles = itertools.product(range(vertical.whole, _TALLEST + 1, vertical.whole), range(1, min(count, 8) + 1))
        for rows, vectors in tiles:
            own = {"lanes": lanes, "tile_rows": rows, "tile_vectors": vectors}
            sums = rows * vectors * phases
            if sums + 2 > machine.registers or (sums < 4 and vectors < count) or rows > height:
                continue
            if rows_written_out(shape, own) > MOST_WRITTEN_OUT:
                continue
            for strip in strips_of(height, vertical.whole, rows):
                yield own | {"strip": strip, "parts": min(threads, shape.batch * shape.channels)}


def rows_weight(shape: ConvShape, direction: Direction, threads: int, machine: Machine) -> Iterator[dict[str, int]]:
    """Candidates of `cpu_rows_weight`; some of them may not be allowed.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        threads: That share the work.
        machine: The CPU.

    Yields:
        Parameters by name.
    """
    del direction
    tall, wide = shape.kernel
    most = machine.registers - 2
    wides = [wide] if wide <= most else sorted({most, -(-wide // 2)})
    for lanes, tap_rows, tap_columns in itertools.product(
        _row_lanes(shape.out_width, machine), range(1, min(tall, 5) + 1), wides
    ):
        if tap_rows * tap_columns > most:
            continue
        for rows in _PASSING:
            if rows > shape.out_height or 4 * tap_rows * tap_columns * rows > MOST_WRITTEN_OUT:
                continue
            for strip in strips_of(shape.out_height, 1, rows):
                own = {"lanes": lanes, "tap_rows": tap_rows, "tap_columns": tap_columns}
                for parts, groups in _row_units(threads, shape):
                    yield own | {"tile_rows": rows, "strip": strip, "parts": parts, "groups": groups}


def _row_units(threads: int, shape: ConvShape) -> list[tuple[int, int]]:
    """Parts and groups: channels are shared out where there are enough, since images then need no adding up."""
    if threads == 1:
        return [(1, 1)]
    ways = [(1, threads), (threads, 1)]
    return [way for way in ways if way[0] <= shape.batch and way[1] <= shape.channels] or [(1, 1)]


def neighbours(one: Mapping[str, int], among: list[dict[str, int]]) -> list[dict[str, int]]:
    """Candidates that differ in one parameter, by one step of the values that occur; or in strip together with rows.

    Only candidates of the same schedule are compared; others have other parameters. One that is not named is 0.

    Args:
        one: A candidate.
        among: The space.

    Returns:
        The candidates.
    """
    found = []
    steps = {name: sorted({other.get(name, 0) for other in among}) for name in {*one, *itertools.chain(*among)}}
    for other in among:
        changed = [name for name in {*one, *other} if one.get(name, 0) != other.get(name, 0)]
        if changed and set(changed) <= {"strip", "tile_rows"} and len(changed) == 2:
            changed = ["tile_rows"]
        if len(changed) == 1:
            (name,) = changed
            values = steps[name]
            before, after = one.get(name, 0), other.get(name, 0)
            if before in values and abs(values.index(before) - values.index(after)) == 1:
                found.append(other)
    return found
