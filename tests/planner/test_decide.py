"""What finalists took decides: the fastest, or the simplest of those that cannot be told from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridpar.planner.decide import finalists, verified
from hybridpar.planner.search import find_plan
from tests.planner.small import cluster, inputs


def test_finalists_are_the_best_with_the_chosen_plan_and_plain_data_parallelism():
    answer = find_plan(inputs(spec=cluster(3, 1e9), batch=12, fidelity="lossy"))
    chosen = finalists(answer, 3)
    assert 3 <= len(chosen) <= 5
    assert answer.chosen in chosen
    assert answer.baselines["data parallel"] in chosen
    assert [one.score for one in chosen] == sorted(one.score for one in chosen)
    for one in chosen:
        assert one.candidate.layout.stages == 1 or one.candidate.layout.workers in (1, 3)
    assert len(finalists(answer, 1)) <= 3


@pytest.mark.parametrize(("ratio", "runs"), [(1.9, True), (2.1, False)])
def test_plain_data_parallelism_runs_also_where_it_is_predicted_to_be_slower(ratio, runs):
    answer = find_plan(inputs(spec=cluster(3, 1e9), batch=12, fidelity="lossy"))
    plain = answer.baselines["data parallel"]
    slower = replace(plain, score=ratio * answer.chosen.score)
    baselines, ranked = {"data parallel": slower}, tuple(outcome for outcome in answer.ranked if outcome != plain)
    assert (slower in finalists(replace(answer, baselines=baselines, ranked=ranked), 3)) is runs


@pytest.fixture(scope="module")
def outcomes():
    return finalists(find_plan(inputs(fidelity="close")), 4)


def test_the_fastest_by_the_clock_is_chosen_whatever_was_predicted(outcomes):
    times = [[20.0, 21.0, 20.5, 20.2, 20.4] for _ in outcomes]
    times[-1] = [10.0, 11.0, 10.4, 10.1, 10.3]
    found = verified(outcomes, times)
    assert found.chosen == outcomes[-1]
    assert found.measured_ms[0] == 20.4
    assert (found.verdict(len(outcomes) - 1), found.verdict(0)) == ("chosen: the fastest", "+10.1 ms")


def test_of_plans_that_noise_cannot_tell_apart_the_simplest_is_chosen(outcomes):
    noisy = [[20.0, 26.0, 18.0, 23.0, 21.0], [22.0, 21.0, 24.0, 19.0, 21.5], [19.0, 24.0, 22.0, 20.0, 23.0]]
    simplest = min(range(len(outcomes)), key=lambda index: outcomes[index].candidate.simplicity)
    times = [noisy[(index - simplest + 2) % 3] for index in range(len(outcomes))]  # the slowest is the simplest's
    found = verified(outcomes, times)
    assert found.chosen == outcomes[simplest]
    assert found.verdict(simplest) == "chosen: the simplest within the noise"
    faster = [index for index, time in enumerate(found.measured_ms) if time < found.measured_ms[simplest]]
    assert faster
    assert {found.verdict(index) for index in faster} <= {
        f"{gap} ms, within the noise, and less simple" for gap in ("-1.0", "-0.5")
    }


def test_what_slows_a_whole_round_down_hides_no_difference(outcomes):
    simplest = min(range(len(outcomes)), key=lambda index: outcomes[index].candidate.simplicity)
    times = [[10.0 * slow for slow in (1.0, 3.0, 1.0, 2.0, 1.1, 1.0, 5.0)] for _ in outcomes]
    times[simplest] = [time * 1.05 for time in times[simplest]]
    assert verified(outcomes, times).chosen != outcomes[simplest]


def test_steps_to_the_target_count_beside_the_clock():
    answer = find_plan(inputs(spec=cluster(2, 1e7), fidelity="lossy"))
    plain = answer.baselines["data parallel"]
    assert plain is not None
    lossy = next(one for one in answer.ranked if one.candidate.codec.steps > 1)
    assert verified([plain, lossy], [[100.0] * 3, [96.0] * 3]).chosen == plain, "4 % do not pay for 7 % more steps"
    assert verified([plain, lossy], [[100.0] * 3, [70.0] * 3]).chosen == lossy
