"""`hybridpar plan`: train's own request without the training; what is printed and written; wrong requests."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest

from hybridpar.cli import main
from hybridpar.comm.world import World
from hybridpar.commands.plan import PlanRequest
from hybridpar.commands.plan.search import search
from hybridpar.errors import HybridparError
from hybridpar.plan import read_plan
from hybridpar.planner.inputs import inputs_of_plan
from tests.partition.nets import Residual
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]
SMALL = {"data": "synthetic:samples=64,classes=5", "image_size": 8, "batch_size": 8}


def residual_net(num_classes: int = 10):
    """The factory that the tests below name."""
    return Residual()


RESIDUAL = "tests.commands.plan.test_search:residual_net"


def request(model: str = "tests.small_nets:plain", **options: Any) -> PlanRequest:
    return PlanRequest(**{"model": model, **SMALL, **options})


def run_plan(request: PlanRequest) -> int:
    request.check()
    return search(request, request.model, request.output, request.cluster)


def planned(world: World, cache: str, output: str) -> str:
    os.environ["HYBRIDPAR_CACHE"] = cache
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            assert run_plan(request(output=Path(output))) == 0
    finally:
        del os.environ["HYBRIDPAR_CACHE"]
    return text.getvalue()


def test_workers_plan_together_and_run_the_finalists(tmp_path):
    output = tmp_path / "plan.json"
    first, second = run_ranks(planned, 2, str(tmp_path / "cache"), str(output))
    assert second == "", "one worker prints"
    assert "on this machine: 2 workers, fidelity exact" in first
    for part in ("chosen", "exposed sync", "about these figures", "planning took", str(output)):
        assert part in first
    assert "a run of 80 steps is not planned by hybridpar train" in first
    plan = read_plan(output)
    recorded = inputs_of_plan(plan)
    assert recorded.cluster.inside is not None
    assert recorded.cluster.hosts[0].memory_bandwidth > 0, "it was measured by these workers"
    assert plan.workers == 2
    assert plan.compute is not None


@pytest.fixture
def two(tmp_path, monkeypatch) -> Path:
    """The description of a cluster of two workers."""
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "two.toml"
    path.write_text('[[hosts]]\ncount = 2\nmemory = "1GB"\n[between]\nbandwidth = "1GB/s"\nlatency_ms = 0.1\n')
    return path


def test_what_is_decided_is_followed_and_shown(two, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    asked = {"stages": 2, "schedule": "gpipe", "micro_batches": 2}
    assert run_plan(request(RESIDUAL, cluster=two, output=plan, **asked)) == 0
    said = capsys.readouterr().out
    assert "largest load / mean" in said
    made = read_plan(plan)
    assert (len(made.partition.stages), made.layout.texts()) == (2, ("0,1",))
    assert (made.pipeline.schedule, made.pipeline.micro_batches, made.measured.profile) == ("gpipe", 2, "measured")
    assert main(["show", str(plan)]) == 0
    assert "2 stages" in capsys.readouterr().out


def test_a_training_that_is_only_planned_says_what_it_would_do(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "cache"))
    small = ["--data", "synthetic:samples=64", "--image-size", "8", "--batch-size", "8", "--nproc", "1"]
    options = ["tests.small_nets:plain", *small, "--no-tune-process"]
    assert main(["train", *options, "--dry-run"]) == 0
    trained = capsys.readouterr().out
    assert main(["plan", *options]) == 0
    assert capsys.readouterr().out.splitlines()[0] == trained.splitlines()[0]
    assert "planning took" in trained
    assert [path.name for path in tmp_path.iterdir()] == ["cache"], "there is no run"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"model": "resnet81"}, "resnet"),
        ({"batch_size": 0}, "--batch-size"),
        ({"data": "synthetic:classes=1"}, "classes=1"),
        ({"data": "synthetic:pixels=1"}, "pixels"),
        ({"stages": 1000}, "stages 1000"),
        ({"schedule": "2f2b"}, "2f2b"),
        ({"placement": "v", "stages": 3}, "stages 3"),
        ({"stages": 0}, "--stages"),
        ({"output": Path("/nowhere/plan.json")}, "/nowhere"),
        ({"output": Path("/tmp")}, "directory"),
        ({"cluster": Path("/nowhere.toml")}, "/nowhere.toml"),
        ({"nproc": 2}, "--nproc 2 with --cluster"),
        ({"plan": "none"}, "--plan none"),
        ({"resume": True}, "--resume"),
        ({"sync": "ps"}, "--sync ps"),
        ({"batch_size": "auto"}, "--batch-size auto with --cluster"),
    ],
)
def test_bad_requests_are_one_error_each(two, wrong, says):
    with pytest.raises(HybridparError) as caught:
        run_plan(request(**{"model": RESIDUAL, "cluster": two, **wrong}))
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


def test_what_fits_into_no_memory_is_said(two):
    two.write_text(two.read_text().replace("1GB", "100kB", 1))
    with pytest.raises(HybridparError, match=r"no plan fits into 0\.1 MB"):
        run_plan(request(RESIDUAL, cluster=two))
