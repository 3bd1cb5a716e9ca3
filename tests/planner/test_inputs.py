"""Inputs: a plan holds them, they give the same plan again, and a plan made elsewhere is told from one made here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from hybridpar.errors import PlanError, UsageError
from hybridpar.machine.cluster_file import parse_cluster
from hybridpar.plan import ModelInfo, Partition, Plan, Stage, read_plan
from hybridpar.planner.inputs import PlannerInputs, check_made_for, inputs_of_plan
from hybridpar.planner.profile import ModelProfile, SizedTimes
from hybridpar.planner.record import plan_of
from hybridpar.planner.search import find_plan
from tests.planner.small import chain, cluster, inputs, random_inputs


def recorded(data: dict[str, Any] | None) -> Plan:
    """A plan that says that it was made from something."""
    model = ModelInfo(name="net", fingerprint="", parameters=0)
    return Plan(model=model, partition=Partition(stages=(Stage(units=()),)), inputs=data)


@settings(max_examples=20, deadline=None)
@given(random_inputs())
def test_inputs_survive_json(asked: PlannerInputs):
    assert inputs_of_plan(recorded(json.loads(json.dumps(asked.to_data())))) == asked


def test_a_plan_can_be_made_again_from_what_it_recorded(tmp_path):
    for fidelity, bandwidth in (("exact", 1e7), ("lossy", 1e7), ("lossy", 1e10)):
        answer = find_plan(inputs(spec=cluster(2, bandwidth), fidelity=fidelity))
        plan = plan_of(answer)
        plan.save(tmp_path / "plan.json")
        read = read_plan(tmp_path / "plan.json")
        assert read == plan
        again = find_plan(inputs_of_plan(read))
        assert again.chosen == answer.chosen
        assert plan_of(again).to_json() == plan.to_json()


def over_all(asked: PlannerInputs) -> Plan:
    """Plain data parallelism over all workers."""
    answer = find_plan(asked)
    return plan_of(answer, answer.baselines["data parallel"])


def test_a_plan_made_elsewhere_is_told():
    plan = over_all(inputs(spec=cluster(2)))
    check_made_for(plan, cluster(2))
    with pytest.raises(PlanError) as caught:
        check_made_for(plan, cluster(3))
    assert "the number of hosts is 2 there and 3 here" in caught.value.what
    assert "hybridpar plan MODEL" in caught.value.fix


def test_a_plan_is_for_the_same_machine_measured_another_time_but_not_for_another_link():
    plan = plan_of(find_plan(inputs(spec=cluster(2, 1e8, memory="8GB"))))
    again = cluster(2, 1.2e8, memory="7.9GB", memory_bandwidth=1e10)
    level = again.between.model_copy(update={"latency_ms": 0.3})
    check_made_for(plan, again.model_copy(update={"between": level, "name": "again"}))
    for other, told in (
        (cluster(2, 3e8, memory="8GB"), "between.bandwidth is 100000000.0 there and 300000000.0 here"),
        (cluster(2, 1e8, memory="2GB"), "hosts.0.memory"),
        (cluster(2, 1e8, memory="8GB", kind="cuda"), "hosts.0.kind is cpu there and cuda here"),
        (
            again.model_copy(update={"between": None, "inside": level}),
            "between.bandwidth is 100000000.0 there and None",
        ),
    ):
        with pytest.raises(PlanError, match="made elsewhere") as caught:
            check_made_for(plan, other)
        assert told in caught.value.what


def test_a_plan_for_a_described_cluster_is_for_that_cluster_once_it_is_measured():
    link = {"bandwidth": "1GB/s"}
    described = parse_cluster(
        {
            "hosts": [
                {"devices": 2, "kind": "cuda", "throughput": 8.0},
                {"devices": 4, "kind": "cuda", "throughput": 4.0, "memory": "80GB"},
            ],
            "inside": link,
            "between": link,
        }
    )
    gpu = {"kind": "cuda", "name": "NVIDIA H100", "memory": "79GB", "memory_bandwidth": 2e12}
    measured = parse_cluster(
        {
            "hosts": [{"devices": 4, **gpu}, {"devices": 2, **gpu}],
            "inside": {"bandwidth": 9e8, "latency_ms": 0.02},
            "between": {"bandwidth": 1.1e9},
        }
    )
    plan = over_all(inputs(spec=described))
    check_made_for(plan, measured)
    fewer = measured.model_copy(update={"hosts": (measured.hosts[0], measured.hosts[0])})
    with pytest.raises(PlanError, match=r"hosts\.1\.devices is 2 there and 4 here"):
        check_made_for(plan, fewer)


def test_recorded_inputs_that_cannot_be_read_are_one_error():
    data = inputs().to_data()
    with pytest.raises(PlanError, match="damaged"):
        inputs_of_plan(recorded({**data, "batch": "many"}))
    with pytest.raises(PlanError, match=r"damaged: fixed\.stagse"):
        inputs_of_plan(recorded({**data, "fixed": {"stagse": 2}}))
    first, *others = data["profile"]["parameters"]
    profile = {**data["profile"], "parameters": [{**first, "colour": 1}, *others]}
    with pytest.raises(PlanError, match=r"profile\.parameters\.0\.colour"):
        inputs_of_plan(recorded({**data, "profile": profile}))
    with pytest.raises(PlanError, match="does not record"):
        inputs_of_plan(recorded(None))


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"fidelity": "exakt"}, {"memory_margin": 0.5}, {"sync_lanes": 0}])
def test_impossible_inputs_are_refused(wrong):
    with pytest.raises(UsageError):
        inputs(**wrong)


def sized(samples: int, time: float) -> SizedTimes:
    return SizedTimes(samples, (time,), (2 * time,))


def alone(*sizes: SizedTimes) -> ModelProfile:
    """A model of a single unit."""
    return chain([(0, 0)], [(8, 8)], sizes=sizes)


def test_times_lie_on_the_line_between_measured_sizes():
    profile = alone(sized(4, 5.0), sized(16, 8.0))
    assert profile.unit_ms(4) == ([5.0], [10.0])
    assert profile.unit_ms(8) == ([6.0], [12.0])
    assert profile.unit_ms(32)[0] == [pytest.approx(12.0)]
    assert profile.unit_ms(1)[0] == [pytest.approx(4.25)], "what starting costs does not shrink with the samples"


def test_noise_cannot_make_a_larger_micro_batch_faster():
    profile = alone(sized(4, 5.0), sized(16, 4.0))
    times = [profile.unit_ms(samples)[0][0] for samples in (1, 4, 5, 8, 9, 12, 16, 32, 64)]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[2] == 4.5, "the mean of what was measured at both ends"


def test_one_size_alone_gives_times_in_proportion():
    assert alone(sized(4, 5.0)).unit_ms(2) == ([2.5], [5.0])


def test_a_profile_that_does_not_fit_its_graph_is_refused():
    with pytest.raises(UsageError, match="2 units"):
        chain([(1, 2), (1, 2)], [(8, 8), (8, 8)], sizes=(sized(4, 1.0),))
    with pytest.raises(UsageError, match="below 0"):
        chain([(-1, 2)], [(8, 8)])
