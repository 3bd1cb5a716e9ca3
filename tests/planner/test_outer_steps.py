"""The outer loop as a choice of the planner: when it is one, what it is predicted to take, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybridpar.config import TrainConfig
from hybridpar.plan import Sync
from hybridpar.planner import outer_steps
from hybridpar.planner.outer_steps import OuterSteps, expected_steps
from hybridpar.planner.rates import CodecRate
from hybridpar.planner.record import plan_of
from hybridpar.planner.resolve import resolve
from hybridpar.planner.search import find_plan
from tests.planner.small import RATES, chain, cluster, inputs

GOOD = OuterSteps(16, 4, "onebit", 230, 5, 0.1, 1.02, 1.1)
PLAIN = OuterSteps(16, 4, "none", 230, 5, -0.2, 0.95, 0.98)
SLOW = 1.25e6


@pytest.fixture(autouse=True)
def _table(monkeypatch):
    monkeypatch.setattr(outer_steps, "TABLE", (GOOD, PLAIN))


def asked(bandwidth: float = SLOW, **options: Any) -> Any:
    given = {"fidelity": "lossy", "run_steps": 230, "most_stages": 1, **options}
    given.setdefault("rates", {**RATES, "onebit": CodecRate(((1 << 20, 1.0, 1.0),))})
    return inputs(spec=cluster(given.pop("workers", 2), bandwidth), **given)


def chosen_of(found: Any) -> Any:
    return found.chosen.candidate.codec


def test_a_slow_link_gets_an_outer_loop_and_a_fast_one_does_not():
    long = chain([(100, 200)] * 2, [(512, 512)] * 2)
    slow, fast = find_plan(asked(profile=long)), find_plan(asked(1.25e10, profile=long))
    assert chosen_of(slow).outer == GOOD
    assert chosen_of(fast).every == 1


@pytest.mark.parametrize(
    "options",
    [
        {"fidelity": "exact"},
        {"fidelity": "close"},
        {"run_steps": None},
        {"run_steps": 206},
        {"workers": 8, "batch": 16},
    ],
    ids=["exact", "close", "no length", "a shorter run", "more workers"],
)
def test_it_is_no_choice_without_a_measurement_that_says_so(options):
    found = find_plan(asked(**options))
    assert all(one.every == 1 for one in found.evaluator.space.codec_choices if one.codecs or options.get("fidelity"))
    assert chosen_of(found).every == 1


def test_a_step_is_computing_and_a_part_of_the_exchange():
    found = find_plan(asked())
    space, evaluator = found.evaluator.space, found.evaluator
    plain = next(one for one in found.ranked if one.candidate.codec.outer == PLAIN)
    alone = evaluator.outcome(replace(plain.candidate, schedule="accumulate", codec=space.codec_choices[0]))
    size = 4 * sum(one.count for one in space.inputs.profile.parameters)
    assert plain.bytes_sent == pytest.approx(size / 16, rel=1e-3)
    parts = evaluator.parts(plain.candidate)
    assert parts.compute + parts.bubble + parts.sync + parts.codec + parts.update == pytest.approx(parts.step)
    assert parts.step == pytest.approx(plain.step_ms)
    assert size / 16 / SLOW * 1e3 <= plain.step_ms - parts.compute - parts.update < alone.step_ms
    # It is not taken to need fewer steps than training in synchrony.
    assert plain.score == pytest.approx(1.05 * plain.step_ms)


def test_the_plan_says_it():
    found = find_plan(asked())
    plan = plan_of(found)
    assert plan.sync is not None
    assert (plan.sync.outer, plan.sync.codec) == (16, "onebit")
    assert not plan.is_edited
    assert plan.model_copy(update={"sync": plan.sync.model_copy(update={"outer": 8})}).is_edited
    resolved = resolve(TrainConfig(fidelity="lossy"), 2, plan)
    assert resolved.sync.outer == 16
    assert resolve(TrainConfig(sync="outer:4"), 2, plan).sync.outer == 4
    assert resolve(TrainConfig(), 2).sync == Sync()


def test_of_the_table_the_row_of_the_fewest_workers_counts_and_of_the_longest_run_that_is_no_longer(monkeypatch):
    longer, wide = replace(GOOD, length=460, high=1.2), replace(GOOD, workers=8)
    monkeypatch.setattr(outer_steps, "TABLE", (GOOD, longer, wide))
    assert expected_steps(2, 500) == [longer]
    assert expected_steps(4, 413) == [GOOD], "less than 0.9 of the longer one"
    assert expected_steps(4, 414) == [longer], "a length is known about"
    assert expected_steps(5, 413) == [wide]
    assert expected_steps(9, 413) == []
    assert GOOD.factor == 1.1
    assert replace(GOOD, high=0.8).factor == 1.05
