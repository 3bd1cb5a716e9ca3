"""Planning on several workers: one measures and prints, all run the finalists, and the clock's choice is written."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest

from hybridpar.comm.world import World
from hybridpar.commands import named_options
from hybridpar.commands.plan.partition import run_plan
from hybridpar.commands.plan.request import PlanRequest
from hybridpar.commands.plan.search import run_search
from hybridpar.errors import UsageError
from hybridpar.models import deferred
from hybridpar.models.deferred import is_deferred
from hybridpar.partition import profile, profile_cache
from hybridpar.partition.planning import require_model
from hybridpar.plan import read_plan
from hybridpar.planner.inputs import inputs_of_plan
from tests.ranks import run_ranks
from tests.small_nets import plain


def planned(world: World, cache: str, verify: int, output: str) -> str:
    request = PlanRequest(
        model="tests.small_nets:plain",
        classes=10,
        input="3x8x8",
        batch_size=8,
        passes=2,
        verify=verify,
        verify_seconds=0.1,
        explain=True,
        output=Path(output),
    )
    os.environ["HYBRIDPAR_CACHE"] = cache
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            assert run_search(request) == 0
    finally:
        del os.environ["HYBRIDPAR_CACHE"]
    return text.getvalue()


def test_workers_plan_together_and_run_the_finalists(tmp_path):
    output = tmp_path / "plan.json"
    first, second = run_ranks(planned, 2, str(tmp_path / "cache"), 2, str(output))
    assert second == "", "one worker prints"
    assert "on a job over shared memory: 2 workers, fidelity exact" in first
    assert "run here, in turns" in first
    table = first.partition("run here, in turns")[2]
    assert "chosen" in table
    assert "data parallel over 2 devices" in table
    plan = read_plan(output)
    recorded = inputs_of_plan(plan)
    assert recorded.cluster.inside is not None
    assert recorded.cluster.hosts[0].memory_bandwidth > 0, "it was measured by these workers"
    assert plan.workers in (1, 2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"verify": -1}, "--verify -1"),
        ({"verify": 2, "verify_seconds": 0.0}, "--verify-seconds 0"),
        ({"verify": 2, "cluster": Path("c.toml")}, "--verify with --cluster"),
        ({"verify": 2, "measure": False}, "--verify with --cluster"),
    ],
)
def test_what_cannot_be_verified_is_refused(options, told):
    with pytest.raises(UsageError, match=told):
        PlanRequest(model="resnet18", explain=True, **options).check()
    with pytest.raises(UsageError, match="--stages with a search"):  # given, though it is the default
        PlanRequest(model="resnet18", explain=True, stages=2).check(named_options(["--stages", "2"], PlanRequest))
    assert not PlanRequest(model="resnet18").is_here
    assert PlanRequest(model="resnet18", verify=1).is_here


def test_a_large_model_is_planned_without_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(deferred, "MEASURED_BYTES", 0)
    seen: list[bool] = []
    times = profile.measure_units

    def spy(units, *args, **options):
        seen.append(is_deferred(units.model))
        return times(units, *args, **options)

    monkeypatch.setattr(profile_cache, "measure_units", spy)
    asked = {"model": "tests.small_nets:plain", "classes": 10, "input": "3x8x8", "passes": 2, "cache": False}
    output = tmp_path / "plan.json"
    assert run_plan(PlanRequest(**asked, output=output)) == 0
    plan = read_plan(output)
    assert seen
    assert all(seen)
    assert plan.measured.profile == "measured"
    require_model(plan, plain(), "plain")
    seen.clear()
    assert run_plan(PlanRequest(**asked, explain=True, output=output)) == 0  # the machine at hand
    assert seen
    assert all(seen)
    assert read_plan(output).measured.profile == "measured"
