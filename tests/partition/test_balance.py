from __future__ import annotations

import itertools
import re
import time
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.errors import PartitionError, UsageError
from hybridpar.partition.balance import balance_graph, spread
from hybridpar.partition.cost import IntervalCosts, Link, Problem, Worker
from hybridpar.partition.exact import exact_optimum, fused_chains
from hybridpar.partition.graph import Unit, UnitGraph, Value
from hybridpar.partition.strategies import STRATEGIES, stages_of
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
    found = balance_graph(graph, problem, certify=False)
    every = [stages_of(cuts, len(graph)) for cuts in all_cuts(len(graph), problem.stages)]
    best = min(max(lane_loads(graph, problem, stage_of)) for stage_of in every)
    assert found.largest == pytest.approx(best)
    assert found.worker_loads == pytest.approx(tuple(lane_loads(graph, problem, list(found.stage_of))))
    equal = [stage_of for stage_of in every if max(lane_loads(graph, problem, stage_of)) <= best * (1 + 1e-12)]
    assert sum(graph.cut_bytes(found.stage_of)) == min(sum(graph.cut_bytes(stage_of)) for stage_of in equal)
    assert found.lower_bound_ms <= found.largest * (1 + 1e-12)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_memory_caps_are_kept_or_the_least_cap_is_named(data: st.DataObject) -> None:
    graph = data.draw(unit_graphs())
    problem = data.draw(random_problems(graph, shared=True))
    lanes = data.draw(st.sampled_from([1, 2])) if problem.placement == "linear" and problem.stages % 2 == 0 else 1
    workers = tuple(replace(item, lanes=lanes, co_run=1.0) for item in problem.everyone[::lanes])
    scaled = replace(
        graph,
        units=tuple(replace(unit, parameter_bytes=unit.parameter_bytes * 10**5) for unit in graph.units),
        saved=tuple(replace(item, bytes=item.bytes * 10**5) for item in graph.saved),
    )
    problem = replace(problem, workers=workers, stage_slack=float("inf"))
    every = [stages_of(cuts, len(graph)) for cuts in all_cuts(len(graph), problem.stages)]
    # Caps that some cuts just meet, and one that none does.
    peaks = sorted({max(worker_memory(scaled, problem, stage_of)) for stage_of in every})
    cap = max(1, data.draw(st.sampled_from([peaks[0] - 10**5, *peaks])))
    problem = replace(problem, workers=tuple(replace(item, memory=cap) for item in workers))
    fitting = [stage_of for stage_of in every if max(worker_memory(scaled, problem, stage_of)) <= cap]
    if fitting:
        found = balance_graph(scaled, problem, certify=False)  # all_cuts knows the written order only
        assert max(worker_memory(scaled, problem, list(found.stage_of))) <= cap
        assert max(found.memory) <= cap
        assert found.largest == pytest.approx(min(max(lane_loads(scaled, problem, item)) for item in fitting))
    else:
        with pytest.raises(PartitionError) as caught:
            balance_graph(scaled, problem)
        named = re.search(r"least cap that works is ([\d,.]+) MB", caught.value.fix)
        assert named
        least = min(max(worker_memory(scaled, problem, item)) for item in every)
        assert float(named[1].replace(",", "")) * 1e6 == pytest.approx(least, abs=0.11e6)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_loop_and_v_balance_workers_as_well_as_any_cut(data: st.DataObject) -> None:
    graph = data.draw(unit_graphs(least=2))
    problem = replace(
        data.draw(random_problems(graph, shared=True)), stage_slack=data.draw(st.sampled_from([0.1, 9.0]))
    )
    found = balance_graph(graph, problem, certify=False)
    every = [stages_of(cuts, len(graph)) for cuts in all_cuts(len(graph), problem.stages)]
    longest = [max(stage_time(graph, problem, item, stage) for stage in range(problem.stages)) for item in every]
    allowed = [
        item
        for item, time in zip(every, longest, strict=True)
        if time <= min(longest) * (1 + problem.stage_slack) or problem.placement == "linear"
    ]
    assert found.largest == pytest.approx(min(max(lane_loads(graph, problem, item)) for item in allowed))


@given(unit_graphs(most=7), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_certificate_is_the_best_of_all_convex_cuts(graph: UnitGraph, stages: int) -> None:
    stages = min(stages, len(graph))
    found = balance_graph(graph, Problem(stages))
    best = float("inf")
    for assignment in itertools.product(range(stages), repeat=len(graph)):
        if all(assignment[before] <= assignment[after] for before, after in graph.edges()):
            loads = [0.0] * stages
            for unit, stage in zip(graph.units, assignment, strict=True):
                loads[stage] += unit.ms
            best = min(best, max(loads))
    assert found.certificate == "exact"
    assert found.lower_bound_ms <= best * (1 + 1e-9)
    assert found.largest == pytest.approx(best, rel=2e-4)
    assert found.gap >= -1e-9


@given(unit_graphs(), st.data())
@settings(max_examples=60, deadline=None)
def test_every_strategy_gives_convex_stages_without_an_empty_one(graph: UnitGraph, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(graph)))
    for strategy in ("balanced", *STRATEGIES):
        found = balance_graph(graph, Problem(stages), strategy=strategy)
        assert sorted(set(found.stage_of)) == list(range(stages))
        assert all(found.stage_of[before] <= found.stage_of[after] for before, after in graph.edges())
        assert balance_graph(graph, Problem(stages), strategy=strategy) == found, "same profile, same answer"


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


