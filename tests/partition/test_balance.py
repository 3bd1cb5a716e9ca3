from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.errors import PartitionError, UsageError
from hybridpar.partition.balance import IntervalCosts, balance_graph, stages_of
from hybridpar.partition.graph import Unit, UnitGraph, Value
from tests.partition.graphs import (
    all_cuts,
    received_bytes,
    requests,
    stage_memory,
    stage_times,
    unit_graphs,
)


def sent_ahead(graph: UnitGraph, stage_of: Sequence[int]) -> int:
    return sum(ahead for ahead, _ in graph.crossing(stage_of).values())


def chain(*times: float) -> UnitGraph:
    units = tuple(Unit(f"u{index}", forward_ms=time) for index, time in enumerate(times))
    values = tuple(
        Value(f"u{index}", index, (index + 1,) if index + 1 < len(times) else (), 1, 1, index + 1 == len(times))
        for index in range(len(times))
    )
    return UnitGraph(units, values)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_interval_costs_are_what_their_definition_says(data: st.DataObject) -> None:
    graph = data.draw(unit_graphs())
    request = data.draw(requests(graph))
    costs = IntervalCosts(graph)
    cuts = data.draw(st.sampled_from(list(all_cuts(len(graph), request.stages))))
    stage_of = stages_of(cuts, len(graph))
    ends = (0, *cuts, len(graph))
    expected = stage_times(graph, request, stage_of)
    times, memory = costs.times(request.speeds, request.link_speed), costs.memory(request.stages)
    for stage in range(request.stages):
        interval = ends[stage], ends[stage + 1]
        assert times[stage][interval] == pytest.approx(expected[stage])
        assert memory[stage][interval] == stage_memory(graph, stage_of, stage)
        assert (costs.incoming[interval], costs.returning[interval]) == received_bytes(graph, stage_of, stage)
    assert sent_ahead(graph, stage_of) == sum(received_bytes(graph, stage_of, s)[0] for s in range(request.stages))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_cut_is_the_best_of_all_cuts(data: st.DataObject) -> None:
    graph = data.draw(unit_graphs())
    request = data.draw(requests(graph))
    chosen = request.balance(graph)
    every = [stages_of(cuts, len(graph)) for cuts in all_cuts(len(graph), request.stages)]
    best = min(max(stage_times(graph, request, stage_of)) for stage_of in every)
    assert max(stage_times(graph, request, chosen)) == pytest.approx(best)
    equal = [stage_of for stage_of in every if max(stage_times(graph, request, stage_of)) <= best * (1 + 1e-12)]
    assert sent_ahead(graph, chosen) == min(sent_ahead(graph, stage_of) for stage_of in equal)


@given(unit_graphs(), st.data())
@settings(max_examples=60, deadline=None)
def test_stages_are_convex_and_none_is_empty(graph: UnitGraph, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(graph)))
    stage_of = balance_graph(graph, stages)
    assert sorted(set(stage_of)) == list(range(stages))
    assert all(stage_of[before] <= stage_of[after] for before, after in graph.edges())
    assert balance_graph(graph, stages) == stage_of, "same profile, same answer"


def test_bytes_break_ties_only_within_the_noise() -> None:
    # Cutting after `a` takes 20.2 and moves 1 byte; cutting after `b` takes 20.1 and moves 100.
    graph = UnitGraph(
        (Unit("a", forward_ms=10.0), Unit("b", forward_ms=10.1), Unit("c", forward_ms=10.1)),
        (Value("a", 0, (1,), 1), Value("b", 1, (2,), 100), Value("c", 2, (), 0, 0, True)),
    )
    assert balance_graph(graph, 2) == (0, 0, 1)
    assert balance_graph(graph, 2, noise=0.02) == (0, 1, 1)


def test_a_slow_link_moves_the_cut_to_few_bytes() -> None:
    units = tuple(Unit(f"u{index}", forward_ms=1.0) for index in range(4))
    values = (Value("u0", 0, (1,), 10, 10), Value("u1", 1, (2,), 10_000, 10_000), Value("u2", 2, (3,), 10_000, 10_000))
    graph = UnitGraph(units, values)
    assert balance_graph(graph, 2) == (0, 0, 1, 1)
    assert balance_graph(graph, 2, link_speed=1e6) == (0, 1, 1, 1)


def test_a_number_of_stages_that_no_cut_has_is_an_error_that_says_what_works() -> None:
    with pytest.raises(PartitionError, match="4 stages are asked for, the model has 3 unit") as caught:
        balance_graph(chain(1, 1, 1), 4)
    assert "--stages 3" in caught.value.fix
    with pytest.raises(UsageError, match="0 stages"):
        balance_graph(chain(1, 1, 1), 0)


def test_graphs_that_cost_nothing_are_cut_too() -> None:
    assert sorted(set(balance_graph(chain(0, 0, 0, 0), 3))) == [0, 1, 2]
