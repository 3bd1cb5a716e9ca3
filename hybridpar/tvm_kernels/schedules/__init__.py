"""Schedules of kernels, one file each: its parameters, what they allow, where a search begins, and the code.

Parameters are a frozen dataclass, made of the numbers of a record only after these were checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from hybridpar.tvm_kernels.shapes import ConvShape, Direction

#: Bytes from which on a tensor that is written or read counts as too large for the caches. What a machine says of its
#: last cache is not asked: virtual machines name that of the whole host.
FAR = 4 << 20


def outside(shape: ConvShape, direction: Direction) -> str:
    """Why there are no kernels for a convolution on any device; empty where there are some."""
    if not all(1 <= taps <= 31 for taps in shape.kernel) or max(shape.kernel) == 1:
        return "there are kernels for 2 to 31 taps a side only"
    if direction is Direction.INPUT_GRADIENT:
        for stride, dilation in zip(shape.stride, shape.dilation, strict=True):
            if stride > 2 or (stride > 1 and dilation > 1):
                return "there are no kernels for this input gradient's stride and dilation"
    return ""


def misnamed(kind: type[Any], parameters: Mapping[str, int]) -> str | None:
    """Why some numbers are not the parameters of a schedule; those that have a default may be left out."""
    names = [field.name for field in fields(kind)]
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    if needed <= set(parameters) <= set(names) and all(type(value) is int for value in parameters.values()):
        return None
    return f"the parameters are {', '.join(names)}, all whole numbers"


def out_of_bounds(tile: Any, **most: int) -> str | None:
    """Which parameter of a tile is below 1 or above its bound."""
    for name, bound in most.items():
        if not 1 <= (value := getattr(tile, name)) <= bound:
            return f"{name}={value} is not between 1 and {bound}"
    return None
