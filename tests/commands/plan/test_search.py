"""Planning on several workers: one measures and prints, all run the finalists, and the clock's choice is written."""

from __future__ import annotations

import contextlib
import io
import math
import os
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from hybridpar.comm.world import World
from hybridpar.commands.plan.partition import build_to_measure, run_plan
from hybridpar.commands.plan.request import PlanRequest
from hybridpar.commands.plan.search import run_search
from hybridpar.errors import UsageError
from hybridpar.models import deferred
from hybridpar.models.deferred import is_deferred
from hybridpar.partition.planning import require_model
from hybridpar.partition.unit_runner import UnitRunner
from hybridpar.plan import read_plan
from hybridpar.planner import links, measure, measure_run, rehearse, step_costs, store
from hybridpar.planner.inputs import inputs_of_plan
from tests.ranks import run_ranks
from tests.runs import train_rank
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
    assert recorded.cluster.inside.cores is not None, "the link was measured between these workers"
    assert recorded.profile.crowd.keys() == {2}
    assert recorded.profile.update_ms is not None
    assert plan.workers in (1, 2)


def test_without_verify_nothing_is_run(tmp_path):
    first, _ = run_ranks(planned, 2, str(tmp_path / "cache"), 0, str(tmp_path / "plan.json"))
    assert "run here" not in first
    assert "data parallel over 2 devices" in first


def planned_then_trained(world: World, cache: str, run_dir: Path) -> tuple[int, list[str]]:
    """Plans and then trains; how often the first measured something, and what the second measured."""
    parts = [
        (measure_run, "profile_in_parts"),
        (step_costs, "_crowding"),
        (links, "_levels"),
        (measure, "_rate"),
        (rehearse, "_steps"),
    ]
    taken: list[str] = []

    def noted(module: ModuleType, name: str) -> object:
        inner = getattr(module, name)

        def run(*given: object, **how: object) -> object:
            taken.append(name)
            return inner(*given, **how)

        return mock.patch.object(module, name, run)

    quiet = [mock.patch.object(module, "MOST_NOISE", math.inf) for module in (measure_run, store)]
    certain = [mock.patch.object(links, name, 1e9) for name in ("CONFIRMED", "DRIFT")]
    worth = [mock.patch.object(measure_run, "WORTH", 1e9), mock.patch.object(measure_run, "LEAST_STEPS", 1)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"HYBRIDPAR_CACHE": cache}))
        for one in (*quiet, *certain, *worth, *(noted(*part) for part in parts)):
            stack.enter_context(one)
        request = PlanRequest("tests.small_nets:plain", classes=10, input="3x8x8", batch_size=16, explain=True)
        with contextlib.redirect_stdout(io.StringIO()):
            assert run_search(request) == 0
        planned = len(taken)
        taken.clear()
        train_rank(world, run_dir, "plain", None, {"steps": 4})
        world.barrier()
    return planned, taken


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_after_a_plan_for_it_measures_nothing(tmp_path, workers):
    for planned, trained in run_ranks(planned_then_trained, workers, str(tmp_path / "cache"), tmp_path / "run"):
        assert planned > 0
        assert trained == []
    plan = read_plan(tmp_path / "run" / "plan.json")
    assert plan.inputs is not None, "the run was planned"


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


def test_a_large_model_is_planned_without_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(deferred, "MEASURED_BYTES", 0)
    seen: list[bool] = []
    alone = UnitRunner.alone

    def spy(self, index, clock, passes):
        seen.append(is_deferred(self.units.model))
        return alone(self, index, clock, passes)

    monkeypatch.setattr(UnitRunner, "alone", spy)
    asked = {"model": "tests.small_nets:plain", "classes": 10, "input": "3x8x8", "passes": 2, "cache": False}
    output = tmp_path / "plan.json"
    assert run_plan(PlanRequest(**asked, output=output)) == 0
    plan = read_plan(output)
    assert seen
    assert all(seen)
    assert plan.measured.profile == "measured"
    require_model(plan, plain(), "plain")
    request = PlanRequest(**asked, cluster=tmp_path / "cluster.toml")
    profile = measure.profile_model(build_to_measure(request), [torch.zeros(2, 3, 8, 8)], passes=2, optimizer_copies=1)
    assert profile.source == "measured"
    assert len(seen) > 2 * len(profile.graph)
    assert profile.update_ms is None
    seen.clear()
    assert run_plan(PlanRequest(**asked, explain=True, output=output)) == 0  # the machine at hand
    assert seen
    assert all(seen)
    assert read_plan(output).measured.profile == "measured"
