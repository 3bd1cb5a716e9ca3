"""What finalists took decides: the fastest, or the simplest of those that cannot be told from it."""

from __future__ import annotations

from hybridpar.planner.explain import describe
from hybridpar.planner.search import finalists, find_plan, verdicts, verified
from tests.planner.small import cluster, inputs


def test_finalists_are_the_best_with_the_chosen_plan_and_plain_data_parallelism():
    answer = find_plan(inputs(spec=cluster(3, 1e7), batch=12, fidelity="lossy"))
    chosen = finalists(answer, 3)
    assert 3 <= len(chosen) <= 5
    assert answer.chosen in chosen
    assert answer.baselines["data parallel"] in chosen
    assert [one.score for one in chosen] == sorted(one.score for one in chosen)
    for one in chosen:
        assert one.candidate.layout.stages == 1 or one.candidate.layout.workers in (1, 3)
    assert len(finalists(answer, 1)) <= 3


def test_the_fastest_by_the_clock_is_chosen_whatever_was_predicted():
    answer = find_plan(inputs(fidelity="close"))
    outcomes = finalists(answer, 4)
    times = [[20.0, 21.0, 20.5, 20.2, 20.4] for _ in outcomes]
    times[-1] = [10.0, 11.0, 10.4, 10.1, 10.3]
    found = verified(answer, outcomes, times)
    assert found.chosen == outcomes[-1]
    names = {one.candidate: describe(one.candidate, answer) for one in outcomes}
    rows = verdicts(found, names)
    assert rows[-1][4] == "chosen: the fastest"
    assert rows[0][2] == 20.4
    assert rows[0][3] == 20.4 / outcomes[0].step_ms - 1
    assert rows[0][4] == "+10.1 ms"


def test_of_plans_that_noise_cannot_tell_apart_the_simplest_is_chosen():
    answer = find_plan(inputs(fidelity="close"))
    outcomes = finalists(answer, 4)
    simplest = min(outcomes, key=lambda one: one.candidate.simplicity)
    noisy = [[20.0, 26.0, 18.0, 23.0, 21.0], [22.0, 21.0, 24.0, 19.0, 21.5], [19.0, 24.0, 22.0, 20.0, 23.0]]
    times = [noisy[place % 3] for place in range(len(outcomes))]
    assert verified(answer, outcomes, times).chosen == simplest


def test_what_slows_a_whole_round_down_hides_no_difference():
    answer = find_plan(inputs(fidelity="close"))
    outcomes = finalists(answer, 4)
    simplest = min(range(len(outcomes)), key=lambda place: outcomes[place].candidate.simplicity)
    rounds = [1.0, 3.0, 1.0, 2.0, 1.1, 1.0, 5.0]
    times = [[10.0 * slow for slow in rounds] for _ in outcomes]
    times[simplest] = [one * 1.05 for one in times[simplest]]
    assert verified(answer, outcomes, times).chosen != outcomes[simplest]


def test_steps_to_the_target_count_beside_the_clock():
    answer = find_plan(inputs(spec=cluster(2, 1e7), fidelity="lossy"))
    plain = answer.baselines["data parallel"]
    assert plain is not None
    lossy = next(one for one in answer.ranked if one.candidate.codec.steps > 1)
    times = [[100.0, 100.0, 100.0], [96.0, 96.0, 96.0]]
    assert verified(answer, [plain, lossy], times).chosen == plain, "4 % a step do not pay for 24 % more steps"
    times[1] = [70.0, 70.0, 70.0]
    assert verified(answer, [plain, lossy], times).chosen == lossy
