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

#: Parameters whose values follow from those of others: rows of a strip, and whether taps are written out, from the rows
#: of a tile; parts from the tiles.
FOLLOWING = ("strip", "unroll", "parts", "split_k")


def schedule_of(key: KernelKey) -> Any:
    """The schedule that computes a key: a module of `schedules`."""
    if is_gpu(key.device):
        return cuda
    return cpu_weight if key.direction is Direction.WEIGHT_GRADIENT else cpu_gather


def why_none(key: KernelKey, machine: Machine | None = None) -> str:
    """Why there are no kernels for a key, whatever the records say; empty where there are some."""
    if is_gpu(key.device):
        return cuda.why_none(key)
    if key.layout is not Layout.CHANNELS_LAST:
        return "there are kernels for channels_last alone"
    if key.dtype not in ("float32", "bfloat16"):
        return f"there are no kernels for {key.dtype}"
    if key.dtype == "bfloat16" and not (machine or this_machine()).bfloat16:
        return "there are kernels for bfloat16 on CPUs with AVX512_BF16 alone"
    return outside(key.shape, key.direction)


def reject(key: KernelKey, parameters: Parameters, machine: Machine | None = None) -> str | None:
    """Why parameters make no kernel, or None; nothing else may be compiled."""
    kind = schedule_of(key).Tile
    return why_none(key, machine) or misnamed(kind, parameters) or kind(**parameters).check(key)


def candidates(key: KernelKey, machine: Machine | None = None) -> list[dict[str, int]]:
    """All parameters that are worth a try on a key's device; for a CPU, on another machine if one is given."""
    if why_none(key, machine):
        return []
    if is_gpu(key.device):
        return list(cuda_space.candidates(key, gpu_of(key.device)))
    tried = schedule_of(key).candidates(key, machine or this_machine())
    return [parameters for parameters in tried if reject(key, parameters, machine) is None]


def default(key: KernelKey) -> Parameters:
    """Where a search begins that knows nothing; the candidate that is most like it is taken."""
    parameters: Parameters = schedule_of(key).default(key if is_gpu(key.device) else key.shape)
    return parameters


def _doublings(parameters: Parameters, other: Parameters, name: str) -> float:
    """How far two candidates lie apart in one parameter."""
    return abs(math.log2((parameters.get(name, 0) + 1) / (other.get(name, 0) + 1)))


def neighbours(parameters: Parameters, among: list[dict[str, int]]) -> list[dict[str, int]]:
    """Of the candidates that differ in one parameter those that come next, with its value below and above.

    What follows from other parameters (`FOLLOWING`) may differ besides, and is then as near as it can be.
    """
    nearest_on: dict[tuple[str, bool], tuple[tuple[float, float], dict[str, int]]] = {}
    for other in among:
        names = [name for name in {*parameters, *other} if parameters.get(name, 0) != other.get(name, 0)]
        (changed, *more) = [name for name in names if name not in FOLLOWING] or names or [""]
        if changed and not more:
            following = sum(_doublings(other, parameters, name) for name in FOLLOWING)
            distance = _doublings(other, parameters, changed), following
            side = changed, other.get(changed, 0) > parameters.get(changed, 0)
            before = nearest_on.get(side, (distance, other))
            nearest_on[side] = min(before, (distance, other), key=lambda pair: pair[0])
    return [other for _, other in nearest_on.values()]


def nearest(wanted: Parameters, among: list[dict[str, int]]) -> dict[str, int]:
    """The candidate that is most like some parameters, which may be of another shape, or of other vectors."""
    return min(among, key=lambda candidate: sum(_doublings(candidate, wanted, name) for name in wanted))
