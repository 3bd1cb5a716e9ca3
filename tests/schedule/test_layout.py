"""A layout says for every replica, stage and worker the same thing, however it was made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.errors import ScheduleError
from hybridpar.schedule.layout import Edge, Layout


def test_placements():
    assert Layout.dealt(3, 3).lane_of == (0, 1, 2)
    assert Layout.dealt(6, 2, "loop").lane_of == (0, 1, 0, 1, 0, 1)
    assert Layout.dealt(6, 3, "v").lane_of == (0, 1, 2, 2, 1, 0)
    two = Layout.dealt(4, 4, workers=2)
    assert two.worker_of == (0, 0, 1, 1)
    assert two.lanes_each == 2
    assert [two.home(stage) for stage in range(4)] == [0, 0, 1, 1]
    assert [two.crosses(edge) for edge in two.edges] == [False, True, False]


@pytest.mark.parametrize(
    ("stages", "lanes", "kind", "workers"),
    [(3, 2, "linear", None), (3, 2, "loop", None), (3, 2, "v", None), (4, 4, "linear", 3), (2, 2, "ring", None)],
)
def test_placements_that_do_not_fit_are_refused(stages, lanes, kind, workers):
    with pytest.raises(ScheduleError, match=rf"{stages} stages do not fit {lanes} lane"):
        Layout.dealt(stages, lanes, kind, workers=workers)


def test_edges_of_a_stage():
    layout = Layout.dealt(3, 3, edges=(Edge(0, 1), Edge(0, 2), Edge(1, 2)))
    assert layout.into(2) == [Edge(0, 2), Edge(1, 2)]
    assert layout.out_of(0) == [Edge(0, 1), Edge(0, 2)]


def test_replicas_of_a_stage_have_neighbouring_ranks():
    layout = Layout.dealt(4, 2, "v", replicas=3)
    assert layout.texts() == ("0,3,3,0", "1,4,4,1", "2,5,5,2")
    assert layout.ranks == ((0, 3), (1, 4), (2, 5))
    assert layout.columns == ((0, 1, 2), (3, 4, 5))
    assert [(layout.replica_of(rank), layout.position_of(rank)) for rank in (1, 5)] == [(1, 0), (2, 1)]
    assert layout.peer(1, 1) == 4
    assert (layout.workers, layout.positions, layout.kind, list(layout.kinds)) == (6, 2, "v", [0])
    assert layout.replica(2).rows == (((0, 0), (1, 0), (1, 0), (0, 0)),)


def test_replicas_of_different_numbers_of_workers():
    layout = Layout.unequal([(0, 0), (2, 1)])
    assert layout.ranks == ((0,), (1, 2))
    assert layout.columns == ((0, 2), (0, 1)), "the sums of both stages are apart"
    assert [layout.replica(index).lane_of for index in layout.kinds] == [(0, 0), (1, 0)]
    assert (layout.workers, layout.positions, layout.kind, layout.is_equal) == (3, 2, "linear", False)


def test_only_what_the_kind_alone_says_can_be_dealt_out_to_other_workers():
    usual = Layout.dealt(3, 3, replicas=2)
    moved = Layout.parse(["4,0,2", "5,1,3"])
    assert (moved.kind, moved.is_equal) == ("linear", True)
    assert [usual.is_usual, moved.is_usual, Layout.unequal([(0, 0), (1, 2)]).is_usual] == [True, False, False]
    odd = Layout.repeated([(0, 1), (0, 0), (0, 1)])
    assert (odd.lane_of, odd.kind, odd.is_usual) == ((1, 0, 1), None, False)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["linear", "loop", "v"]))
def test_a_layout_survives_as_text(lanes, workers, replicas, kind):
    lanes *= workers
    stages = {"linear": lanes, "loop": 3 * lanes, "v": 2 * lanes}[kind]
    layout = Layout.dealt(stages, lanes, kind, workers=workers, replicas=replicas)
    assert Layout.parse(layout.texts()) == layout
    assert layout.kind == kind or lanes == 1, "on a single lane all kinds are alike"


@pytest.mark.parametrize("texts", [[], [""], ["0,"], ["0,x"], ["0,1", "2"], ["0,2"], ["0,1", "1,2"], ["-1"], ["0.1.2"]])
def test_other_texts_are_refused(texts):
    with pytest.raises(ValueError, match="is no layout"):
        Layout.parse(texts)
