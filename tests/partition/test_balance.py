from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.errors import PartitionError, UsageError
from hybridpar.partition.balance import balance_graph
from hybridpar.partition.cost import IntervalCosts, Link, Problem, Worker
from hybridpar.partition.cuts import stages_of
from hybridpar.partition.graph import Unit, UnitGraph, Value
from tests.partition.graphs import (
    all_cuts,
    lane_loads,
    received_bytes,
    stage_memory,
    stage_time,
    unit_graphs,
    worker_memory,
)
from tests.partition.graphs import problems as random_problems


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
    problem = data.draw(random_problems(graph))
    costs = IntervalCosts(graph)
    cuts = data.draw(st.sampled_from(list(all_cuts(len(graph), problem.stages))))
    stage_of = stages_of(cuts, len(graph))
    ends = (0, *cuts, len(graph))
    for stage in range(problem.stages):
        place = ends[stage], ends[stage + 1]
        assert costs.stage_ms(problem, stage)[place] == pytest.approx(stage_time(graph, problem, stage_of, stage))
        assert costs.stage_bytes(problem, stage)[place] == stage_memory(graph, problem, stage_of, stage)
        assert (costs.incoming[place], costs.returning[place]) == received_bytes(graph, stage_of, stage)
    assert sum(graph.cut_bytes(stage_of)) == sum(received_bytes(graph, stage_of, s)[0] for s in range(problem.stages))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_linear_cut_is_the_best_of_all_cuts(data: st.DataObject) -> None:
    graph = data.draw(unit_graphs())
    problem = data.draw(random_problems(graph))
    found = balance_graph(graph, problem)
    every = [stages_of(cuts, len(graph)) for cuts in all_cuts(len(graph), problem.stages)]
    best = min(max(lane_loads(graph, problem, stage_of)) for stage_of in every)
    assert found.largest == pytest.approx(best)
    assert found.worker_loads == pytest.approx(tuple(lane_loads(graph, problem, list(found.stage_of))))
    equal = [stage_of for stage_of in every if max(lane_loads(graph, problem, stage_of)) <= best * (1 + 1e-12)]
    assert sum(graph.cut_bytes(found.stage_of)) == min(sum(graph.cut_bytes(stage_of)) for stage_of in equal)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_memory_caps_are_kept_or_one_that_works_is_named(data: st.DataObject) -> None:
    graph = data.draw(unit_graphs())
    problem = data.draw(random_problems(graph, shared=True))
    scaled = replace(
        graph,
        units=tuple(replace(unit, parameter_bytes=unit.parameter_bytes * 10**5) for unit in graph.units),
        saved=tuple(replace(item, bytes=item.bytes * 10**5) for item in graph.saved),
    )
    every = [stages_of(cuts, len(graph)) for cuts in all_cuts(len(graph), problem.stages)]

    def capped(cap: int) -> Problem:
        return replace(problem, workers=tuple(replace(item, memory=max(1, cap)) for item in problem.everyone))

    # Caps that some cuts just meet, and one that none does.
    peaks = sorted({max(worker_memory(scaled, problem, stage_of)) for stage_of in every})
    cap = data.draw(st.sampled_from([peaks[0] - 10**5, *peaks]))
    fitting = [stage_of for stage_of in every if max(worker_memory(scaled, problem, stage_of)) <= max(1, cap)]
    try:
        found = balance_graph(scaled, capped(cap))
    except PartitionError as error:
        named = re.search(r"cap that works is ([\d,.]+) MB", error.fix)
        assert named
        enough = float(named[1].replace(",", "")) * 1e6
        balance_graph(scaled, capped(round(enough)))
        if problem.placement == "linear":  # a stage has its device to itself
            assert not fitting
            assert enough == pytest.approx(peaks[0], abs=0.11e6)
    else:
        assert max(worker_memory(scaled, problem, list(found.stage_of))) <= max(1, cap)
        assert found.memory == tuple(worker_memory(scaled, problem, list(found.stage_of)))
        if problem.placement == "linear":
            assert found.largest == pytest.approx(min(max(lane_loads(scaled, problem, item)) for item in fitting))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_longest_stage_of_loop_and_v_is_as_short_as_in_any_cut(data: st.DataObject) -> None:
    graph = data.draw(unit_graphs(least=2))
    problem = data.draw(random_problems(graph, shared=True))
    every = [stages_of(cuts, len(graph)) for cuts in all_cuts(len(graph), problem.stages)]
    longest = [max(stage_time(graph, problem, item, stage) for stage in range(problem.stages)) for item in every]
    assert max(balance_graph(graph, problem).loads) == pytest.approx(min(longest))


@given(unit_graphs(), st.data())
@settings(max_examples=60, deadline=None)
def test_stages_are_convex_and_none_is_empty(graph: UnitGraph, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(graph)))
    found = balance_graph(graph, Problem(stages))
    assert sorted(set(found.stage_of)) == list(range(stages))
    assert all(found.stage_of[before] <= found.stage_of[after] for before, after in graph.edges())
    assert balance_graph(graph, Problem(stages)) == found, "same profile, same answer"


@given(unit_graphs(least=2), st.data())
@settings(max_examples=60, deadline=None)
def test_bytes_never_cost_more_than_the_limit(graph: UnitGraph, data: st.DataObject) -> None:
    stages = data.draw(st.integers(2, len(graph)))
    fastest = balance_graph(graph, Problem(stages)).largest
    assert balance_graph(graph, Problem(stages, noise=0.5)).largest <= 1.01 * fastest * (1 + 1e-9)


