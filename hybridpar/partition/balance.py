"""Chooses where a model is cut so that the slowest stage is as fast as possible.

The load of a worker is what is balanced; for a linear placement that is the load of a stage. The order of decisions:
least largest load under the memory caps, exactly, over the model's own order; then, for compute load alone, the
exact optimum over all convex cuts, which certifies the cut or improves it; then, among cuts within the noise of the
best, the one that moves the fewest bytes. Same profile, same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hybridpar.errors import PartitionError, UsageError, nearest
from hybridpar.partition.cost import IntervalCosts, Matrix, Problem, require_units
from hybridpar.partition.exact import (
    DOWN_SETS,
    TOLERANCE,
    Optimum,
    exact_optimum,
    fused_chains,
    trivial_bound,
)
from hybridpar.partition.graph import UnitGraph
from hybridpar.partition.grouped import Sharing, least_shared
from hybridpar.partition.strategies import STRATEGIES, Cuts, least_maximum, least_sum, pick, stages_of


@dataclass(frozen=True)
class Balance:
    """A partition of a unit graph, with what it costs.

    Attributes:
        stage_of: Stage of every unit.
        loads: Time of every stage on its lane, with its transfers, in milliseconds.
        worker_loads: Time of every lane: the sum of its stages.
        memory: Peak bytes of every worker.
        lower_bound_ms: No partition of this problem has a smaller largest load.
        certificate: `exact` where the bound is the optimum over all convex cuts, to 1e-4; else `bound`.
        down_sets: Number of down-sets that the certificate looked at; 0 without it.
        strategy: Name of what made it.
    """

    stage_of: tuple[int, ...]
    loads: tuple[float, ...]
    worker_loads: tuple[float, ...]
    memory: tuple[float, ...]
    lower_bound_ms: float
    certificate: Literal["exact", "bound"]
    down_sets: int = 0
    strategy: str = "balanced"

    @property
    def largest(self) -> float:
        """The largest lane load: what a full pipeline waits for."""
        return max(self.worker_loads)

    @property
    def balance(self) -> float:
        """Largest lane load over the mean."""
        mean = sum(self.worker_loads) / len(self.worker_loads)
        return self.largest / mean if mean > 0 else 1.0

    @property
    def gap(self) -> float:
        """Largest lane load over `lower_bound_ms`, minus one: with the certificate `exact` the gap to the optimum.

        With `bound` nothing is known of the optimum but that it is no lower than the bound, and may be far above it.
        """
        return self.largest / self.lower_bound_ms - 1 if self.lower_bound_ms > 0 else 0.0


def balance_graph(
    graph: UnitGraph,
    problem: Problem,
    *,
    strategy: str = "balanced",
    certify: bool = True,
    down_sets: int = DOWN_SETS,
) -> Balance:
    """Cut a unit graph into stages.

    Args:
        graph: Units with times.
        problem: Stages, devices, link, memory.
        strategy: `balanced`, or the name of a simpler one for comparison.
        certify: Look for the exact optimum over all convex cuts.
        down_sets: Give the certificate up beyond so many down-sets, see `exact_optimum`.

    Returns:
        The partition, with its loads and a lower bound.

    Raises:
        PartitionError: More stages than units, or a memory cap that no partition can keep; the message says the least
        cap
            that works.
        UsageError: Unknown strategy.
    """
    require_units(graph, problem.stages)
    identity = tuple(range(len(graph)))
    if strategy != "balanced":
        if strategy not in STRATEGIES:
            raise UsageError(
                f"unknown strategy {strategy!r}", nearest(strategy, ["balanced", *STRATEGIES]), "Use balanced."
            )
        return _describe(
            graph, problem, identity, spread(STRATEGIES.get(strategy)(graph, problem.stages), len(graph)), strategy
        )
    costs = IntervalCosts(graph)
    cuts = _cut_order(costs, problem)
    best = _describe(graph, problem, identity, cuts, strategy, costs)
    if not certify or not _equal_lanes(problem):
        return best
    speed = problem.worker(0).lane_speed
    loads = [unit.ms / speed for unit in graph.units]
    known, _ = least_maximum([costs.compute / speed] * problem.stages)
    found = _search_all_cuts(loads, graph.edges(), problem.stages, known, down_sets)
    if found is None:
        return best
    optimum, proves = found
    other_costs = IntervalCosts(graph.reordered(optimum.order))
    try:
        other = _describe(graph, problem, optimum.order, _cut_order(other_costs, problem), strategy, other_costs)
    except PartitionError:
        other = best  # the other order does not fit into memory
    # Within the noise of the optimum the model's own order is kept, for its readers' sake; beyond it the better wins.
    close = optimum.lower_bound * (1 + min(problem.noise, problem.slack_limit)) * (1 + TOLERANCE)
    if best.largest > close and other.largest < best.largest:
        best = other
    certificate: Literal["exact", "bound"] = "exact" if problem.is_plain and proves else "bound"
    bound = max(best.lower_bound_ms, optimum.lower_bound) if proves else best.lower_bound_ms
    return replace(best, lower_bound_ms=min(bound, best.largest), certificate=certificate, down_sets=optimum.down_sets)


def _search_all_cuts(
    loads: list[float], edges: list[tuple[int, int]], stages: int, known: float, down_sets: int
) -> tuple[Optimum, bool] | None:
    """The optimum over all convex cuts and True; or a good cut of the graph with its chains merged and False."""
    low = trivial_bound(loads, stages)
    if known <= low * (1 + TOLERANCE):
        return Optimum(low, tuple(range(len(loads))), 0), True
    optimum = exact_optimum(loads, edges, stages, known, down_sets=down_sets)
    if optimum is not None:
        return optimum, True
    chains, links = fused_chains(loads, edges, sum(loads) / stages / 10)
    heavier = [sum(loads[unit] for unit in chain) for chain in chains]
    # What it finds is only a good cut, which is not worth as much work as a proof.
    merged = exact_optimum(heavier, links, stages, known * 1.5, down_sets=down_sets // 4)
    if merged is None:
        return None
    order = tuple(unit for chain in merged.order for unit in chains[chain])
    return Optimum(low, order, merged.down_sets), False


def spread(cuts: Cuts, count: int) -> Cuts:
    """Move cuts apart so that no stage is empty; cuts that are apart stay.

    Args:
        cuts: Ends of all stages but the last, ascending.
        count: Units in all; no fewer than stages.

    Returns:
        Cuts that differ from each other, from 0 and from `count`.
    """
    fixed = list(cuts)
    for place in range(len(fixed)):
        fixed[place] = max(fixed[place], (fixed[place - 1] if place else 0) + 1)
    for place in range(len(fixed) - 1, -1, -1):
        fixed[place] = min(fixed[place], (fixed[place + 1] if place + 1 < len(fixed) else count) - 1)
    return tuple(fixed)


def _equal_lanes(problem: Problem) -> bool:
    """Whether the certificate's optimum bounds this problem: one stage per lane, equal speeds.

    Transfers and memory caps only add to the compute load, so its optimum stays a lower bound with them.
    """
    speeds = {problem.worker(stage).lane_speed for stage in range(problem.stages)}
    return problem.placement == "linear" and len(speeds) == 1


def _cut_order(costs: IntervalCosts, problem: Problem) -> Cuts:
    """The best cuts of one order: least largest load, then fewest bytes within the noise."""
    stages = range(problem.stages)
    times = [costs.stage_ms(problem, stage) for stage in stages]
    memory = [costs.stage_bytes(problem, stage) for stage in stages]
    workers = [problem.worker_of(stage) for stage in stages]
    limits = [np.inf if worker.memory is None else float(worker.memory) for worker in problem.everyone]
    capped = not all(np.isinf(limits))
    for stage in stages:
        times[stage] = np.where(memory[stage] > limits[workers[stage]], np.inf, times[stage])
    shared_memory = capped and len(set(workers)) < problem.stages
    slack = 1 + min(problem.noise, problem.slack_limit)
    if problem.placement == "linear" and not shared_memory:
        best, cuts = least_maximum(times)
        if cuts is None:
            raise _too_little_memory(costs, problem, memory, workers, limits)
        return _fewest_bytes([costs.incoming] * problem.stages, times, best * slack) or cuts
    return _cut_shared(costs, problem, times, memory, workers, limits, slack)


def _fewest_bytes(prices: Sequence[Matrix], times: Sequence[Matrix], bound: float) -> Cuts | None:
    """Cheapest cuts among those whose largest load is within a bound; loads settle ties."""
    largest = max(float(prices[0].max()), 1.0)
    allowed = [
        np.where(time <= bound * (1 + 1e-12), price + largest * 1e-9 * np.minimum(time, bound) / bound, np.inf)
        if bound > 0
        else np.where(time <= bound, price, np.inf)
        for price, time in zip(prices, times, strict=True)
    ]
    return least_sum(allowed)[1]


def _cut_shared(
    costs: IntervalCosts,
    problem: Problem,
    times: list[Matrix],
    memory: list[Matrix],
    workers: list[int],
    limits: list[float],
    slack: float,
) -> Cuts:
    """Cuts where stages share a lane's time or a device's memory.

    First the longest stage is made short, then the lanes are balanced while no stage is longer than that by more
    than `stage_slack`, then bytes are saved within the noise.
    """
    lanes = [problem.lane_of(stage) for stage in range(problem.stages)]
    lane_count = max(lanes) + 1
    space = Sharing(memory, workers, limits)
    free = [np.inf] * lane_count
    each = Sharing(times, list(range(problem.stages)), [np.inf] * problem.stages)
    best, cuts = least_maximum(times)
    if cuts is not None and not _fits(memory, workers, limits, cuts):
        best, cuts = least_shared(each, space)
    if cuts is None:
        raise _too_little_memory(costs, problem, memory, workers, limits)
    allowed = [np.where(time <= best * (1 + problem.stage_slack), time, np.inf) for time in times]
    if problem.placement != "linear":
        known = _lane_loads(times, lanes, cuts)
        start = [max(known) * (1 + 1e-12)] * lane_count
        best, found = least_shared(Sharing(allowed, lanes, start), space)
        best, cuts = (max(known), cuts) if found is None else (best, found)
    bound = [best * slack * (1 + 1e-12)] * lane_count if np.isfinite(best) else free
    _, cheaper = least_shared(Sharing(allowed, lanes, bound), space, [costs.incoming] * problem.stages)
    return cheaper or cuts


def _fits(memory: list[Matrix], workers: list[int], limits: list[float], cuts: Cuts) -> bool:
    used = [0.0] * len(limits)
    for stage, worker in enumerate(workers):
        used[worker] += pick(memory[stage], cuts, stage)
    return all(amount <= limit for amount, limit in zip(used, limits, strict=True))


def _lane_loads(times: list[Matrix], lanes: list[int], cuts: Cuts) -> list[float]:
    loads = [0.0] * (max(lanes) + 1)
    for stage, lane in enumerate(lanes):
        loads[lane] += pick(times[stage], cuts, stage)
    return loads


def _too_little_memory(
    costs: IntervalCosts, problem: Problem, memory: list[Matrix], workers: list[int], limits: list[float]
) -> PartitionError:
    """The error that says by how much all caps must grow."""
    scaled = [
        np.where(costs.empty, np.inf, need / limits[worker] if np.isfinite(limits[worker]) else 0.0)
        for need, worker in zip(memory, workers, strict=True)
    ]
    if len(set(workers)) == problem.stages:
        factor, _ = least_maximum(scaled)
    else:
        nothing = Sharing([np.zeros_like(item) for item in scaled], [0] * problem.stages, [np.inf])
        factor, _ = least_shared(Sharing(scaled, workers, [np.inf] * len(limits)), nothing)
    finite = [limit for limit in limits if np.isfinite(limit)]
    least = ", ".join(sorted({f"{_megabytes_up(limit * factor)} MB" for limit in finite}))
    given = ", ".join(sorted({f"{limit / 1e6:,.6g} MB" for limit in finite}))
    return PartitionError(
        f"{problem.stages} stages do not fit into {given} per device",
        "A stage holds its parameters, gradients and optimizer state, and activations of its micro-batches in flight "
        f"(stage 0: {problem.flights(0)}).",
        f"The least cap that works is {least}; or use more stages, a smaller micro-batch, or fewer in flight.",
    )


def _megabytes_up(amount: float) -> str:
    """Megabytes with one decimal, rounded up, so that the number given really works."""
    return f"{np.ceil(amount / 1e5) / 10:,.1f}"


def _describe(
    graph: UnitGraph,
    problem: Problem,
    order: Sequence[int],
    cuts: Cuts,
    strategy: str,
    costs: IntervalCosts | None = None,
) -> Balance:
    """Costs of a cut order, with the bound that needs no search."""
    costs = costs or IntervalCosts(graph)
    stages = range(problem.stages)
    times = [pick(costs.stage_ms(problem, stage), cuts, stage) for stage in stages]
    lanes = [0.0] * len(problem.lanes)
    memory = [0.0] * (max(problem.worker_of(stage) for stage in stages) + 1)
    for stage in stages:
        lanes[problem.lane_of(stage)] += times[stage]
        memory[problem.worker_of(stage)] += pick(costs.stage_bytes(problem, stage), cuts, stage)
    stage_of = [0] * len(graph)
    for unit, stage in zip(order, stages_of(cuts, len(graph)), strict=True):
        stage_of[unit] = stage
    speeds = [problem.worker(stage).lane_speed for stage in stages]
    lane_speeds = {problem.lane_of(stage): speeds[stage] for stage in stages}
    loads = [unit.ms for unit in graph.units]
    largest = max(loads) / max(speeds)
    bound = max(sum(loads) / sum(lane_speeds.values()), largest)
    if len(set(speeds)) == 1:
        bound = max(bound, trivial_bound([load / speeds[0] for load in loads], len(lanes)))
    return Balance(
        tuple(stage_of), tuple(times), tuple(lanes), tuple(memory), min(bound, max(lanes)), "bound", 0, strategy
    )
