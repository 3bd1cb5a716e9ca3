"""Planning on several workers: one measures and prints, all run the finalists, and the clock's choice is written."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest

from hybridpar.comm.world import World
from hybridpar.commands.plan.job import run_plan_job
from hybridpar.commands.plan.trials import workers_of
from hybridpar.errors import UsageError
from hybridpar.plan import read_plan
from hybridpar.planner.inputs import inputs_of_plan
from hybridpar.planner.request import PlanRequest
from tests.ranks import run_ranks


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
            assert run_plan_job(request) == 0
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
    assert recorded.cluster.inside.cores is not None, "the link was measured between these workers"
    assert recorded.profile.crowd.keys() == {2}
    assert recorded.profile.update_ms is not None
    assert workers_of(plan) in (1, 2)


def test_without_verify_nothing_is_run(tmp_path):
    first, _ = run_ranks(planned, 2, str(tmp_path / "cache"), 0, str(tmp_path / "plan.json"))
    assert "run here" not in first
    assert "data parallel over 2 devices" in first


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
    assert not PlanRequest(model="resnet18").is_here
    assert PlanRequest(model="resnet18", verify=1).is_here
