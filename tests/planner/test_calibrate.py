"""Measurements are folded back: once a run was compared, the same run is predicted as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridpar import cli
from hybridpar.errors import PlanError, UsageError
from hybridpar.formats.cache import measurement_file
from hybridpar.plan import Plan, Ran
from hybridpar.planner.calibrate import (
    calibrate,
    calibrated,
    clear_factors,
    compute_key,
    known_factors,
    link_key,
)
from hybridpar.planner.explain import notes
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import PlannerInputs, inputs_of_plan
from hybridpar.planner.record import plan_of
from hybridpar.planner.search import find_plan
from tests.planner.small import cluster, inputs


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "cache"))


def asked(bandwidth: float = 1e8, **options) -> PlannerInputs:
    return inputs(spec=cluster(2, bandwidth), fixed=Fixed(workers=2, replicas=2), **options)


def run(place: Path, question: PlannerInputs, slower: float = 1.0, more_sync: float = 1.0) -> Plan:
    """What a run leaves whose computing took so many times as long as predicted, and its exposed exchange likewise."""
    plan = plan_of(find_plan(question))
    assert plan.predicted is not None
    step, exposed = plan.predicted.step_ms or 0.0, plan.predicted.exposed_sync_ms or 0.0
    ran = Ran(step_ms=slower * (step - exposed) + more_sync * exposed, exposed_sync_ms=more_sync * exposed)
    place.mkdir()
    plan.model_copy(update={"ran": ran}).save(place / "plan.json")
    return plan


def test_later_predictions_take_what_runs_took(tmp_path):
    before = run(tmp_path / "run", asked(), slower=1.25)
    factors = {factor.key["of"]: factor for factor in calibrate([tmp_path / "run"])}
    assert factors["compute"].value == pytest.approx(1.25, rel=1e-3)
    assert factors["link"].value == 1.0
    question = calibrated(asked())
    assert question.calibration == pytest.approx({"compute": 1.25, "link": 1.0}, rel=1e-3)
    after = find_plan(question).chosen
    assert before.predicted is not None
    computing = (before.predicted.step_ms or 0.0) - (before.predicted.exposed_sync_ms or 0.0)
    assert after.step_ms - after.exposed_sync_ms == pytest.approx(1.25 * computing, rel=0.02)


def test_the_link_is_corrected_by_the_exchange_that_was_exposed(tmp_path):
    run(tmp_path / "run", asked(3e7), more_sync=2.0)
    factors = {factor.key["of"]: factor.value for factor in calibrate([tmp_path / "run"])}
    assert factors["compute"] == pytest.approx(1.0, abs=1e-3)
    assert factors["link"] > 1.3
    plain, corrected = (find_plan(one).chosen for one in (asked(3e7), calibrated(asked(3e7))))
    assert corrected.exposed_sync_ms == pytest.approx(2 * plain.exposed_sync_ms, rel=0.02)


def test_a_run_that_was_predicted_with_factors_corrects_them_and_not_what_they_gave(tmp_path):
    run(tmp_path / "one", asked(), slower=1.25)
    calibrate([tmp_path / "one"])
    run(tmp_path / "two", calibrated(asked()), slower=1.0)  # as predicted now
    factors = {factor.key["of"]: factor.value for factor in calibrate([tmp_path / "two"])}
    assert factors["compute"] == pytest.approx(1.25, rel=1e-2)
    assert calibrated(calibrated(asked())) == calibrated(asked())


def test_of_several_runs_the_median_counts(tmp_path):
    for number, slower in enumerate((1.1, 1.2, 3.0)):
        run(tmp_path / str(number), asked(), slower=slower)
    (factor, *_) = calibrate([tmp_path / str(number) for number in range(3)])
    assert factor.value == pytest.approx(1.2, rel=1e-3)
    assert factor.runs == 3


def test_other_models_and_links_are_left_alone(tmp_path):
    run(tmp_path / "run", asked(), slower=1.25)
    calibrate([tmp_path / "run"])
    profile = asked().profile
    other = inputs(
        type(profile)(
            profile.info.model_copy(update={"fingerprint": "1" * 16}),
            profile.graph,
            profile.samples,
            profile.parameters,
            profile.variants,
        ),
        spec=cluster(3),
    )
    assert compute_key(other) != compute_key(asked())
    assert link_key(other) != link_key(asked())
    assert calibrated(other) == other


def test_estimates_are_not_corrected_by_clocks_and_what_is_corrected_says_so(tmp_path):
    run(tmp_path / "run", asked(), slower=1.25)
    calibrate([tmp_path / "run"])
    corrected = calibrated(asked())
    assert any("computing" not in line and "compute x 1.25" in line for line in notes(corrected, find_plan(corrected)))
    estimated = replace(asked(), profile=replace(asked().profile, source="analytic"))
    assert "compute" not in calibrated(estimated).calibration


def test_factors_are_shown_and_removed_from_the_command_line(tmp_path, capsys):
    run(tmp_path / "run", asked(), slower=1.25)
    assert cli.main(["plan", "--calibrate", str(tmp_path / "run")]) == 0
    assert "computing  x 1.250  from 1 run" in capsys.readouterr().out
    assert cli.main(["plan", "--calibrate", "show"]) == 0
    assert "x 1.250" in capsys.readouterr().out
    assert cli.main(["plan", "--calibrate", "clear"]) == 0
    assert "2 calibration factor(s) removed" in capsys.readouterr().out
    assert known_factors() == []
    assert calibrated(asked()) == asked()
    assert cli.main(["plan", "--calibrate", "show"]) == 0
    assert "no calibration" in capsys.readouterr().out


def test_a_damaged_factor_is_as_none(tmp_path):
    run(tmp_path / "run", asked(), slower=1.25)
    calibrate([tmp_path / "run"])
    for key in (compute_key(asked()), link_key(asked())):
        measurement_file("calibration", key).write_text("{")
    assert calibrated(asked()) == asked()
    assert clear_factors() == 0


def test_what_cannot_be_compared_is_one_error(tmp_path, capsys):
    plan = run(tmp_path / "wild", asked(), slower=50.0)
    with pytest.raises(UsageError, match="50 times as long as predicted"):
        calibrate([tmp_path / "wild"])
    (tmp_path / "open").mkdir()
    plan.save(tmp_path / "open" / "plan.json")
    with pytest.raises(PlanError, match="does not say what the run measured"):
        calibrate([tmp_path / "open"])
    with pytest.raises(PlanError, match="cannot read the plan"):
        calibrate([tmp_path / "nothing"])
    for words, said in (
        (["resnet18", "--calibrate", "show"], "--calibrate with a model"),
        ([], "no model was named"),
    ):
        assert cli.main(["plan", *words]) == 2
        assert said in capsys.readouterr().err
    assert inputs_of_plan(plan) == asked()
