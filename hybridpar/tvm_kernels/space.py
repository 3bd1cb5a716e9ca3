"""Which kernels there are for a key: what its schedule allows, what is tried, and the steps between candidates.

Nothing that is not allowed is compiled. Tried are kernels that keep a device busy: on a CPU those that fit its
registers and give each thread work, on a GPU those of `cuda_space`.
"""

from __future__ import annotations

import math
from typing import Any

from hybridpar.tvm_kernels import cuda_space
from hybridpar.tvm_kernels.machine import Machine, gpu_of, is_gpu, this_machine
from hybridpar.tvm_kernels.schedules import cpu_gather, cpu_weight, cuda, misnamed, outside
from hybridpar.tvm_kernels.shapes import Direction, KernelKey, Layout, Parameters

#: Parameters whose values follow from those of others: rows of a strip from those of a tile, parts from the tiles.
FOLLOWING = ("strip", "parts", "split_k")


def cpu_schedule(direction: Direction) -> Any:
    """The schedule for CPUs that computes a direction."""
    return cpu_weight if direction is Direction.WEIGHT_GRADIENT else cpu_gather


def why_none(key: KernelKey, machine: Machine | None = None) -> str:
    """Why there are no kernels for a key, whatever the records say; empty where there are some."""
    if is_gpu(key.device):
        return cuda.why_none(key.shape, key.direction, key.dtype)
    if key.layout is not Layout.CHANNELS_LAST:
        return "there are kernels for channels_last alone"
    if key.dtype not in ("float32", "bfloat16"):
        return f"there are no kernels for {key.dtype}"
    if key.dtype == "bfloat16" and not (machine or this_machine()).bfloat16:
        return "there are kernels for bfloat16 on CPUs with AVX512_BF16 alone"
    return outside(key.shape, key.direction)


def reject(key: KernelKey, parameters: Parameters, machine: Machine | None = None) -> str | None:
    """Why parameters make no kernel, or None; nothing else may be compiled."""
    if reason := why_none(key, machine):
        return reason
    if is_gpu(key.device):
        return cuda.reject(key.shape, key.direction, key.layout, key.dtype, parameters)
    kind = cpu_schedule(key.direction).Tile
    return misnamed(kind, parameters) or kind(**parameters).check(key)


def candidates(key: KernelKey, machine: Machine | None = None) -> list[dict[str, int]]:
    """All parameters that are worth a try on a key's device; for a CPU, on another machine if one is given."""
    if why_none(key, machine):
        return []
    if is_gpu(key.device):
        return list(cuda_space.candidates(key, gpu_of(key.device)))
    tried = cpu_schedule(key.direction).candidates(key, machine or this_machine())
    return [parameters for parameters in tried if reject(key, parameters, machine) is None]


def default(key: KernelKey) -> Parameters:
    """Where a search begins that knows nothing; the candidate that is most like it is taken."""
    if is_gpu(key.device):
        return cuda.default(key.shape, key.direction, key.layout)
    parameters: Parameters = cpu_schedule(key.direction).default(key.shape)
    return parameters


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