@given(unit_graphs(least=2))
@settings(max_examples=50, deadline=None)
def test_more_stages_never_hurt_where_cuts_are_free(graph: UnitGraph) -> None:
    loads = [balance_graph(graph, Problem(stages)).largest for stages in range(1, len(graph) + 1)]
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(loads))


def test_bytes_break_ties_only_within_the_noise() -> None:
    # Cutting after `a` takes 20.2 and moves 1 byte; cutting after `b` takes 20.1 and moves 100.
    graph = UnitGraph(
        (Unit("a", forward_ms=10.0), Unit("b", forward_ms=10.1), Unit("c", forward_ms=10.1)),
        (Value("a", 0, (1,), 1), Value("b", 1, (2,), 100), Value("c", 2, (), 0, 0, True)),
    )
    assert balance_graph(graph, Problem(2)).stage_of == (0, 0, 1)
    assert balance_graph(graph, Problem(2, noise=0.02)).stage_of == (0, 1, 1)


@pytest.mark.parametrize(
    ("asked", "flights"),
    [
        ({}, [4, 3, 2, 1]),
        ({"micro_batches": 2}, [2, 2, 2, 1]),
        ({"in_flight": "gpipe", "micro_batches": 6}, [6, 6, 6, 6]),
        ({"in_flight": "gpipe"}, [16, 16, 16, 16]),
        ({"in_flight": 3}, [3, 3, 3, 3]),
        ({"in_flight": 3, "micro_batches": 2}, [2, 2, 2, 2]),
    ],
)
def test_a_schedule_says_how_many_micro_batches_wait(asked: dict[str, Any], flights: list[int]) -> None:
    problem = Problem(4, **asked)
    assert [problem.flights(stage) for stage in range(4)] == flights


@pytest.mark.parametrize(
    ("placement", "workers", "lanes"), [("linear", 4, [0, 1, 2, 3]), ("loop", 2, [0, 1, 0, 1]), ("v", 2, [0, 1, 1, 0])]
)
def test_a_placement_says_which_lane_runs_a_stage(placement: Any, workers: int, lanes: list[int]) -> None:
    problem = Problem(4, (Worker(),) * workers, placement)
    assert [problem.lane_of(stage) for stage in range(4)] == lanes


def test_slow_devices_get_less() -> None:
    graph = chain(*[1.0] * 9)
    found = balance_graph(graph, Problem(2, (Worker(speed=2.0), Worker(speed=1.0))))
    assert found.stage_of.count(0) == 6
    assert found.worker_loads == (3.0, 3.0)


def test_lanes_of_one_device_share_its_speed() -> None:
    graph = chain(*[1.0] * 10)
    found = balance_graph(graph, Problem(3, (Worker(lanes=2, co_run=1.5), Worker())))
    assert found.worker_loads == pytest.approx((4.5, 4.5, 4.0))


def test_a_slow_link_moves_the_cut_to_few_bytes() -> None:
    units = tuple(Unit(f"u{index}", forward_ms=1.0) for index in range(4))
    values = (Value("u0", 0, (1,), 10, 10), Value("u1", 1, (2,), 10_000, 10_000), Value("u2", 2, (3,), 10_000, 10_000))
    graph = UnitGraph(units, values)
    assert balance_graph(graph, Problem(2)).stage_of == (0, 0, 1, 1)
    assert balance_graph(graph, Problem(2, link=Link(1e6))).stage_of == (0, 1, 1, 1)


def test_too_many_stages_is_one_error_that_says_what_works() -> None:
    with pytest.raises(PartitionError, match="4 stages are asked for, the model has 3 unit") as caught:
        balance_graph(chain(1, 1, 1), Problem(4))
    assert "--stages 3" in caught.value.fix


@pytest.mark.parametrize(
    "wrong",
    [
        {"stages": 0},
        {"stages": 3, "placement": "v", "workers": (Worker(), Worker())},
        {"stages": 3, "placement": "loop", "workers": (Worker(), Worker())},
        {"stages": 3, "workers": (Worker(), Worker())},
        {"stages": 2, "in_flight": "2f2b"},
        {"stages": 2, "in_flight": 0},
        {"stages": 2, "micro_batches": 0},
        {"stages": 2, "optimizer_copies": -1},
    ],
)
def test_contradictory_requests_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Problem(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Worker, {"lanes": 0}),
        (Worker, {"speed": 0.0}),
        (Worker, {"speed": float("inf")}),
        (Worker, {"memory": 0}),
        (Worker, {"co_run": 0.0}),
        (Worker, {"co_run": float("nan")}),
        (Link, {"bytes_per_second": 0.0}),
        (Link, {"bytes_per_second": -1.0}),
        (Link, {"latency_ms": -1.0}),
        (Link, {"latency_ms": float("nan")}),
    ],
)
def test_impossible_devices_and_links_are_refused(kind: type, wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError) as caught:
        kind(**wrong)
    assert str(*wrong.values()) in caught.value.what


def test_graphs_that_cost_nothing_are_cut_too() -> None:
    found = balance_graph(chain(0, 0, 0, 0), Problem(3))
    assert sorted(set(found.stage_of)) == [0, 1, 2]
    assert found.balance == 1.0
