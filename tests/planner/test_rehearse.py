"""Plain data parallelism runs before others are predicted, and what it took goes into what is predicted of all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.machine.cluster_file import ClusterSpec
from hybridpar.planner import store
from hybridpar.planner.evaluate import Evaluator
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.rehearse import CODEC, LEAST, MOST, Rehearsal, measure_rehearsal, rehearsed
from hybridpar.planner.search import find_plan
from hybridpar.planner.space import DATA_PARALLEL, Space
from tests.planner.small import cluster, inputs
from tests.ranks import run_ranks


def plain_ms(asked: PlannerInputs) -> float:
    found = find_plan(replace(asked, fixed=Fixed())).baselines[DATA_PARALLEL]
    assert found is not None
    return found.step_ms


@pytest.mark.parametrize("fixed", [Fixed(), Fixed(stages=2)])
def test_what_plain_data_parallelism_took_is_what_is_predicted_of_it(fixed):
    asked = inputs(spec=cluster(2, 1e9), fixed=fixed)
    before = plain_ms(asked)
    found = rehearsed(asked, [Rehearsal("none", 4, 1.1 * before)])
    assert plain_ms(found) == pytest.approx(1.1 * before, rel=2e-3)
    assert found.fixed == fixed
    assert 1 < found.profile.together < MOST


def test_fewer_samples_than_a_step_has_are_predicted_as_they_ran():
    asked = inputs(spec=cluster(2, 1e9))
    half = Rehearsal("none", 2, 1.1 * plain_ms(replace(asked, batch=4)))
    assert rehearsed(asked, [half]).profile.together == pytest.approx(1.1, abs=0.05)
    found = replace(rehearsed(asked, [half]), batch=4)
    assert plain_ms(found) == pytest.approx(half.step_ms, rel=2e-3)


def test_one_device_has_nobody_to_be_slowed_by_and_pipelines_have():
    asked = inputs(spec=cluster(2, 1e10))
    slower = rehearsed(asked, [Rehearsal("none", 4, 1.2 * plain_ms(asked))])
    for candidate in Space(asked).candidates():
        one, other = (Evaluator(Space(each)).outcome(candidate).step_ms for each in (asked, slower))
        if candidate.layout.workers == 1:
            assert other == one
        elif candidate.schedule != "greedy":
            assert other > one


def test_a_disturbance_is_not_believed_and_no_rehearsal_changes_nothing():
    asked = inputs()
    assert rehearsed(asked, ()) == asked
    assert rehearsed(asked, [Rehearsal("none", 4, 1e6)]).profile.together == pytest.approx(MOST, abs=2e-3)
    assert rehearsed(asked, [Rehearsal("none", 4, 1e-6)]).profile.together == pytest.approx(LEAST, abs=2e-3)


def test_what_travelled_compressed_is_predicted_as_it_went():
    asked = inputs(spec=cluster(2, 1e8), fidelity="lossy")
    of_codec = replace(
        asked, fixed=Fixed(stages=1, codecs=dict.fromkeys((one.name for one in asked.profile.parameters), CODEC))
    )
    before = find_plan(of_codec).chosen.step_ms
    found = rehearsed(asked, [Rehearsal(CODEC, 4, 1.1 * before)])
    assert find_plan(replace(of_codec, profile=found.profile)).chosen.step_ms == pytest.approx(1.1 * before, rel=2e-3)
    assert found.profile.together - 1 == pytest.approx((found.profile.together_coded - 1) / 2, abs=1e-4)
    both = rehearsed(asked, [Rehearsal("none", 4, plain_ms(asked)), Rehearsal(CODEC, 4, 1.1 * before)]).profile
    assert both.together == pytest.approx(1, abs=2e-3)
    assert both.together_coded == found.profile.together_coded
    assert rehearsed(replace(asked, rates={}), [Rehearsal(CODEC, 4, 1.1 * before)]).profile == asked.profile


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))


def rehearse(world: World, bandwidth: float, memory_format: str, codec: bool) -> tuple[tuple[Rehearsal, ...], bool]:
    model = net()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    spec = ClusterSpec.model_validate({"hosts": [{"devices": world.size}], "inside": {"bandwidth": bandwidth}})
    took = measure_rehearsal(
        model, torch.randn(4, 3, 8, 8), world, spec, memory_format=memory_format, codec=codec, steps=2
    )
    same = all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    layouts = all(one.is_contiguous() for one in model.parameters())
    return took, same and layouts and all(one.grad is None for one in model.parameters())


@pytest.mark.parametrize(("memory_format", "codec"), [("contiguous", True), ("channels_last", False)])
def test_steps_of_the_job_are_timed_and_the_model_is_left_alone(memory_format, codec):
    one, other = run_ranks(rehearse, 2, 1e12, memory_format, codec)
    assert one == other, "the slowest worker's time is everybody's"
    assert [took.codec for took in one[0]] == (["none", CODEC] if codec else ["none"])
    assert all(took.step_ms > 0 for took in one[0])
    assert one[1]


def test_where_the_link_says_what_a_step_takes_there_is_no_rehearsal():
    assert run_ranks(rehearse, 2, 1.0, "contiguous", True) == [((), True)] * 2
    assert run_ranks(rehearse, 1, 1e12, "contiguous", True) == [((), True)]


def twice(world: World, cache: Path) -> tuple[bool, bool]:
    store.MOST_NOISE = math.inf  # whatever else runs meanwhile
    first = ClusterSpec.model_validate({"hosts": [{"devices": world.size}], "inside": {"bandwidth": 1e12}})
    other = ClusterSpec.model_validate({"hosts": [{"devices": world.size}], "inside": {"bandwidth": 2e12}})
    found = [
        measure_rehearsal(net(), torch.randn(4, 3, 8, 8), world, spec, steps=2, cache=cache)
        for spec in (first, first, other)
    ]
    return found[0] == found[1], found[0] == found[2]


def test_it_is_remembered_for_as_long_as_the_cluster_is_the_same(tmp_path):
    assert run_ranks(twice, 2, tmp_path) == [(True, False)] * 2
    kept = list(tmp_path.glob("rehearsal-*.json"))
    assert len(kept) == 2
    for path in kept:
        path.write_text(path.read_text().replace('"data": {"none": ', '"data": {"none": "'))
    assert run_ranks(twice, 2, tmp_path) == [(True, False)] * 2, "what is damaged is measured again"
