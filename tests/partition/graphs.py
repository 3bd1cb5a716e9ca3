"""Random unit graphs, and their costs computed by definition, to test the fast algorithms against."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from hybridpar.partition.balance import balance_graph
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


@dataclass(frozen=True)
class Request:
    """What a cut is asked for: a speed for each stage, and the speed of the links between them."""

    speeds: tuple[float, ...]
    link_speed: float | None

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.speeds)

    def balance(self, graph: UnitGraph) -> tuple[int, ...]:
        """The cut."""
        return balance_graph(graph, self.stages, speeds=self.speeds, link_speed=self.link_speed)


@st.composite
def requests(draw: st.DrawFn, graph: UnitGraph) -> Request:
    """A random request that the graph has enough units for."""
    stages = draw(st.integers(1, min(len(graph), 4)))
    speeds = tuple(draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(stages))
    return Request(speeds, draw(st.sampled_from([None, 1000.0, 500.0])))


def all_cuts(count: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut an order into stages without an empty one."""
    return itertools.combinations(range(1, count), stages - 1)


def stage_times(graph: UnitGraph, request: Request, stage_of: Sequence[int]) -> list[float]:
    """Time of every stage, by its definition."""
    times = []
    for stage, speed in enumerate(request.speeds):
        time = sum(unit.ms for unit, home in zip(graph.units, stage_of, strict=True) if home == stage) / speed
        if stage and request.link_speed is not None:
            time += sum(received_bytes(graph, stage_of, stage)) / request.link_speed * 1e3
        times.append(time)
    return times


def received_bytes(graph: UnitGraph, stage_of: Sequence[int], stage: int) -> tuple[int, int]:
    """Bytes that enter a stage and bytes of gradients that leave it, by their definition."""
    into = back = 0
    for value in graph.values:
        home = stage_of[value.producer] if value.producer >= 0 else 0
        users = {stage_of[unit] for unit in value.consumers} | ({max(stage_of)} if value.is_output else set())
        if stage in users and stage != home:
            into += value.bytes
            back += value.gradient_bytes
    return into, back


def stage_memory(graph: UnitGraph, stage_of: Sequence[int], stage: int) -> int:
    """Peak memory of a stage under 1F1B, by its definition: a parameter, its gradient, and its momentum."""
    saved = sum(item.bytes for item in graph.saved if any(stage_of[unit] == stage for unit in item.units))
    parameters = sum(unit.parameter_bytes for unit, home in zip(graph.units, stage_of, strict=True) if home == stage)
    return (max(stage_of) + 1 - stage) * saved + 3 * parameters
