"""A failed prediction is told, with the part of the step that differs."""

from __future__ import annotations

import pytest

from hybridpar.plan import Plan, StepFigures
from hybridpar.planner.compare import prediction_warnings
from hybridpar.planner.evaluate import Evaluator, Outcome
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.record import plan_of
from hybridpar.planner.search import find_plan
from hybridpar.planner.space import Space
from tests.planner.small import cluster, inputs

#: Workers are replicas: what is exchanged between them is what these tests are about.
REPLICAS = Fixed(workers=2, replicas=2)


def planned(bandwidth: float, **options) -> Plan:
    return plan_of(find_plan(inputs(spec=cluster(2, bandwidth), fixed=REPLICAS, **options)))


def as_on(plan: Plan, bandwidth: float, **changed) -> StepFigures:
    """What a run of the plan would measure on a link of another speed."""
    asked = inputs(spec=cluster(2, bandwidth), fixed=REPLICAS)
    evaluator = Evaluator(Space(asked))
    assert plan.pipeline is not None
    asked_for = (1, plan.pipeline.micro_batches)
    same = (one for one in evaluator.space.candidates() if (one.layout.stages, one.micro_batches) == asked_for)
    found: Outcome = evaluator.outcome(next(same))
    figures = {
        "step_ms": found.step_ms,
        "exposed_sync_ms": found.exposed_sync_ms,
        "bytes_sent_per_step": round(found.bytes_sent),
    }
    return StepFigures(**{**figures, **changed})


def test_a_run_as_predicted_is_no_warning():
    plan = planned(1e8)
    assert prediction_warnings(plan, as_on(plan, 1e8)) == []


@pytest.mark.parametrize(("planted", "true"), [(1e9, 2e7), (1e8, 2e7), (2e7, 1e8)])
def test_a_planted_wrong_bandwidth_is_noticed(planted, true):
    plan = planned(planted)
    (warning,) = prediction_warnings(plan, as_on(plan, true))
    assert "exchange of gradients" in warning
    assert "so the link is not as it was" in warning


def test_slow_computing_is_told_from_a_slow_link():
    plan = planned(1e9)
    assert plan.predicted is not None
    assert plan.predicted.step_ms is not None
    slow = as_on(plan, 1e9, step_ms=1.5 * plan.predicted.step_ms)
    assert "throttled, now" in prediction_warnings(plan, slow)[0]
    assert "(other programs: load 2.0 per core)" in prediction_warnings(plan, slow, load=2.0)[0]
    fast = as_on(plan, 1e9, step_ms=0.5 * plan.predicted.step_ms)
    assert "when it was profiled" in prediction_warnings(plan, fast)[0]


def test_other_bytes_and_more_memory_are_told_and_less_memory_is_not():
    plan = planned(1e8)
    assert plan.predicted is not None
    sent, memory = plan.predicted.bytes_sent_per_step, plan.predicted.memory_bytes
    assert sent
    assert memory
    told = prediction_warnings(
        plan, as_on(plan, 1e8, bytes_sent_per_step=sent // 2, memory_bytes=2 * memory + (1 << 30))
    )
    assert ["were not sent with the codec of the plan" in told[0], "allocator" in told[1]] == [True, True]
    for little in (memory // 3, memory + (100 << 20)):
        assert prediction_warnings(plan, as_on(plan, 1e8, memory_bytes=little)) == []
    few = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"bytes_sent_per_step": 11_000})})
    assert prediction_warnings(few, as_on(plan, 1e8, bytes_sent_per_step=13_500)) == [], "of messages beside gradients"
