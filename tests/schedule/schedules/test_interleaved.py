"""`interleaved` has the order of torch and the bubble of its paper, and never deadlocks."""

from __future__ import annotations

import pytest

from hybridpar.schedule.layout import Layout
from hybridpar.schedule.schedules import ScheduleRequest, make
from tests.schedule.proof import prove
from tests.schedule.requests import order_of_torch, own_order, request, step_ms


@pytest.mark.parametrize(("lanes", "per_lane", "count"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (4, 2, 10), (4, 2, 3)])
def test_interleaved_is_torchs_where_torch_can(lanes, per_lane, count):
    own = own_order("interleaved", request(lanes * per_lane, lanes, "loop", count))
    assert own == order_of_torch("Interleaved1F1B", lanes, count, per_lane)


@pytest.mark.parametrize(("lanes", "chunks", "count"), [(2, 2, 4), (4, 2, 8), (4, 3, 12)])
def test_interleaving_divides_the_bubble(lanes, chunks, count):
    """The fill and drain take (P - 1)(f + b) / v: Narayanan et al. 2021, section 2.2."""
    wanted = request(lanes * chunks, lanes, "loop", count)
    bound = count * chunks * 3.0
    assert step_ms(make("interleaved", wanted), wanted) == pytest.approx(bound + (lanes - 1) * 3.0)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_interleaved_never_locks():
    for lanes in range(1, 9):
        for chunks in range(1, 5):
            layout = Layout.dealt(lanes * chunks, lanes, "loop")
            for count in range(1, 33):
                prove(make("interleaved", ScheduleRequest(layout, count)), layout)