@given(unit_graphs(least=2), st.data())
@settings(max_examples=60, deadline=None)
def test_bytes_never_cost_more_than_the_limit(graph: UnitGraph, data: st.DataObject) -> None:
    stages = data.draw(st.integers(2, len(graph)))
    found = balance_graph(graph, Problem(stages, noise=0.5, slack_limit=0.01))
    if sum(unit.ms for unit in graph.units) > 0:
        assert found.certificate == "exact"
        assert found.gap <= 0.01 + 3e-4


@given(unit_graphs(least=2), st.data())
@settings(max_examples=60, deadline=None)
def test_an_order_changes_nothing_but_the_order(graph: UnitGraph, data: st.DataObject) -> None:
    order: list[int] = []
    while len(order) < len(graph):
        ready = [unit for unit in range(len(graph)) if unit not in order]
        ready = [unit for unit in ready if all(before in order for before, after in graph.edges() if after == unit)]
        order.append(data.draw(st.sampled_from(ready)))
    moved = graph.reordered(order)
    cut = data.draw(st.integers(1, len(graph) - 1))
    new = [int(place >= cut) for place in range(len(graph))]
    old = [new[order.index(unit)] for unit in range(len(graph))]
    problem = Problem(2, link=Link(1000.0, 1.0))
    for stage in range(2):
        assert stage_time(moved, problem, new, stage) == pytest.approx(stage_time(graph, problem, old, stage))
        assert stage_memory(moved, problem, new, stage) == stage_memory(graph, problem, old, stage)
    assert moved.cut_bytes(new) == graph.cut_bytes(old)


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


def least_largest(graph: UnitGraph, stages: int, sizes: list[int]) -> int:
    """The least largest sum of sizes over all cuts."""
    ends = [(0, *cuts, len(graph)) for cuts in all_cuts(len(graph), stages)]
    return min(max(sum(sizes[a:b]) for a, b in itertools.pairwise(places)) for places in ends)


@given(unit_graphs(), st.data())
@settings(max_examples=60, deadline=None)
def test_each_strategy_balances_what_its_name_says(graph: UnitGraph, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(graph)))
    for strategy, what in (("parameters", "parameter_bytes"), ("flops", "flops"), ("time", "ms")):
        sizes = [getattr(unit, what) for unit in graph.units]
        stage_of = balance_graph(graph, Problem(stages), strategy=strategy).stage_of
        loads = [sum(size for size, home in zip(sizes, stage_of, strict=True) if home == k) for k in range(stages)]
        assert max(loads) == least_largest(graph, stages, sizes)
    counts = Counter(balance_graph(graph, Problem(stages), strategy="units").stage_of).values()
    assert max(counts) - min(counts) <= 1


def test_single_tensor_cuts_between_blocks_only() -> None:
    # A skip from u1 to u4: two values cross every border but the first and the last.
    units = tuple(Unit(f"u{index}", forward_ms=1.0) for index in range(6))
    follows = [(0, (1,)), (1, (2, 4)), (2, (3,)), (3, (4,)), (4, (5,))]
    values = (*(Value(f"u{unit}", unit, users, 1) for unit, users in follows), Value("u5", 5, (), 1, 0, True))
    graph = UnitGraph(units, values)
    assert balance_graph(graph, Problem(2), strategy="time").stage_of == (0, 0, 0, 1, 1, 1)
    assert balance_graph(graph, Problem(2), strategy="single-tensor").stage_of in ((0, 0, 1, 1, 1, 1), (0,) * 5 + (1,))


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


def test_unknown_strategy_names_the_near_one() -> None:
    with pytest.raises(UsageError, match="flops"):
        balance_graph(chain(1, 1), Problem(2), strategy="flop")


def test_graphs_that_cost_nothing_are_cut_too() -> None:
    found = balance_graph(chain(0, 0, 0, 0), Problem(3))
    assert sorted(set(found.stage_of)) == [0, 1, 2]
    assert found.balance == 1.0
    assert found.gap == 0.0
    assert found.certificate == "exact"


