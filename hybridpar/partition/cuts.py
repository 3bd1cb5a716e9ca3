"""The best cuts of a fixed order of units.

Dynamic programming over (stages used, units used): the best way to end stage k at j is the best way to end stage
k - 1 at some i, followed by the interval [i, j). All i and j at once are one matrix operation per stage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from hybridpar.partition.cost import Matrix

#: Ends of all stages but the last, ascending: stage k is [cuts[k - 1], cuts[k]).
Cuts = tuple[int, ...]


def least_maximum(costs: Sequence[Matrix]) -> tuple[float, Cuts | None]:
    """Cut an order so that the largest stage cost is least."""
    return _solve(costs, np.maximum)


def least_sum(costs: Sequence[Matrix]) -> tuple[float, Cuts | None]:
    """Cut an order so that the sum of stage costs is least. Arguments and result as for `least_maximum`."""
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
    """Stage of every position of an order of `count` units."""
    return [bisect_right(cuts, place) for place in range(count)]


def pick(cost: Matrix, cuts: Cuts, stage: int) -> float:
    """Cost of one stage of a partition."""
    ends = (0, *cuts, cost.shape[0] - 1)
    return float(cost[ends[stage], ends[stage + 1]])
