"""What a partition is compared with: the optimum over all convex cuts, and the cuts that others make."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.partition.exact import exact_optimum
from benchmarks.partition.strategies import STRATEGIES, cut_by
from hybridpar.partition.graph import UnitGraph
from tests.partition.graphs import all_cuts, unit_graphs
from tests.partition.test_balance import chain


@given(unit_graphs(most=7), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_the_optimum_is_the_best_of_all_convex_cuts(graph: UnitGraph, stages: int) -> None:
    loads, best = [unit.ms for unit in graph.units], float("inf")
    for assignment in itertools.product(range(stages), repeat=len(graph)):
        if all(assignment[before] <= assignment[after] for before, after in graph.edges()):
            sums = [0.0] * stages
            for load, stage in zip(loads, assignment, strict=True):
                sums[stage] += load
            best = min(best, max(sums))
    found = exact_optimum(loads, graph.edges(), stages, sum(loads))
    assert found is not None
    assert best * (1 - 2e-4) <= found.lower_bound <= best * (1 + 1e-9)


def test_the_search_gives_up_beyond_its_budget() -> None:
    # 2^12 down-sets have six steps each on average, which is more than five.
    wide = [1.0 + index / 7 for index in range(12)]
    assert exact_optimum(wide, [], 5, 100.0, down_sets=2**12) is None
    found = exact_optimum(wide, [], 5, 100.0, down_sets=6 * 2**12 // 5 + 1)
    assert found is not None
    assert found.down_sets == 2**12


@given(unit_graphs(), st.data())
@settings(max_examples=40, deadline=None)
def test_each_strategy_balances_what_its_name_says(graph: UnitGraph, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(graph)))
    cuts = {strategy: cut_by(strategy, graph, stages) for strategy in STRATEGIES}
    assert all(sorted(set(stage_of)) == list(range(stages)) for stage_of in cuts.values())
    ends = [(0, *inner, len(graph)) for inner in all_cuts(len(graph), stages)]
    for strategy, what in (("parameters", "parameter_bytes"), ("flops", "flops"), ("time", "ms")):
        sizes = [getattr(unit, what) for unit in graph.units]
        sums = [sum(size for size, own in zip(sizes, cuts[strategy], strict=True) if own == k) for k in range(stages)]
        assert max(sums) == min(max(sum(sizes[a:b]) for a, b in itertools.pairwise(places)) for places in ends)
    counts = [cuts["units"].count(stage) for stage in range(stages)]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.integers(0, 30), min_size=3, max_size=12), st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_block_partition_is_what_its_authors_prove(times: list[int], stages: int) -> None:
    # Barany and Grinberg: the largest and the smallest block differ by at most the largest element.
    sizes = [0, *times]  # a smallest element of 0, which the scaling takes away from all
    cuts = STRATEGIES["block"](chain(*sizes), min(stages, len(sizes)))
    loads = [sum(sizes[begin:end]) for begin, end in itertools.pairwise((0, *cuts, len(sizes)))]
    assert max(loads) - min(loads) <= max(sizes)
