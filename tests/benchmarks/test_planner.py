"""The planner's tables: which plans are drawn, what rows say of steps that were measured, and what is promised."""

from __future__ import annotations

import pytest

from benchmarks.planner.common import Drawn, Setting, drawn_plans
from benchmarks.planner.regret import regret_rows
from hybridpar.plan import ModelInfo, trivial_plan
from tests.planner.small import ALL_RATES, cluster, inputs

SETTING = Setting("resnet18", 32, 16)


def drawn(name: str, predicted: float, steps: float = 1.0, *fidelities: str) -> Drawn:
    plan = trivial_plan(ModelInfo(name="chain", fingerprint="0" * 16, parameters=1))
    return Drawn(name, plan, predicted, 1, steps, fidelities or ("exact", "close", "lossy"))


def test_plans_are_drawn_over_the_whole_range_with_all_baselines():
    asked = inputs(spec=cluster(2, 1e7), fidelity="lossy", rates=ALL_RATES, most_micro_batches=2)
    plans, chosen = drawn_plans(asked, 20)
    assert len(plans) >= 20
    names = [one.name for one in plans]
    assert len(set(names)) == len(names)
    assert chosen.keys() == {"exact", "close", "lossy"}
    assert set(chosen.values()) <= set(names)
    for baseline in ("one device", "data parallel over 2 devices", "data parallel over 2 devices, qsgd_mn:bits=4"):
        assert baseline in names
    assert {1, 2, 3, 4, 5} <= {one.place for one in plans}
    assert max(one.place for one in plans) > 0.8 * 20
    plain = next(one for one in plans if one.name == "data parallel over 2 devices")
    assert plain.fidelities == ("exact", "close", "lossy")
    assert next(one for one in plans if one.name.endswith("devices, qsgd_mn:bits=4")).fidelities == ("lossy",)


def test_regret_counts_steps_to_the_target_and_only_what_a_fidelity_allows():
    plans = [drawn("plain", 1.0), drawn("other", 1.0), drawn("codec", 1.0, 1.1, "lossy")]
    times = {"plain": [100.0, 102.0], "other": [98.0, 100.0], "codec": [80.0, 82.0]}
    rows = regret_rows(SETTING, plans, {"exact": "plain", "lossy": "plain"}, times, [101.0, 101.0], "")
    by_name = {one.what: one for one in rows}
    assert by_name["chosen over best, exact"].value == pytest.approx((100 / 98 + 102 / 100) / 2)
    assert by_name["chosen over best, exact"].verdict == "met"
    assert by_name["chosen over best, lossy"].value == pytest.approx((100 / 88 + 102 / 90.2) / 2)
    assert by_name["chosen over best, lossy"].verdict == "missed"
    assert by_name["chosen over DDP fp32, exact"].verdict == "met"
