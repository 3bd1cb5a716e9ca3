"""Chooses where a model is cut so that the slowest stage is as fast as possible.

The order of decisions: least largest stage under the memory caps, exactly, over the model's own order; then, among cuts
within the noise of the best, the one that moves the fewest bytes. Same profile, same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridpar.errors import PartitionError
from hybridpar.partition.cost import IntervalCosts, Matrix, Problem, require_units
from hybridpar.partition.cuts import Cuts, least_maximum, least_sum, pick, stages_of
from hybridpar.partition.graph import UnitGraph

#: The most that is given up in time to move fewer bytes.
SLACK = 0.01


@dataclass(frozen=True)
class Balance:
    """A partition of a unit graph, with what it costs.

    Attributes:
        stage_of: Stage of every unit.
        loads: Time of every stage on its lane, with its transfers, in milliseconds.
        worker_loads: Time of every lane: the sum of its stages.
        memory: Peak bytes of every worker.
    """

    stage_of: tuple[int, ...]
    loads: tuple[float, ...]
    worker_loads: tuple[float, ...]
    memory: tuple[float, ...]

    @property
    def largest(self) -> float:
        """The largest lane load: what a full pipeline waits for."""
        return max(self.worker_loads)

    @property
    def balance(self) -> float:
        """Largest lane load over the mean."""
        mean = sum(self.worker_loads) / len(self.worker_loads)
        return self.largest / mean if mean > 0 else 1.0


def balance_graph(graph: UnitGraph, problem: Problem) -> Balance:
    """Cut a unit graph into stages.

    Args:
        graph: Units with times.
        problem: Stages, devices, link, memory.

    Returns:
        The partition, with its loads.

    Raises:
        PartitionError: More stages than units, or a memory cap that no partition is found for; the message says one
            that works.
    """
    require_units(graph, problem.stages)
    costs = IntervalCosts(graph)
    stages = range(problem.stages)
    times = [costs.stage_ms(problem, stage) for stage in stages]
    memory = [costs.stage_bytes(problem, stage) for stage in stages]
    slack = 1 + min(problem.noise, SLACK)
    cuts = _fewest_bytes(costs.incoming, times, slack)
    if cuts is None or not _fits(problem, memory, cuts):
        # Stages that share a device have equal parts of its memory.
        limits = [problem.memory_of(stage) for stage in stages]
        small = [np.where(need > limit, np.inf, time) for time, need, limit in zip(times, memory, limits, strict=True)]
        cuts = _fewest_bytes(costs.incoming, small, slack)
        if cuts is None:
            raise _too_little_memory(costs, problem, memory, limits)
    return _describe(graph, problem, cuts, times, memory)


def _fewest_bytes(price: Matrix, times: Sequence[Matrix], slack: float) -> Cuts | None:
    """Cheapest cuts among those whose largest load is near the least; loads settle ties. None where no cut is open."""
    best, cuts = least_maximum(times)
    if cuts is None:
        return None
    bound = best * slack
    largest = max(float(price.max()), 1.0)
    allowed = [
        np.where(time <= bound * (1 + 1e-12), price + largest * 1e-9 * np.minimum(time, bound) / bound, np.inf)
        if bound > 0
        else np.where(time <= bound, price, np.inf)
        for time in times
    ]
    return least_sum(allowed)[1] or cuts


def _fits(problem: Problem, memory: Sequence[Matrix], cuts: Cuts) -> bool:
    used = _by_worker(problem, memory, cuts)
    return all(one.memory is None or need <= one.memory for one, need in zip(problem.everyone, used, strict=True))


def _by_worker(problem: Problem, memory: Sequence[Matrix], cuts: Cuts) -> list[float]:
    used = [0.0] * len(problem.everyone)
    for stage in range(problem.stages):
        used[problem.worker_of(stage)] += pick(memory[stage], cuts, stage)
    return used


def _too_little_memory(
    costs: IntervalCosts, problem: Problem, memory: Sequence[Matrix], limits: Sequence[float]
) -> PartitionError:
    """The error that says by how much all caps must grow."""
    scaled = [
        np.where(costs.empty, np.inf, need / limit if np.isfinite(limit) else 0.0)
        for need, limit in zip(memory, limits, strict=True)
    ]
    factor, _ = least_maximum(scaled)
    caps = [one.memory for one in problem.everyone if one.memory is not None]
    enough = ", ".join(sorted({f"{_megabytes_up(cap * factor)} MB" for cap in caps}))
    given = ", ".join(sorted({f"{cap / 1e6:,.6g} MB" for cap in caps}))
    return PartitionError(
        f"{problem.stages} stages do not fit into {given} per device",
        "A stage holds its parameters, gradients and optimizer state, and activations of its micro-batches in flight "
        f"(stage 0: {problem.flights(0)}).",
        f"A cap that works is {enough}; or use more stages, a smaller micro-batch, or fewer in flight.",
    )


def _megabytes_up(amount: float) -> str:
    """Megabytes with one decimal, rounded up, so that the number given really works."""
    return f"{np.ceil(amount / 1e5) / 10:,.1f}"


def _describe(
    graph: UnitGraph, problem: Problem, cuts: Cuts, times: Sequence[Matrix], memory: Sequence[Matrix]
) -> Balance:
    """Costs of a cut."""
    loads = tuple(pick(time, cuts, stage) for stage, time in enumerate(times))
    lanes = [0.0] * len(problem.lanes)
    for stage, load in enumerate(loads):
        lanes[problem.lane_of(stage)] += load
    return Balance(tuple(stages_of(cuts, len(graph))), loads, tuple(lanes), tuple(_by_worker(problem, memory, cuts)))
