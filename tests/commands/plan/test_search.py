"""Planning on several workers: one measures and prints, all run the finalists, and the clock's choice is written."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hybridpar.comm.world import World
from hybridpar.commands.plan import search
from hybridpar.commands.plan.request import PlanRequest, parse_bytes, parse_shape
from hybridpar.commands.plan.search import run_plan
from hybridpar.commands.show import run_show
from hybridpar.errors import HybridparError, UsageError
from hybridpar.models.deferred import is_deferred
from hybridpar.partition import profile, profile_cache
from hybridpar.partition.planning import require_model
from hybridpar.plan import read_plan
from hybridpar.planner.inputs import inputs_of_plan
from tests.partition.nets import Residual
from tests.ranks import run_ranks
from tests.small_nets import plain

ROOT = Path(__file__).resolve().parents[3]


def planned(world: World, cache: str, verify: int, output: str) -> str:
    request = PlanRequest(
        model="tests.small_nets:plain",
        classes=10,
        input="3x8x8",
        batch_size=8,
        passes=2,
        verify=verify,
        verify_seconds=0.1,
        output=Path(output),
    )
    os.environ["HYBRIDPAR_CACHE"] = cache
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            assert run_plan(request) == 0
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
        PlanRequest(model="resnet18", **options).check()


def test_a_large_model_is_planned_without_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "MEASURED_BYTES", 0)
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


def residual_net():
    """The factory that the tests below name."""
    return Residual()


RESIDUAL = "tests.commands.plan.test_search:residual_net"


@pytest.fixture
def two(tmp_path, monkeypatch) -> Path:
    """The description of a cluster of two workers."""
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "two.toml"
    path.write_text('[[hosts]]\ncount = 2\nmemory = "1GB"\n[between]\nbandwidth = "1GB/s"\nlatency_ms = 0.1\n')
    return path


def test_what_is_decided_is_followed_drawn_and_shown(two, tmp_path, capsys):
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    asked = {"stages": 2, "schedule": "gpipe", "micro_batches": 2}
    request = PlanRequest(
        RESIDUAL, input="3x8x8", batch_size=8, passes=2, cluster=two, output=plan, draw=picture, **asked
    )
    assert run_plan(request) == 0
    assert picture.stat().st_size > 5000
    said = capsys.readouterr().out
    assert "largest load / mean" in said
    made = read_plan(plan)
    assert (len(made.partition.stages), made.layout.texts()) == (2, ("0,1",))
    assert (made.pipeline.schedule, made.pipeline.micro_batches, made.measured.profile) == ("gpipe", 2, "measured")
    assert run_show(plan) == 0
    assert "2 stages" in capsys.readouterr().out
    assert run_plan(PlanRequest(inputs=plan, stages=1, micro_batches=1, output=plan, draw=picture)) == 0
    assert len(read_plan(plan).partition.stages) == 1, "what is named wins over what was recorded"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"model": "resnet81"}, "resnet"),
        ({"input": "3,224"}, "--input"),
        ({"batch_size": 0}, "--batch-size"),
        ({"memory": "lots"}, "--memory"),
        ({"memory": "1kB"}, "no plan fits"),
        ({"stages": 1000}, "stages 1000"),
        ({"schedule": "2f2b"}, "2f2b"),
        ({"output": Path("/nowhere/plan.json")}, "/nowhere"),
        ({"draw": Path("plan.bmp")}, ".svg"),
        ({"placement": "v", "stages": 3}, "stages 3"),
        ({"stages": 0}, "--stages"),
        ({"replicas": 0}, "--replicas"),
        ({"micro_batches": 0}, "--micro-batches"),
        ({"classes": 0}, "--classes"),
        ({"passes": 1}, "--passes"),
        ({"threads": 0}, "--threads"),
        ({"seed": -1}, "--seed"),
        ({"memory_format": "channels_last", "input": "8"}, "--memory-format"),
        ({"memory": "0.1B"}, "--memory"),
        ({"output": Path("/tmp")}, "directory"),
        ({"output": Path("/dev/full")}, "No space left"),
        ({"input": "3x9999999x9999999"}, "--input"),
        ({"input": "4x8x8"}, "conv1"),
    ],
)
def test_bad_requests_are_one_error_each(two, wrong, says):
    options = {"model": RESIDUAL, "input": "3x8x8", "batch_size": 8, "measure": False, "cluster": two}
    with pytest.raises(HybridparError) as caught:
        run_plan(PlanRequest(**{**options, **wrong}))
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_report_that_cannot_be_printed_keeps_the_plan(two, tmp_path):
    output = tmp_path / "plan.json"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hybridpar", "plan", RESIDUAL, "--input", "3x8x8", "--batch-size", "8",
             "--no-measure", "--stages", "2", "--cluster", str(two), "-o", str(output)],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 2
    assert "error: cannot print the report: No space left" in done.stderr.splitlines()[-2]
    assert "Traceback" not in done.stderr
    assert len(read_plan(output).partition.stages) == 2


def test_sizes_and_shapes_are_read():
    assert parse_bytes("1.5GB") == 1_500_000_000
    assert parse_bytes("800") == 800
    assert parse_shape("3x8x9") == (3, 8, 9)


def test_describing_the_command_imports_no_torch():
    code = "import sys, hybridpar.commands.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


MEASURED = """
import os
from tests.partition.nets import Residual
def net():
    with open("environments", "a") as file:
        print(os.environ.get("MALLOC_ARENA_MAX"), file=file)
    return Residual()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variables belong to glibc")
@pytest.mark.parametrize(
    ("options", "arenas"),
    [
        ([], "1"),
        pytest.param(["--no-tune-process"], "None", marks=pytest.mark.sweep),
        pytest.param(["--no-measure"], "None", marks=pytest.mark.sweep),
    ],
)
def test_what_is_measured_on_a_cpu_is_measured_as_it_will_train(two, tmp_path, monkeypatch, options, arenas):
    (tmp_path / "mine.py").write_text(MEASURED)
    for name in ("HYBRIDPAR_TUNED", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "partition_model.py"), "mine:net", "--input", "3x8x8", "--passes", "2",
         "--stages", "2", "--batch-size", "8", "--cluster", str(two), *options],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if "% apart" not in line]  # whatever else runs meanwhile
    assert (done.returncode, said) == (0, [])
    assert "mine:net: 2 stages" in done.stdout
    assert set((tmp_path / "environments").read_text().split()) == {arenas}, "built by the process that measures alone"


def test_only_measuring_needs_a_tuned_process():
    assert PlanRequest("resnet18").wants_tuned_process
    assert not PlanRequest("resnet18", measure=False).wants_tuned_process
    assert not PlanRequest("resnet18", tune_process=False).wants_tuned_process
    assert not PlanRequest(inputs=Path("plan.json")).wants_tuned_process
