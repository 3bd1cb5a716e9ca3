"""Tests the alignment of the clocks of several processes, on which timelines of several workers depend."""

from __future__ import annotations

import itertools

import pytest

from hybridpar.comm.clocks import gather_spans
from hybridpar.comm.world import World
from hybridpar.schedule.actions import parse_action
from hybridpar.schedule.spans import Span, StepSpans
from tests.ranks import run_ranks

SKEW = 1000.0


def spans_at(origin):
    return StepSpans(origin, (Span(0, "compute", 0, parse_action("0F0"), 0.0, 2.5),))


def gather_with_skew(world, hosts):
    """Every host's clock is ahead by a thousand seconds times its number; all act at the same moments 0, 1, 2, ..."""
    ahead = SKEW * hosts[world.rank]
    ticks = itertools.count(1)
    mine = {step: spans_at(10.0 * step + ahead) for step in range(3 + world.rank)}
    found = gather_spans(world, mine, identity=f"host {hosts[world.rank]}", clock=lambda: next(ticks) + ahead)
    origins = {step: {rank: one.origin for rank, one in ranks.items()} for step, ranks in found.steps.items()}
    return origins, found.clocks, found.ahead


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0), (0, 1, 1), (0, 1, 2)])
def test_all_origins_are_on_the_clock_of_rank_0(hosts):
    for rank, (origins, clocks, ahead) in enumerate(run_ranks(gather_with_skew, len(hosts), hosts)):
        assert clocks == len(set(hosts))
        assert ahead == pytest.approx(SKEW * hosts[rank])
        assert sorted(origins) == [0, 1, 2], "only steps that all workers recorded"
        for step, by_rank in origins.items():
            assert by_rank == pytest.approx(dict.fromkeys(range(len(hosts)), 10.0 * step))


def test_alone_nothing_moves():
    found = gather_spans(World(), {7: spans_at(3.0)})
    assert found.steps == {7: {0: spans_at(3.0)}}
    assert (found.clocks, found.ahead) == (1, 0.0)
