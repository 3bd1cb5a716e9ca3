"""Cuts a model into stages so that the longest of them is as short as possible.

Over one topological order a stage is an interval [i, j) of units. Every part of its cost is a matrix over all
intervals, made in one go by two-dimensional prefix sums, so that the algorithm only looks numbers up. That is dynamic
programming over (stages used, units used): the best way to end stage k at j is the best way to end stage k - 1 at some
i, followed by the interval [i, j). All i and j at once are one matrix operation per stage.

Among cuts within the noise of the best, the one that moves the fewest bytes is taken. Same profile, same answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridpar.errors import PartitionError, UsageError
from hybridpar.partition.graph import UnitGraph

Matrix = NDArray[np.float64]

#: Ends of all stages but the last, ascending: stage k is [cuts[k - 1], cuts[k]).
Cuts = tuple[int, ...]

#: The most that is given up in time to move fewer bytes.
SLACK = 0.01

#: Tensors of a parameter's size: itself, its gradient, and its momentum.
COPIES = 3


def balance_graph(
    graph: UnitGraph,
    stages: int,
    *,
    speeds: Sequence[float] = (),
    link_speed: float | None = None,
    noise: float = 0.0,
) -> tuple[int, ...]:
    """The stage of every unit, so that the longest stage is as short as possible.

    Args:
        graph: Units with times.
        stages: Number of stages.
        speeds: Of each stage's device, relative to the one that was profiled; empty where all are alike.
        link_speed: Bytes per second between stages; None for a link that costs nothing.
        noise: Relative noise of the times; cuts closer than this (at most 1 %) count as equal.

    Raises:
        PartitionError: There are more stages than units.
        UsageError: There is no stage.
    """
    check_stages(graph, stages)
    costs = IntervalCosts(graph)
    times, price = costs.times(speeds or (1.0,) * stages, link_speed), costs.incoming
    bound = least_maximum(times)[0] * (1 + min(noise, SLACK))
    largest = max(float(price.max()), 1.0)
    allowed = [  # of equal bytes the shorter stages; a bound of 0 leaves no choice between times
        np.where(time <= bound * (1 + 1e-12), price + largest * 1e-9 * np.minimum(time, bound) / (bound or 1), np.inf)
        for time in times
    ]
    _, cuts = _solve(allowed, np.add)
    assert cuts is not None, "the fastest cut is allowed"
    return stages_of(cuts, len(graph))


def check_stages(graph: UnitGraph, stages: int) -> None:
    """Refuse a number of stages that no cut has."""
    if stages < 1:
        raise UsageError(f"{stages} stages", "A model has at least one stage.", "Ask for --stages 1 or more.")
    if stages > len(graph):
        raise PartitionError(
            f"{stages} stages are asked for, the model has {len(graph)} unit(s)",
            "Every stage holds at least one unit; what must stay together is one unit.",
            f"Ask for --stages {len(graph)} or fewer.",
        )


class IntervalCosts:
    """Costs of all intervals of a topological order."""

    def __init__(self, graph: UnitGraph) -> None:
        count = len(graph)
        last = count - 1
        self.empty = np.tri(count + 1, dtype=bool)
        self.compute = np.where(self.empty, np.inf, _sums([unit.ms for unit in graph.units]))
        self.parameters = _sums([unit.parameter_bytes for unit in graph.units])
        uses = [
            (value, sorted({*value.consumers, last}) if value.is_output else value.consumers) for value in graph.values
        ]
        self.incoming = _distinct(count, ((value.bytes, value.producer, users) for value, users in uses), inputs=True)
        self.returning = _distinct(
            count, ((value.gradient_bytes, value.producer, users) for value, users in uses), inputs=True
        )
        self.saved = _distinct(count, ((item.bytes, -1, item.units) for item in graph.saved), inputs=False)

    def times(self, speeds: Sequence[float], link_speed: float | None = None) -> list[Matrix]:
        """For every stage the time of each interval: compute at the stage's speed, and from the second on transfers."""
        times = [self.compute / speed for speed in speeds]
        if link_speed is None:
            return times
        transfers = (self.incoming + self.returning) / link_speed * 1e3
        return [times[0], *(time + transfers for time in times[1:])]

    def memory(self, stages: int) -> list[Matrix]:
        """For every stage the bytes of each interval: parameters with their copies, and activations under 1F1B."""
        return [(stages - stage) * self.saved + COPIES * self.parameters for stage in range(stages)]


def _sums(values: list[float] | list[int]) -> Matrix:
    before = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
    sums: Matrix = np.maximum(before[None, :] - before[:, None], 0.0)
    return sums


def _distinct(count: int, items: Iterable[tuple[int, int, tuple[int, ...] | list[int]]], *, inputs: bool) -> Matrix:
    """Bytes of the distinct items that an interval uses but does not make.

    An item made at p and used at c1 < c2 < ... counts for [i, j) where some use is inside and p < i. For i between two
    uses, that is every j beyond the next use: a rectangle, added by its corners.
    """
    corners = np.zeros((count + 2, count + 2))
    for size, producer, users in items:
        start = max(producer + 1, 1) if inputs else 0
        for user in users:
            if user >= start:
                corners[start, user + 1] += size
                corners[user + 1, user + 1] -= size
                start = user + 1
    sums: Matrix = corners.cumsum(axis=0).cumsum(axis=1)
    return sums[: count + 1, : count + 1]


def least_maximum(costs: Sequence[Matrix]) -> tuple[float, Cuts | None]:
    """The least that the largest stage cost can be, and such a cut; none where every cut has an infinite cost."""
    return _solve(costs, np.maximum)


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


def stages_of(cuts: Cuts, count: int) -> tuple[int, ...]:
    """The stage of every unit of an order."""
    return tuple(bisect_right(cuts, unit) for unit in range(count))