def test_certificate_improves_the_cut_of_the_models_order() -> None:
    # In the written order 2, 4, 4, 2 three stages need 6; the last unit depends on nothing and may join the first.
    times = (2.0, 4.0, 4.0, 2.0)
    graph = UnitGraph(
        tuple(Unit(f"u{index}", forward_ms=time) for index, time in enumerate(times)), (Value("v", 0, (1,), 1),)
    )
    assert balance_graph(graph, Problem(3), certify=False).largest == 6.0
    best = balance_graph(graph, Problem(3))
    assert best.largest == 4.0
    assert best.certificate == "exact"
    assert best.gap == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    "asked",
    [
        {"link": Link(1e9)},
        {"workers": (Worker(memory=10**9), Worker())},
        {"workers": (Worker(), Worker(speed=2.0))},
        {"workers": (Worker(),), "placement": "loop"},
    ],
)
def test_only_compute_load_at_equal_speeds_is_certified_exact(asked: dict[str, Any]) -> None:
    assert balance_graph(chain(1, 2, 3, 4), Problem(2)).certificate == "exact"
    assert balance_graph(chain(1, 2, 3, 4), Problem(2, **asked)).certificate == "bound"


def test_certificate_gives_up_within_its_budget() -> None:
    wide = UnitGraph(tuple(Unit(f"u{index}", forward_ms=1.0 + index / 7) for index in range(30)))
    assert exact_optimum([unit.ms for unit in wide.units], [], 3, 100.0, down_sets=1000) is None
    found = balance_graph(wide, Problem(3), down_sets=1000)
    assert found.certificate == "bound"
    assert found.lower_bound_ms == pytest.approx(sum(unit.ms for unit in wide.units) / 3)


def test_a_search_over_merged_chains_proves_nothing() -> None:
    # Four chains of 15: 16^4 down-sets are too many, at most 9^4 of chains merged by twos are not.
    units = tuple(Unit(f"u{index}", forward_ms=1.0 + index / 9999) for index in range(60))
    values = tuple(Value(f"u{index}", index, (index + 1,), 1) for index in range(59) if index % 15 != 14)
    graph = UnitGraph(units, values)
    found = balance_graph(graph, Problem(2), down_sets=30_000)
    assert found.down_sets > 0, "the merged search ran"
    assert found.certificate == "bound"
    assert found.lower_bound_ms == pytest.approx(sum(unit.ms for unit in graph.units) / 2)


def test_certificate_gives_up_in_the_middle_of_a_layer() -> None:
    # One down-set of none, 300 of one unit, 44,850 of two: the third layer must never be made.
    tracemalloc.start()
    assert exact_optimum([1.0] * 300, [], 7, 60.0, down_sets=400) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


def test_the_certificate_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten branches of two units between a first and a last one: 3^10 down-sets, as in a block of inception modules.
    heads, tails = range(1, 11), range(11, 21)
    units = tuple(Unit(f"u{index}", forward_ms=1.0 + index / 7) for index in range(22))
    values = (
        Value("u0", 0, tuple(heads), 1),
        *(Value(f"u{head}", head, (tail,), 1) for head, tail in zip(heads, tails, strict=True)),
        *(Value(f"u{tail}", tail, (21,), 1) for tail in tails),
    )
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(hours))
    monkeypatch.setattr(time, "monotonic", lambda: next(hours))
    found = balance_graph(UnitGraph(units, values), Problem(4))
    assert found.certificate == "exact"
    assert found.down_sets == 3**10 + 2


def test_the_work_of_the_certificate_is_counted_in_steps_too() -> None:
    # 2^12 down-sets have six steps each on average, which is more than five.
    wide = [1.0 + index / 7 for index in range(12)]
    assert exact_optimum(wide, [], 5, 100.0, down_sets=2**12) is None
    found = exact_optimum(wide, [], 5, 100.0, down_sets=6 * 2**12 // 5 + 1)
    assert found is not None
    assert found.down_sets == 2**12


@given(unit_graphs(most=8), st.floats(0, 50))
@settings(max_examples=80, deadline=None)
def test_fused_chains_are_an_order_of_the_same_units(graph: UnitGraph, largest: float) -> None:
    loads = [unit.ms for unit in graph.units]
    chains, links = fused_chains(loads, graph.edges(), largest)
    order = [unit for chain in chains for unit in chain]
    assert sorted(order) == list(range(len(graph)))
    assert all(first < second for first, second in links)
    graph.reordered(order)  # raises where it is not topological
    assert all(len(chain) == 1 or sum(loads[unit] for unit in chain) <= largest + 1e-9 for chain in chains)


def test_spread_keeps_cuts_that_are_apart_and_parts_the_others() -> None:
    assert spread((2, 5), 8) == (2, 5)
    assert spread((0, 0), 8) == (1, 2)
    assert spread((8, 8), 8) == (6, 7)


@given(st.lists(st.integers(0, 30), min_size=3, max_size=12), st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_block_partition_is_what_its_authors_prove(times: list[int], stages: int) -> None:
    # Barany and Grinberg: the largest and the smallest block differ by at most the largest element.
    sizes = [0, *times]  # a smallest element of 0, which the scaling takes away from all
    cuts = STRATEGIES.get("block")(chain(*sizes), min(stages, len(sizes)))
    loads = [sum(sizes[begin:end]) for begin, end in itertools.pairwise((0, *cuts, len(sizes)))]
    assert max(loads) - min(loads) <= max(sizes)
