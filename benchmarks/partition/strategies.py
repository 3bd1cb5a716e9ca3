"""Other ways to cut a model, for comparison on the same costs. Each cuts the model's own order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hybridpar.partition.cost import IntervalCosts, Matrix
from hybridpar.partition.cuts import Cuts, least_maximum, stages_of
from hybridpar.partition.graph import UnitGraph

#: Cuts the order of a graph into so many stages.
Strategy = Callable[[UnitGraph, int], Cuts]

#: Where sums of floats are to be equal; without it the block partition may never meet its own end.
_ROUNDING = 1e-9


def _by_least(size: str) -> Strategy:
    """The strategy whose largest sum of this attribute of units is least."""
    return lambda graph, stages: _least([getattr(unit, size) for unit in graph.units], stages)


by_time = _by_least("ms")


def by_units(graph: UnitGraph, stages: int) -> Cuts:
    """Equal number of units in every stage, as PyTorch's examples cut by hand.

    Args:
        graph: Units with times and sizes, in the model's order.
        stages: Number of stages, no more than units.
    """
    return tuple(round(len(graph) * stage / stages) for stage in range(1, stages))


def by_single_tensor(graph: UnitGraph, stages: int) -> Cuts:
    """Cuts between blocks only: exactly one tensor crosses. Falls back to `time` where there are too few.

    Args:
        graph: Units with times and sizes, in the model's order.
        stages: Number of stages, no more than units.
    """
    crossing = np.zeros(len(graph) + 1, dtype=int)
    for value in graph.values:
        last = max((*value.consumers, len(graph) - 1 if value.is_output else -1))
        crossing[value.producer + 1 : last + 1] += 1
    allowed = crossing == 1
    allowed[[0, len(graph)]] = True
    costs = IntervalCosts(graph).compute.copy()
    costs[~allowed, :] = np.inf
    costs[:, ~allowed] = np.inf
    _, cuts = least_maximum([costs] * stages)
    return by_time(graph, stages) if cuts is None else cuts


def by_blocks(graph: UnitGraph, stages: int) -> Cuts:
    """Block partition (Bárány and Grinberg 2015, "Block partitions of sequences"), which torchgpipe uses.

    Sizes are scaled to [0, 1]. While the largest and the smallest block differ by more than 1, the borders between
    them move by one unit, from the smallest block towards the largest, stopping early where the largest changes.

    Args:
        graph: Units with times, in the model's order.
        stages: Number of stages, no more than units.

    Returns:
        Ends of all stages but the last; stages may be empty.
    """
    sizes = np.array([unit.ms for unit in graph.units])
    scale = float(sizes.max() - sizes.min())
    sizes = (sizes - sizes.min()) / scale if scale > 0 else np.zeros_like(sizes)
    sums = np.concatenate([[0.0], np.cumsum(sizes)])
    ends = [len(sizes) // stages * (stage + 1) for stage in range(stages - 1)] + [len(sizes)]
    while True:
        blocks = _block_sizes(sums, ends)
        largest = max(range(stages), key=lambda stage: (blocks[stage], stage))
        while True:
            # Of equal ones the nearest, as the paper asks.
            smallest = min(range(stages), key=lambda stage: (blocks[stage], abs(stage - largest)))
            if blocks[largest] <= blocks[smallest] + 1 + _ROUNDING:
                return tuple(ends[:-1])
            # One step moves the border of the smallest block that faces the largest.
            towards = smallest - 1 if largest < smallest else smallest + 1
            if largest < smallest:
                ends[towards] -= 1
            else:
                ends[smallest] += 1
            blocks = _block_sizes(sums, ends)
            if towards == largest:
                break


def _block_sizes(sums: Matrix, ends: Sequence[int]) -> list[float]:
    return [float(sums[end] - sums[begin]) for begin, end in zip((0, *ends), ends, strict=False)]


def _least(loads: Sequence[float], stages: int) -> Cuts:
    before = np.concatenate([[0.0], np.cumsum(loads)])
    costs = np.where(np.tri(len(loads) + 1, dtype=bool), np.inf, before[None, :] - before[:, None])
    _, cuts = least_maximum([costs] * stages)
    assert cuts is not None, "there are at least as many units as stages"
    return cuts


STRATEGIES: Mapping[str, Strategy] = {
    "time": by_time,
    "block": by_blocks,
    "single-tensor": by_single_tensor,
    "flops": _by_least("flops"),
    "units": by_units,
    "parameters": _by_least("parameter_bytes"),  # as DeepSpeed's `partition_method="parameters"`
}


def cut_by(strategy: str, graph: UnitGraph, stages: int) -> tuple[int, ...]:
    """Stage of every unit under a strategy, with no stage empty."""
    return tuple(stages_of(spread(STRATEGIES[strategy](graph, stages), len(graph)), len(graph)))


def spread(cuts: Cuts, count: int) -> Cuts:
    """Move cuts apart so that no stage is empty; cuts that are apart stay."""
    fixed = list(cuts)
    for place in range(len(fixed)):
        fixed[place] = max(fixed[place], (fixed[place - 1] if place else 0) + 1)
    for place in range(len(fixed) - 1, -1, -1):
        fixed[place] = min(fixed[place], (fixed[place + 1] if place + 1 < len(fixed) else count) - 1)
    return tuple(fixed)
