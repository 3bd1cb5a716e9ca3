"""Searches for the best cut over all topological orders, to say how far a cut is from it.

A convex cut into stages is a chain of down-sets (sets of units that hold all their predecessors). For compute load
at equal speeds the question "can K stages of at most T do it?" is that of assembly-line balancing (SALBP), answered
by a dynamic programme over down-sets: the least number of full stages, then the least load of the open one, reached
by adding one unit at a time. Binary search on T gives the optimum over *all* convex cuts, and everything below the
last T that failed is proved impossible. The number of down-sets is small for vision models; where it is not, the
search gives up and says so. When it gives up is counted in down-sets and steps between them, never in seconds, so
the same graph has the same answer on a slow or busy machine.

Reference: the two-key recursion is Held, Karp and Shareshian (1963), "Assembly-line balancing: dynamic programming
with precedence constraints".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Relative width of the interval that the binary search leaves.
TOLERANCE = 1e-4
#: The search gives up beyond so many down-sets, or beyond so many steps between them for each of these; that is three
#: seconds of work and 300 MB. GoogLeNet with its auxiliary heads has 279,657 and 1,374,453.
DOWN_SETS = 400_000
_STEPS_EACH = 5


@dataclass(frozen=True)
class Optimum:
    """The optimum over all convex cuts.

    Attributes:
        lower_bound: No convex cut has a smaller largest load; within `TOLERANCE` of the optimum.
        down_sets: How many there are.
    """

    lower_bound: float
    down_sets: int


def trivial_bound(loads: Sequence[float], stages: int) -> float:
    """What no partition can beat: an even share, or the largest unit."""
    return max(sum(loads) / stages, max(loads, default=0.0))


def exact_optimum(
    loads: Sequence[float],
    edges: Sequence[tuple[int, int]],
    stages: int,
    upper: float,
    *,
    down_sets: int = DOWN_SETS,
) -> Optimum | None:
    """The least largest load over all convex cuts into at most `stages` stages.

    Args:
        loads: Load of every unit.
        edges: Pairs of units, the first needed by the second.
        stages: Number of stages.
        upper: Largest load of a cut that is known.
        down_sets: Give up beyond so many, or beyond five times as many steps between them.

    Returns:
        The optimum, or None where the search gave up.
    """
    lattice = _Lattice.build(len(loads), edges, np.asarray(loads, dtype=float), down_sets)
    if lattice is None:
        return None
    low = trivial_bound(loads, stages)
    if lattice.stages_needed(low * (1 + 1e-12)) <= stages:
        return Optimum(low, lattice.size)
    high = max(upper * (1 + 1e-12), low)
    while high > low * (1 + TOLERANCE):
        middle = (low + high) / 2
        if lattice.stages_needed(middle) <= stages:
            high = middle
        else:
            low = middle
    return Optimum(low, lattice.size)


@dataclass
class _Layer:
    """Steps from the down-sets of one size to those of the next, sorted by destination."""

    sources: NDArray[np.int64]
    loads: NDArray[np.float64]
    starts: NDArray[np.int64]


class _Lattice:
    """All down-sets of a graph, by size, with the units that lead from one to the next."""

    def __init__(self, layers: list[_Layer], size: int) -> None:
        self.layers = layers
        self.size = size

    @classmethod
    def build(
        cls, count: int, edges: Sequence[tuple[int, int]], loads: NDArray[np.float64], limit: int
    ) -> _Lattice | None:
        needs = [0] * count
        leads: list[list[int]] = [[] for _ in range(count)]
        for before, after in edges:
            needs[after] |= 1 << before
            leads[before].append(after)
        current: dict[int, list[int]] = {0: [unit for unit in range(count) if not needs[unit]]}
        layers, size, steps = [], 1, 0
        for _ in range(count):
            number: dict[int, int] = {}
            ready: dict[int, list[int]] = {}
            sources: list[int] = []
            units: list[int] = []
            destinations: list[int] = []
            for place, (members, available) in enumerate(current.items()):
                # Not only between layers: the next one may have thousands of times as many down-sets.
                if size + len(number) > limit or steps + len(sources) > _STEPS_EACH * limit:
                    return None
                for unit in available:
                    grown = members | 1 << unit
                    if grown not in number:
                        number[grown] = len(number)
                        unlocked = [after for after in leads[unit] if not needs[after] & ~grown]
                        ready[grown] = [other for other in available if other != unit] + unlocked
                    sources.append(place)
                    units.append(unit)
                    destinations.append(number[grown])
            size, steps = size + len(number), steps + len(sources)
            if size > limit:
                return None
            sort = np.argsort(destinations, kind="stable")
            targets = np.asarray(destinations)[sort]
            starts = np.flatnonzero(np.concatenate([[True], targets[1:] != targets[:-1]]))
            layers.append(_Layer(np.asarray(sources)[sort], loads[np.asarray(units)[sort]], starts))
            current = ready
        return cls(layers, size)

    def stages_needed(self, bound: float) -> int:
        """Least number of stages if no stage may exceed `bound`, which no single unit exceeds."""
        full, load = np.zeros(1), np.zeros(1)  # full stages and open load of every down-set of a layer
        for layer in self.layers:
            grown = load[layer.sources] + layer.loads
            fits = grown <= bound
            stages = np.where(fits, full[layer.sources], full[layer.sources] + 1)
            opened = np.where(fits, grown, layer.loads)
            full = np.minimum.reduceat(stages, layer.starts)
            widths = np.diff(np.append(layer.starts, len(stages)))
            least = stages == np.repeat(full, widths)
            load = np.minimum.reduceat(np.where(least, opened, np.inf), layer.starts)
        return int(full[0]) + 1
