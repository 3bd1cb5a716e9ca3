import itertools

import pytest

from hybridpar.schedule.shares import WorkCost, best_division, longest_time

CASES = [
    ([(0, 2), (0, 1)], [20, 40]),
    ([(0, 1), (0, 1), (0, 1)], [20, 20, 20]),
    ([(12, 1), (0, 1)], [24, 36]),
    ([(100, 1), (0, 1), (0, 3)], [0, 45, 15]),  # the first would not even have begun
    ([(60, 1), (0, 1)], [0, 60]),
]


@pytest.mark.parametrize(("costs", "best"), CASES)
def test_the_best_division_is_known(costs, best):
    assert best_division([WorkCost(*one) for one in costs], 60) == pytest.approx(best)


@pytest.mark.parametrize("costs", [[(3, 2), (7, 0.5), (1, 1)], [(0, 3), (40, 1), (5, 0.7)]])
def test_no_whole_division_is_faster(costs):
    costs = [WorkCost(*one) for one in costs]
    best = best_division(costs, 30)
    assert sum(best) == pytest.approx(30)
    every = (one for one in itertools.product(range(31), repeat=3) if sum(one) == 30)
    least = min(longest_time(costs, one) for one in every)
    assert longest_time(costs, best) <= least + 1e-9
    assert least - longest_time(costs, best) <= max(cost.sample_ms for cost in costs)
