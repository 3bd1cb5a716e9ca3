"""Other ways to cut a model, for comparison on the same costs.

Each strategy cuts the model's own order. All of them can be asked for by name; only `balanced` looks at everything.

`least_maximum` and `least_sum` find the best cut of a fixed order with one stage per lane.

Dynamic programming over (stages used, units used): the best way to end stage k at j is the best way to end stage
k - 1 at some i, followed by the interval [i, j). All i and j at once are one matrix operation per stage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from hybridpar.partition.cost import IntervalCosts, Matrix
from hybridpar.partition.graph import UnitGraph
from hybridpar.registry import Registry

#: Ends of all stages but the last, ascending: stage k is [cuts[k - 1], cuts[k]).
Cuts = tuple[int, ...]


def least_maximum(costs: Sequence[Matrix]) -> tuple[float, Cuts | None]:
    """Cut an order so that the largest stage cost is least.

    Args:
        costs: One matrix per stage over all intervals; infinite where an interval is not allowed.

    Returns:
        The least largest cost, and the cuts; infinite and None where nothing is allowed.
    """
    return _solve(costs, np.maximum)


def least_sum(costs: Sequence[Matrix]) -> tuple[float, Cuts | None]:
    """Cut an order so that the sum of stage costs is least. Arguments and result as for `least_maximum`.

    Args:
        costs: One matrix per stage over all intervals; infinite where an interval is not allowed.

    Returns:
        The least sum, and the cuts; infinite and None where nothing is allowed.
    """
    return _solve(costs, np.add)


def _solve(costs: Sequence[Matrix], join: Callable[[Matrix, Matrix], Matrix]) -> tuple[float, Cuts | None]:
    count = costs[0].shape[0] - 1
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    choices = []
    for cost in costs:
        joined = join(best[:, None], cost)
        choice = joined.argmin(axis=0)
        best = joined[choice, np.arange(count + 1)]
        choices.append(choice)
    if not np.isfinite(best[count]):
        return np.inf, None
    cuts, end = [], count
    for choice in reversed(choices):
        end = int(choice[end])
        cuts.append(end)
    return float(best[count]), tuple(reversed(cuts[:-1]))


def stages_of(cuts: Cuts, count: int) -> list[int]:
    """Stage of every position of an order of `count` units.

    Args:
        cuts: Ends of all stages but the last.
        count: Units of the order.
    """
    return [bisect_right(cuts, place) for place in range(count)]


def pick(cost: Matrix, cuts: Cuts, stage: int) -> float:
    """Cost of one stage of a partition.

    Args:
        cost: Over all intervals.
        cuts: Ends of all stages but the last.
        stage: Number of the stage.
    """
    ends = (0, *cuts, cost.shape[0] - 1)
    return float(cost[ends[stage], ends[stage + 1]])


#: Cuts the order of a graph into so many stages.
Strategy = Callable[[UnitGraph, int], Cuts]

#: Where sums of floats are to be equal; without it the block partition may never meet its own end.
_ROUNDING = 1e-9

#: Every strategy that ignores devices, links and memory. `balanced`, which does not, is `balance_graph`.
STRATEGIES: Registry[Strategy] = Registry("partition strategy")


def _by_least(size: str) -> Strategy:
    """The strategy whose largest sum of this attribute of units is least."""
    return lambda graph, stages: _least([getattr(unit, size) for unit in graph.units], stages)


by_time = STRATEGIES.register("time", "least largest compute time over the model's own order")(_by_least("ms"))
# As DeepSpeed's `partition_method="parameters"`.
STRATEGIES.register("parameters", "least largest parameter size")(_by_least("parameter_bytes"))
STRATEGIES.register("flops", "least largest forward FLOPs")(_by_least("flops"))


@STRATEGIES.register("units", "equal number of units")
def by_units(graph: UnitGraph, stages: int) -> Cuts:
    """Equal number of units in every stage, as PyTorch's examples cut by hand.

    Args:
        graph: Units with times and sizes, in the model's order.
        stages: Number of stages, no more than units.
    """
    return tuple(round(len(graph) * stage / stages) for stage in range(1, stages))


@STRATEGIES.register("single-tensor", "least largest compute time over cuts that one tensor crosses")
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


@STRATEGIES.register("block", "block partition of Barany and Grinberg on compute times, as torchgpipe")
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
