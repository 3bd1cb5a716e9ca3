"""The planner's tables: which plans are drawn, what rows say of steps that were measured, and what is promised."""

from __future__ import annotations

import math

import pytest

from benchmarks.planner.common import Drawn, Setting, drawn_plans
from benchmarks.planner.predicted import error_row
from benchmarks.planner.regret import regret_rows
from benchmarks.planner.target import _rows
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


def test_errors_are_those_of_the_median_of_the_visits():
    row = error_row(SETTING, drawn("a", 110.0), [90.0, 100.0, 400.0], "foreign load 0.00 cores", slower=1.1)
    assert row.value == pytest.approx(0.1)
    assert (row.low, row.high) == (pytest.approx(110 / 400 - 1), pytest.approx(110 / 90 - 1))
    assert "predicted 110.0 ms" in row.extra
    assert "machine 1.100 times as slow" in row.extra
    assert "rehearsed" in error_row(SETTING, drawn("b", 50.0), [100.0], "", rehearsed=True).what


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


def test_time_to_the_target_holds_planning_and_is_over_the_best_of_the_others(monkeypatch):
    monkeypatch.setenv("RIG_LINK", "1gbit")
    steps = {"planned": [100.0, math.inf, 110.0], "ddp": [100.0, 100.0, 100.0], "ddp-fp16": [100.0, math.inf, 100.0]}
    times = {"planned": [50.0], "ddp": [200.0], "ddp-fp16": [120.0]}
    starts = {"planned": 0.0, "ddp": 3.0, "ddp-fp16": 0.0}
    rows = {one.what: one for one in _rows(steps, times, starts, {"seconds": 2.0, "again": 0.5, "told": "onebit"})}
    assert rows["seconds, ddp"].value == pytest.approx(3 + 20)
    assert rows["seconds, planned"].value == pytest.approx(110 * 0.05 + 2)
    assert rows["seconds, planned"].high == math.inf
    assert rows["seconds, ddp-fp16"].value == pytest.approx(12)
    gain = rows["speed-up over the best of DDP and its hooks"]
    assert gain.extra == "ddp-fp16"
    assert gain.value == pytest.approx((12 / 7 + 12 / 7.5) / 2), "of the seeds with which any got there"
    assert gain.verdict == "missed"
    again = rows["speed-up over the best of DDP and its hooks, once the machine and the model have been measured"]
    assert again.value == pytest.approx((12 / 5.5 + 12 / 6) / 2)
    assert again.at_least is None
