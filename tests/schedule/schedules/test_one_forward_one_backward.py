"""`1f1b` has the order of torch."""

from __future__ import annotations

import pytest

from tests.schedule.requests import order_of_torch, own_order, request


@pytest.mark.parametrize(("lanes", "count"), [(2, 4), (4, 8), (4, 4), (3, 7)])
def test_1f1b_is_torchs(lanes, count):
    # torch 2.14 numbers the forward passes of its last rank from 1, so that one is left out.
    assert own_order("1f1b", request(lanes, lanes, count=count))[:-1] == order_of_torch("1F1B", lanes, count)[:-1]
