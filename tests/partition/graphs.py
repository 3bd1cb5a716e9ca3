"""Random unit graphs, and their costs computed by definition, to test the fast algorithms against."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

from hybridpar.partition.cost import Link, Problem, Worker
from hybridpar.partition.graph import Saved, Unit, UnitGraph, Value


@st.composite
def unit_graphs(draw: st.DrawFn, least: int = 1, most: int = 8, costly: bool = True) -> UnitGraph:
    """A random graph: skips, fan-out, values that the model returns, inputs used late, shared saved storages."""
    count = draw(st.integers(least, most))
    numbers = st.integers(0, 20)
    units = tuple(
        Unit(
            f"u{index}",
            (f"u{index}",),
            forward_ms=float(draw(numbers)) if costly else 0.0,
            backward_ms=float(draw(numbers)) if costly else 0.0,
            parameter_bytes=draw(numbers),
            flops=draw(numbers),
        )
        for index in range(count)
    )
    values = []
    for producer in range(-1, count):
        later = range(producer + 1, count)
        users = sorted(draw(st.sets(st.sampled_from(later), max_size=3))) if later else []
        is_output = producer >= 0 and (producer == count - 1 or draw(st.booleans()))
        if users or is_output:
            size = draw(numbers)
            gradient = size if producer >= 0 and draw(st.booleans()) else 0
            values.append(Value(f"v{producer}", producer, tuple(users), size, gradient, is_output))
    saved = tuple(
        Saved(draw(numbers), tuple(sorted(draw(st.sets(st.sampled_from(range(count)), min_size=1, max_size=3)))))
        for _ in range(draw(st.integers(0, 3)))
    )
    return UnitGraph(units, tuple(values), saved)


@st.composite
def problems(draw: st.DrawFn, graph: UnitGraph, shared: bool = False) -> Problem:
    """A random request that the graph has enough units for, without memory caps."""
    most = min(len(graph), 4)
    kind = draw(st.sampled_from(["linear", "loop", "v"])) if shared else "linear"
    lanes = draw(st.integers(1, max(1, most // (1 if kind == "linear" else 2))))
    stages = {"linear": lanes, "loop": lanes * 2, "v": lanes * 2}[kind]
    if stages > len(graph):
        kind, stages = "linear", lanes
    speeds = [draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(lanes)]
    return Problem(
        stages,
        tuple(Worker(speed=speed) for speed in speeds),
        kind,
        draw(st.sampled_from([Link(), Link(1000.0), Link(500.0, 3.0)])),
        draw(st.sampled_from(["1f1b", "gpipe", 1, 3])),
        draw(st.sampled_from([None, 2])),
    )


def all_cuts(count: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut an order into stages without an empty one."""
    return itertools.combinations(range(1, count), stages - 1)


def stage_time(graph: UnitGraph, problem: Problem, stage_of: list[int], stage: int) -> float:
    """Time of a stage, by its definition."""
    time = sum(unit.ms for unit, home in zip(graph.units, stage_of, strict=True) if home == stage)
    time /= problem.worker(stage).lane_speed
    if stage and not problem.link.is_free and problem.worker_of(stage) != problem.worker_of(stage - 1):
        into, back = received_bytes(graph, stage_of, stage)
        rate = problem.link.bytes_per_second or float("inf")
        time += (into + back) / rate * 1e3 + problem.link.latency_ms * ((into > 0) + (back > 0))
    return time


def received_bytes(graph: UnitGraph, stage_of: list[int], stage: int) -> tuple[int, int]:
    """Bytes that enter a stage and bytes of gradients that leave it, by their definition."""
    into = back = 0
    for value in graph.values:
        home = stage_of[value.producer] if value.producer >= 0 else 0
        users = {stage_of[unit] for unit in value.consumers} | ({max(stage_of)} if value.is_output else set())
        if stage in users and stage != home:
            into += value.bytes
            back += value.gradient_bytes
    return into, back


def stage_memory(graph: UnitGraph, problem: Problem, stage_of: list[int], stage: int) -> int:
    """Peak memory of a stage, by its definition."""
    kept = sum(item.bytes for item in graph.saved if any(stage_of[unit] == stage for unit in item.units))
    own = sum(unit.parameter_bytes for unit, home in zip(graph.units, stage_of, strict=True) if home == stage)
    return problem.flights(stage) * kept + (2 + problem.optimizer_copies) * own


def lane_loads(graph: UnitGraph, problem: Problem, stage_of: list[int]) -> list[float]:
    """Time of every lane."""
    loads = [0.0] * len(problem.lanes)
    for stage in range(problem.stages):
        loads[problem.lane_of(stage)] += stage_time(graph, problem, stage_of, stage)
    return loads


def worker_memory(graph: UnitGraph, problem: Problem, stage_of: list[int]) -> list[int]:
    """Memory of every worker."""
    held = [0] * len(problem.everyone)
    for stage in range(problem.stages):
        held[problem.worker_of(stage)] += stage_memory(graph, problem, stage_of, stage)
    return held
