"""A failed prediction is told, with the cause: planted ones are found again."""

from __future__ import annotations

import pytest

from hybridpar.errors import PlanError
from hybridpar.plan import Plan, Ran
from hybridpar.planner.compare import Comparison, slower_links
from hybridpar.planner.evaluate import Evaluator, Outcome
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.record import candidate_of, plan_of
from hybridpar.planner.search import find_plan
from hybridpar.planner.space import Space
from tests.planner.small import cluster, inputs

#: Workers are replicas: what is exchanged between them is what these tests are about.
REPLICAS = Fixed(workers=2, replicas=2)


def planned(bandwidth: float, **options) -> Plan:
    return plan_of(find_plan(inputs(spec=cluster(2, bandwidth), fixed=REPLICAS, **options)))


def as_on(plan: Plan, bandwidth: float, **changed) -> Ran:
    """What a run of the plan would measure on a link of another speed."""
    asked = inputs(spec=cluster(2, bandwidth), fixed=REPLICAS)
    evaluator = Evaluator(Space(asked))
    found: Outcome = evaluator.outcome(candidate_of(plan, evaluator))
    figures = {
        "step_ms": found.step_ms,
        "exposed_sync_ms": found.exposed_sync_ms,
        "bytes_sent_per_step": round(found.bytes_sent),
    }
    return Ran(**{**figures, **changed})


def test_every_plan_of_a_space_is_found_again_from_what_it_says():
    answer = find_plan(inputs(fidelity="lossy"), prune=False)
    assert len(answer.ranked) > 20
    for outcome in answer.ranked:
        assert candidate_of(plan_of(answer, outcome), answer.evaluator) == outcome.candidate
    plan = plan_of(answer)
    assert plan.pipeline is not None
    edited = plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"micro_batches": 999})})
    with pytest.raises(PlanError, match="edited by hand"):
        candidate_of(edited, answer.evaluator)


def test_a_run_as_predicted_is_no_warning():
    plan = planned(1e8)
    compared = Comparison(plan, as_on(plan, 1e8))
    assert compared.warnings() == []
    assert compared.apart == pytest.approx(0, abs=1e-3)
    assert compared.link_slowdown == 1.0


@pytest.mark.parametrize(("planted", "true"), [(1e9, 2e7), (1e8, 2e7), (2e7, 1e8)])
def test_a_planted_wrong_bandwidth_is_noticed_and_both_are_named(planted, true):
    plan = planned(planted)
    compared = Comparison(plan, as_on(plan, true))
    (warning,) = compared.warnings()
    assert "exchange of gradients" in warning
    assert ("slower" if true < planted else "faster") in warning
    assert f"planned with {planted / 1e6:,.4g} MB/s" in warning
    # Latency is scaled with the bandwidth, which is why the link that is found is not quite the true one.
    assert compared.link_slowdown == pytest.approx(planted / true, rel=0.15)


def test_waiting_for_a_slower_worker_is_not_taken_for_the_link():
    plan = planned(1e9)
    assert plan.predicted is not None
    exposed, step = plan.predicted.exposed_sync_ms or 0.0, plan.predicted.step_ms
    assert step is not None
    assert Comparison(plan, as_on(plan, 1e9, exposed_sync_ms=exposed + 0.04 * step)).link_slowdown == 1.0
    slowdown = Comparison(plan, as_on(plan, 1e9, exposed_sync_ms=exposed + 0.2 * step)).link_slowdown
    assert slowdown is not None
    assert slowdown > 1.1


def test_slow_computing_is_told_from_a_slow_link():
    plan = planned(1e9)
    assert plan.predicted is not None
    assert plan.predicted.step_ms is not None
    slow = as_on(plan, 1e9, step_ms=1.5 * plan.predicted.step_ms)
    assert "busy or throttled" in Comparison(plan, slow).warnings()[0]
    assert "other programs keep this machine busy (load 2.0 per core)" in Comparison(plan, slow, load=2.0).warnings()[0]
    fast = as_on(plan, 1e9, step_ms=0.5 * plan.predicted.step_ms)
    assert "busier when it was profiled" in Comparison(plan, fast).warnings()[0]


def test_other_bytes_and_more_memory_are_told_and_less_memory_is_not():
    plan = planned(1e8)
    assert plan.predicted is not None
    sent, memory = plan.predicted.bytes_sent_per_step, plan.predicted.memory_bytes
    assert sent
    assert memory
    told = Comparison(
        plan, as_on(plan, 1e8, bytes_sent_per_step=sent // 2, memory_bytes=2 * memory + (1 << 30))
    ).warnings()
    assert ["were not sent with the codec of the plan" in told[0], "allocator" in told[1]] == [True, True]
    for little in (memory // 3, memory + (100 << 20)):
        assert Comparison(plan, as_on(plan, 1e8, memory_bytes=little)).warnings() == []


def test_what_no_link_explains_is_not_blamed_on_it():
    plan = planned(1e10)
    assert plan.predicted is not None
    exposed = 1e6 * (1 + (plan.predicted.exposed_sync_ms or 0.0))
    (warning,) = Comparison(plan, as_on(plan, 1e10, step_ms=2 * exposed, exposed_sync_ms=exposed)).warnings()
    assert "busy" in warning or "no speed of the link explains" in warning
    assert "MB/s" not in warning


def test_one_worker_has_no_link_to_blame():
    plan = plan_of(find_plan(inputs(spec=cluster(1))))
    compared = Comparison(plan, Ran(step_ms=1.0, exposed_sync_ms=0.0))
    assert compared.link_slowdown is None
    assert "MB/s" not in compared.warnings()[0]


def test_links_that_are_slower_take_longer_for_everything():
    spec = cluster(2, 1e8)
    slow = slower_links(spec, 4.0)
    assert slow.between is not None
    assert (slow.between.bandwidth, slow.between.latency_ms) == (2.5e7, 0.4)
    assert slower_links(slow, 0.25) == spec
