"""Which parameters the schedules for the CPU allow; nothing else is compiled.

What the parameters mean is in `hybridpar.tvm_kernels.families`, and which of those that are allowed are tried in
`hybridpar.tvm_kernels.candidates`.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridpar.tvm_kernels.schedules.geometry import axis
from hybridpar.tvm_kernels.shapes import ConvShape, Direction

#: Multiply-adds of vectors that may be written out for a tile; compiling takes about a millisecond for each.
MOST_WRITTEN_OUT = 600
MOST_LANES = 64
_MOST = 64


def outside(shape: ConvShape, direction: Direction) -> str | None:
    """Why there are no kernels for a convolution, or None.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
    """
    if not all(1 <= taps <= 31 for taps in shape.kernel) or max(shape.kernel) == 1:
        return "there are kernels for 2 to 31 taps a side only"
    if direction is Direction.INPUT_GRADIENT:
        for stride, dilation in zip(shape.stride, shape.dilation, strict=True):
            if stride > 2 or (stride > 1 and dilation > 1):
                return "there are no kernels for this input gradient's stride and dilation"
    return None


#: Floats in a cache line; part of one that is written past the caches costs more than all of it.
_LINE = 16


def reject_rows(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> str | None:
    """Why a kernel of `cpu_rows` cannot have these parameters, or None.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: By name.
    """
    vertical, horizontal = axis(shape, direction, 0), axis(shape, direction, 1)
    whole = vertical.whole
    height = -(-vertical.out // whole) * whole
    bounds = {
        "tile_rows": min(height, _MOST),
        "tile_vectors": _MOST,
        "strip": height,
        "parts": shape.batch * shape.channels,
    }
    reason = _out_of_bounds(parameters, bounds)
    if reason is not None:
        return reason
    if horizontal.stride > 2:
        return "columns more than two apart are only gathered over channels"
    if parameters["tile_rows"] % whole or parameters["strip"] % whole:
        return "a tile or strip is no multiple of the stride"
    if parameters["strip"] < parameters["tile_rows"]:
        return "a strip is less than a tile"
    return "too much would be written out" if rows_written_out(shape, parameters) > 4 * MOST_WRITTEN_OUT else None


def rows_written_out(shape: ConvShape, parameters: Mapping[str, int]) -> int:
    """Multiply-adds of one tile over columns, in vectors of all lanes; at most, where a gradient skips taps.

    Args:
        shape: The convolution.
        parameters: By name.
    """
    return parameters["tile_rows"] * parameters["tile_vectors"] * shape.kernel[0] * shape.kernel[1]


def reject_rows_weight(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> str | None:
    """Why a kernel of `cpu_rows_weight` cannot have these parameters, or None.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: By name.
    """
    del direction
    bounds = {
        "tap_rows": shape.kernel[0],
        "tap_columns": shape.kernel[1],
        "tile_rows": min(parameters["strip"], _MOST),
        "strip": shape.out_height,
        "parts": shape.batch,
        "groups": shape.channels,
    }
    reason = _out_of_bounds(parameters, bounds)
    if reason is not None:
        return reason
    if shape.stride[1] > 2:
        return "columns more than two apart are only gathered over channels"
    written = 4 * parameters["tap_rows"] * parameters["tap_columns"] * parameters["tile_rows"]
    return "too much would be written out" if written > 4 * MOST_WRITTEN_OUT else None


def _out_of_bounds(parameters: Mapping[str, int], bounds: Mapping[str, int]) -> str | None:
    for name, bound in bounds.items():
        if not 1 <= parameters[name] <= bound:
            return f"{name}={parameters[name]} is not between 1 and {bound}"
    return None


def reject_turned(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> str | None:
    """Why a kernel of `cpu_turned` cannot have these parameters, or None.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: By name.
    """
    parts = shape.batch * -(-shape.channels // parameters["lanes"])
    if not 1 <= parameters["parts"] <= parts:
        return f"parts={parameters['parts']} is not between 1 and {parts}"
    if direction is Direction.INPUT_GRADIENT and parameters["strip"] % shape.stride[0]:
        return "a strip is no multiple of the stride"
    return reject_gather(shape, direction, {**parameters, "columns_outer": 0, "stream": 0})


def reject_gather(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> str | None:
    """Why a kernel of `cpu_gather` cannot have these parameters, or None.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: By name.
    """
    rows, columns, strip = parameters["tile_rows"], parameters["tile_columns"], parameters["strip"]
    if not (1 <= rows <= _MOST and 1 <= columns <= _MOST and 1 <= strip <= (1 << 20)):
        return "a tile or strip is empty or too large"
    if any(parameters[name] not in (0, 1) for name in ("columns_outer", "unroll", "stream")):
        return "columns_outer, unroll and stream are 0 or 1"
    if parameters["stream"] and (parameters["lanes"] % _LINE or shape.channels % parameters["lanes"]):
        return "only whole cache lines are written past the caches"
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
    """
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
    reason = _out_of_bounds(parameters, most)
    if reason is not None:
        return reason
    written = parameters["tap_rows"] * shape.kernel[1] * parameters["tile_columns"]
    return "too much would be written out" if written > 4 * MOST_WRITTEN_OUT else None


def gather_written_out(shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> int:
    """Multiply-adds of one tile without loops, in vectors of all lanes.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: By name.
    """
    skipped = shape.stride[0] * shape.stride[1] if direction is Direction.INPUT_GRADIENT else 1
    rows = parameters["tile_rows"] * shape.kernel[0] if parameters["unroll"] else 1
    return rows * parameters["tile_columns"] * shape.kernel[1] // skipped
