"""Balances stages where several share a worker or the memory of a device.

The dynamic programme then carries labels: for every place where a stage may end, the loads of the workers and the
memory of the devices that will get more stages. A label that is nowhere better than another is dropped. That is
exact while the labels fit the limit; beyond it only the most promising ones are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridpar.partition.cost import Matrix
from hybridpar.partition.strategies import Cuts

#: Labels kept per place; beyond that the search is no longer exact.
LABELS = 32


@dataclass(frozen=True)
class Sharing:
    """Which stages add up.

    Attributes:
        costs: One matrix per stage over all intervals; infinite where an interval is not allowed.
        groups: Group of every stage; costs of a group add up.
        limits: The most that each group may reach; infinite for no limit.
    """

    costs: Sequence[Matrix]
    groups: Sequence[int]
    limits: Sequence[float]


@dataclass
class _Labels:
    """All labels of one place, one per row: value, loads and memory of the groups, and where each is from."""

    value: NDArray[np.float64]
    loads: Matrix
    memory: Matrix
    origin: NDArray[np.int64]  # columns: place before, row there

    def take(self, rows: NDArray[np.int64]) -> _Labels:
        return _Labels(self.value[rows], self.loads[rows], self.memory[rows], self.origin[rows])

    @property
    def points(self) -> Matrix:
        return np.column_stack([self.value, self.loads, self.memory])


def least_shared(load: Sharing, memory: Sharing, price: Sequence[Matrix] | None = None) -> tuple[float, Cuts | None]:
    """Cut an order so that the largest group load is least while all groups stay within their limits.

    Args:
        load: Times, and the lanes that they add up on.
        memory: Bytes, and the devices that they add up on.
        price: One matrix per stage over all intervals, whose sum is to be least instead.

    Returns:
        The least largest load, or the least price, and the cuts; infinite and None where nothing is allowed.
    """
    count = load.costs[0].shape[0] - 1
    reaches_end = _can_finish([load.costs[stage] + memory.costs[stage] for stage in range(len(load.costs))])
    empty = np.zeros((1, 2), dtype=np.int64)
    start = _Labels(np.zeros(1), np.zeros((1, len(load.limits))), np.zeros((1, len(memory.limits))), empty)
    layers: list[dict[int, _Labels]] = [{0: start}]
    for stage, times in enumerate(load.costs):
        step = _Step(load, memory, stage, None if price is None else price[stage])
        ending: dict[int, list[_Labels]] = {}
        for begin, labels in layers[-1].items():
            for end in np.flatnonzero(np.isfinite(times[begin]) & reaches_end[stage + 1]).tolist():
                grown = step.extend(labels, begin, end)
                if len(grown.value):
                    ending.setdefault(end, []).append(grown)
        layer: dict[int, _Labels] = {}
        for end, parts in sorted(ending.items()):
            merged = _Labels(
                np.concatenate([part.value for part in parts]),
                np.concatenate([part.loads for part in parts]),
                np.concatenate([part.memory for part in parts]),
                np.concatenate([part.origin for part in parts]),
            )
            layer[end] = _undominated(merged)
        layers.append(layer)
    if count not in layers[-1]:
        return np.inf, None
    row = int(np.argmin(layers[-1][count].value))
    value = float(layers[-1][count].value[row])
    ends, place = [], count
    for layer in reversed(layers[1:]):
        place, row = (int(item) for item in layer[place].origin[row])
        ends.append(place)
    return value, tuple(reversed(ends[:-1]))


def _can_finish(costs: Sequence[Matrix]) -> list[NDArray[np.bool_]]:
    """For every number of stages used, the places from which the rest can still be cut."""
    count = costs[0].shape[0] - 1
    reach = np.zeros(count + 1, dtype=bool)
    reach[count] = True
    places = [reach]
    for cost in reversed(costs):
        places.append(np.any(np.isfinite(cost) & places[-1][None, :], axis=1))
    return places[::-1]


class _Step:
    """Adds one stage to labels."""

    def __init__(self, load: Sharing, memory: Sharing, stage: int, price: Matrix | None) -> None:
        self.times, self.bytes = load.costs[stage], memory.costs[stage]
        self.group, self.device = load.groups[stage], memory.groups[stage]
        self.most, self.cap = load.limits[self.group], memory.limits[self.device]
        self.closes = self.group not in load.groups[stage + 1 :]
        self.closes_memory = self.device not in memory.groups[stage + 1 :]
        self.price = price

    def extend(self, labels: _Labels, begin: int, end: int) -> _Labels:
        busy = labels.loads[:, self.group] + self.times[begin, end]
        held = labels.memory[:, self.device] + self.bytes[begin, end]
        rows = np.flatnonzero((busy <= self.most) & (held <= self.cap))
        busy, held = busy[rows], held[rows]
        if self.price is not None:
            value = labels.value[rows] + self.price[begin, end]
        else:
            value = np.maximum(labels.value[rows], busy) if self.closes else labels.value[rows]
        loads, memory = labels.loads[rows], labels.memory[rows]
        loads[:, self.group] = 0.0 if self.closes else busy  # a group without further stages no longer matters
        memory[:, self.device] = 0.0 if self.closes_memory else held
        return _Labels(value, loads, memory, np.column_stack([np.full(len(rows), begin), rows]))


def _undominated(labels: _Labels) -> _Labels:
    """Labels that no other beats everywhere; of too many the most promising."""
    if len(labels.value) > 8 * LABELS:
        labels = labels.take(_most_promising(labels.points, 8 * LABELS))
    points, first = np.unique(labels.points, axis=0, return_index=True)  # sorted: only an earlier can beat a later
    beaten = np.zeros(len(points), dtype=bool)
    for index in range(len(points)):
        if not beaten[index]:
            beaten[index + 1 :] |= np.all(points[index] <= points[index + 1 :], axis=1)
    kept = labels.take(first[~beaten])
    return kept.take(_most_promising(kept.points, LABELS)) if len(kept.value) > LABELS else kept


def _most_promising(points: Matrix, limit: int) -> NDArray[np.int64]:
    """Rows of half the most even labels, and of half those of least value."""
    even = np.argsort(points[:, 1:].max(axis=1), kind="stable")[: limit // 2]
    cheap = np.argsort(points[:, 0], kind="stable")[: limit - limit // 2]
    return np.union1d(even, cheap)
