"""`zero_bubble` has the bubble of its paper."""

from __future__ import annotations

import pytest

from hybridpar.schedule.schedules import make
from tests.schedule.requests import request, step_ms


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (8, 16)])
def test_zero_bubble_leaves_a_third_of_the_bubble(stages, count):
    """ZB-H1 with equal thirds: (p - 1)(f + b_i - w) is left of 3 (p - 1): Qi et al. 2024, table 2."""
    wanted = request(stages, stages, count=count)
    assert step_ms(make("zero_bubble", wanted), wanted) == pytest.approx(3.0 * count + stages - 1)
