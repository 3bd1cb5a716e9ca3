"""What a step takes besides its passes, and how much workers slow each other down: positive, and nothing is changed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.partition.profile import UnitTimes, steadied
from hybridpar.planner import store
from hybridpar.planner.evaluate import Evaluator
from hybridpar.planner.profile import MOST_NOISE
from hybridpar.planner.search import find_plan
from hybridpar.planner.space import Space
from hybridpar.planner.step_costs import (
    measure_crowd,
    measure_hand_over,
    measure_step_costs,
    optimizer_like,
    speeds_of,
)
from hybridpar.planner.store import remembered
from tests.planner.small import chain, cluster, inputs
from tests.ranks import run_ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))


@pytest.mark.parametrize(("copies", "kind"), [(0, "SGD"), (1, "SGD"), (2, "AdamW")])
def test_the_rest_of_a_step_is_timed_and_the_model_is_left_alone(copies, kind):
    model, images = net(), torch.randn(4, 3, 8, 8)
    assert type(optimizer_like(model, copies)).__name__ == kind
    before = {name: one.clone() for name, one in model.state_dict().items()}
    found = measure_step_costs(model, images, copies=copies, steps=2)
    assert found.update_ms > 0
    assert found.collect_ms > 0
    assert -1e3 < found.accumulate_ms < 1e3, "adding costs something, and so does new memory"
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert type(model[1]) is nn.BatchNorm2d


def test_handing_over_takes_time_that_stages_pay_and_a_whole_model_does_not():
    assert 0 < measure_hand_over(torch.device("cpu"), 40) < 1000
    asked = inputs(spec=cluster(2, kind="cuda"), most_micro_batches=2)
    slow = Evaluator(Space(replace(asked, overhead_ms=1.0)))
    for candidate in slow.space.candidates():
        plain = Evaluator(Space(asked)).outcome(candidate).step_ms
        if candidate.layout.stages == 1:
            assert slow.outcome(candidate).step_ms == plain
        elif candidate.schedule != "greedy":
            assert slow.outcome(candidate).step_ms > plain


def crowd(world: World) -> dict[int, float]:
    store.MOST_NOISE = math.inf  # whatever else runs meanwhile
    return measure_crowd(net(), torch.randn(4, 3, 8, 8), world, steps=2)


def test_workers_of_a_host_are_measured_beside_each_other():
    one, other = run_ranks(crowd, 2)
    assert one == other
    assert one.keys() == {2}
    assert one[2] >= 1
    assert run_ranks(crowd, 1) == [{}]


@pytest.mark.parametrize(
    ("hosts", "rounds", "speeds"),
    [
        ("ab", [[10, 10.4], [10.3, 10]], [1, 1]),  # noise
        ("abc", [[10, 11.9, 12.4], [10, 12, 12.3]], [1, 1, 1]),  # less than counts
        ("abc", [[10, 20, 21], [10.2, 20, 20.5]], [1, 10 / 20.5, 10 / 20.5]),
        ("abb", [[30, 10, 12], [30, 11, 12]], [1, 2.5, 2.5]),  # of a host the slowest worker
        ("ab", [[10, 20], [10, 12]], [1, 1]),  # a disturbance that the second measurement does not confirm
    ],
)
def test_speeds_count_where_two_measurements_tell_hosts_apart(hosts, rounds, speeds):
    assert speeds_of(list(hosts), rounds) == pytest.approx(speeds)


def test_a_crowded_host_and_the_rest_of_a_step_are_in_the_prediction():
    profile = chain([(5, 10)], [(100, 100)])
    spec = cluster(1).model_copy(update={"inside": cluster(2).between, "between": None})
    spec = spec.model_copy(update={"hosts": (spec.hosts[0].model_copy(update={"devices": 2, "kind": "cuda"}),)})
    plain = find_plan(inputs(profile, spec, batch=8, most_micro_batches=1)).baselines

    known = replace(profile, crowd={2: 1.5}, update_ms=3.0, collect_ms=2.5, accumulate_ms=0.5)
    crowded = find_plan(inputs(known, spec, batch=8, most_micro_batches=1)).baselines
    assert crowded["one device"].step_ms == pytest.approx(plain["one device"].step_ms + 3.0 - 0.5)
    gap = crowded["data parallel"].step_ms - plain["data parallel"].step_ms
    assert gap == pytest.approx(0.5 * 15 + 1.5 * (3.0 + 2.0))


def test_noise_beyond_reason_is_doubted_but_not_taken_literally():
    noisy = chain([(5, 10), (5, 10)], [(8, 8), (8, 8)], noise=2.6)
    found = find_plan(inputs(noisy, cluster(2, 1e10)))
    assert found.noise == MOST_NOISE
    assert found.chosen.candidate.layout.workers == 2, "twice as fast is no tie, whatever one measurement says"


def times(noise: float, *forward: float) -> UnitTimes:
    return UnitTimes(tuple(forward), tuple(2 * one for one in forward), sum(forward), noise=noise)


def test_a_profile_measured_again_takes_the_least_times_and_trusts_those_that_agree():
    assert steadied([times(0.2, 1.0, 2.0)]) == times(0.2, 1.0, 2.0)
    one, disturbed, other = times(0.3, 1.0, 2.0), times(2.6, 3.0, 6.0), times(0.2, 1.03, 2.03)
    found = steadied([one, disturbed, other])
    assert found.forward_ms == (1.0, 2.0)
    assert found.noise == pytest.approx(0.02), "two of three agree to within 2 %"


def test_figures_are_remembered_under_their_key(tmp_path):
    calls = []

    def measure() -> dict[str, float]:
        calls.append(1)
        return {"ms": float(len(calls))}

    assert remembered("step", {"model": "a"}, tmp_path, measure) == {"ms": 1.0}
    assert remembered("step", {"model": "a"}, tmp_path, measure) == {"ms": 1.0}
    assert remembered("step", {"model": "b"}, tmp_path, measure) == {"ms": 2.0}
    for path in tmp_path.glob("step-*.json"):
        path.write_text("{}")
    assert remembered("step", {"model": "a"}, tmp_path, measure) == {"ms": 3.0}
    assert remembered("step", {"model": "a"}, None, measure) == {"ms": 4.0}


def test_the_least_memory_of_a_schedule_is_what_its_order_keeps():
    asked = inputs(spec=cluster(3), batch=24)
    evaluator = Evaluator(Space(asked))
    checked = set()
    for candidate in evaluator.space.candidates():
        outcome = evaluator.outcome(candidate)
        least = max(need for need, _ in evaluator.least_needs(candidate))
        assert least <= outcome.memory_bytes * (1 + 1e-9)
        ordered = max(need for need, _ in evaluator.least_needs(candidate, make_order=True))
        assert least <= ordered <= outcome.memory_bytes * (1 + 1e-9)
        if candidate.layout.lanes_each == 1:
            assert ordered == pytest.approx(outcome.memory_bytes)
            assert least == ordered or candidate.schedule == "greedy"
            checked.add(candidate.schedule)
    assert {"1f1b", "gpipe", "greedy"} <= checked
