"""The planner's tables: which plans are drawn, what rows say of steps that were measured, and what is promised."""

from __future__ import annotations

from benchmarks.planner.common import drawn_plans
from tests.planner.small import ALL_RATES, cluster, inputs


def test_plans_are_drawn_over_the_whole_range_with_all_baselines():
    asked = inputs(spec=cluster(2, 1e7), fidelity="lossy", rates=ALL_RATES, most_micro_batches=2)
    plans, chosen = drawn_plans(asked, 12)
    assert len(plans) >= 12
    names = [plan.name for plan in plans]
    assert len(set(names)) == len(names)
    assert chosen.keys() == {"exact", "close", "lossy"}
    assert set(chosen.values()) <= set(names)
    for baseline in ("one device", "data parallel over 2 devices", "data parallel over 2 devices, qsgd_mn:bits=4"):
        assert baseline in names
    assert {1, 2, 3, 4, 5} <= {plan.position for plan in plans}
    assert max(plan.position for plan in plans) > 0.8 * 12
    plain = next(plan for plan in plans if plan.name == "data parallel over 2 devices")
    assert plain.fidelities == ("exact", "close", "lossy")
    assert next(plan for plan in plans if plan.name.endswith("devices, qsgd_mn:bits=4")).fidelities == ("lossy",)
