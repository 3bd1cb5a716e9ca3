from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from hybridpar.commands.plan.partition import run_plan
from hybridpar.commands.plan.request import (
    PlanRequest,
    parse_bytes,
    parse_link,
    parse_shape,
    parse_workers,
)
from hybridpar.commands.show import run_show
from hybridpar.errors import HybridparError, PlanError, UsageError
from hybridpar.partition import profile_cache
from hybridpar.partition.balance import Balance, balance_graph
from hybridpar.partition.cost import Link, Problem, Worker
from hybridpar.partition.draw import draw_partition, lay_out
from hybridpar.partition.graph import UnitGraph
from hybridpar.partition.planning import PartitionedModel, partition_model, saved_bytes, stages_from_plan
from hybridpar.partition.stage import run_stages
from hybridpar.partition.table import print_partition, readable_bytes
from hybridpar.plan import read_plan
from tests.partition.nets import IMAGES, Residual, Shapes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def made() -> PartitionedModel:
    return partition_model(Residual(), torch.randn(*IMAGES), 3, measure=False, name="residual")


def residual_net() -> Residual:
    """The factory that the command tests name."""
    return Residual()


def test_a_plan_comes_back_as_the_same_stages(made: PartitionedModel, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made.plan.save(path)
    plan = read_plan(path)
    assert plan == made.plan
    assert path.read_text() == plan.to_json()
    model = Residual()
    stages = stages_from_plan(model, plan)
    assert [list(stage.state_dict()) for stage in stages] == [list(stage.state_dict()) for stage in made.stages]
    example = torch.randn(*IMAGES)
    for stage in stages:
        stage.eval()
    assert torch.equal(run_stages(stages, example), model.eval()(example))


def test_a_plan_says_what_the_partition_costs(made: PartitionedModel) -> None:
    part = made.plan.partition
    assert sum(stage.parameter_bytes for stage in part.stages) == 4 * made.plan.model.parameters
    assert part.balance == pytest.approx(made.balance.balance, abs=1e-5)
    assert sum(stage.cut_bytes or 0 for stage in part.stages) == part.cut_bytes
    assert sum(stage.ms or 0 for stage in part.stages) == pytest.approx(made.times.step_ms, rel=1e-2)
    assert [stage.saved_bytes for stage in part.stages] == saved_bytes(made.graph, made.balance.stage_of)
    assert sum(stage.saved_bytes or 0 for stage in part.stages) >= sum(item.bytes for item in made.graph.saved)
    assert part.micro_batch == 2
    assert made.plan.measured is not None
    assert made.plan.measured.profile == "analytic"
    again = partition_model(Residual(), torch.randn(*IMAGES), 3, measure=False, name="residual")
    assert again.plan.to_json() == made.plan.to_json()


def test_what_lanes_cost_each_other_is_measured_where_it_is_not_given() -> None:
    said: list[str] = []
    problem = Problem(2, (Worker(lanes=2),))
    partition_model(Residual(), torch.randn(*IMAGES), problem, passes=2, announce=said.append)
    assert "measuring lanes beside each other" in said
    said.clear()
    given = Problem(2, (Worker(lanes=2, co_run=1.5),))
    partition_model(Residual(), torch.randn(*IMAGES), given, passes=2, announce=said.append)
    assert "measuring lanes beside each other" not in said


def test_placement_names_workers_and_lanes() -> None:
    problem = Problem(4, (Worker("cpu", lanes=2),), "v")
    plan = partition_model(Residual(), torch.randn(*IMAGES), problem, measure=False).plan
    assert plan.placement is not None
    assert plan.layout.rows == (((0, 0), (0, 1), (0, 1), (0, 0)),)


def test_a_plan_for_another_model_says_what_differs(made: PartitionedModel) -> None:
    with pytest.raises(PlanError, match="another model") as caught:
        stages_from_plan(Shapes(), made.plan)
    assert f"parameters {made.plan.model.parameters:,}" in caught.value.what
    with pytest.raises(PlanError, match=r"dtype float32.*dtype float64") as caught:
        stages_from_plan(Residual().double(), made.plan)


def test_a_plan_with_other_units_says_which(made: PartitionedModel) -> None:
    data = json.loads(made.plan.to_json())
    data["partition"]["stages"][0]["units"][0] = "elsewhere"
    with pytest.raises(PlanError, match="elsewhere"):
        stages_from_plan(Residual(), type(made.plan).model_validate(data))


def test_a_plan_without_units_is_the_whole_model(made: PartitionedModel) -> None:
    data = json.loads(made.plan.to_json())
    data["partition"]["stages"] = [{"units": []}]
    del data["placement"]
    (stage,) = stages_from_plan(Residual(), type(made.plan).model_validate(data))
    assert stage(torch.randn(*IMAGES)).shape == (2, 5)


def test_a_measured_profile_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_cache, "MOST_NOISE", math.inf)  # whatever else runs meanwhile
    example = torch.randn(*IMAGES)
    first = partition_model(Residual(), example, 2, passes=2, cache=tmp_path)
    said: list[str] = []
    second = partition_model(Residual(), example, 2, passes=2, cache=tmp_path, announce=said.append)
    assert second.times == first.times
    assert "using the profile measured before" in said


def test_the_noise_of_the_profile_is_what_cuts_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    noises: list[float] = []

    def watched(graph: UnitGraph, problem: Problem) -> Balance:
        noises.append(problem.noise)
        return balance_graph(graph, problem)

    monkeypatch.setattr("hybridpar.partition.planning.balance_graph", watched)
    made = partition_model(Residual(), torch.randn(*IMAGES), 2, passes=2)
    assert noises[-1] == made.times.noise > 0


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_pictures_show_every_stage(made: PartitionedModel, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plan.{ending}"
    draw_partition(made.graph, made.plan, path)
    assert path.stat().st_size > 5000
    if ending == "svg":
        first = path.read_bytes()
        draw_partition(made.graph, made.plan, path)
        assert path.read_bytes() == first, "the same plan gives the same file"


def test_layout_has_every_unit_once_and_every_branch(made: PartitionedModel) -> None:
    position = {unit: index for index, stage in enumerate(made.plan.partition.stages) for unit in stage.units}
    blocks, _, cut = lay_out(made.graph, [position[unit.name] for unit in made.graph.units])
    assert sorted(unit for block in blocks for unit in block.units) == list(range(len(made.graph)))
    assert sum(wire.bytes for wire in cut) == made.plan.partition.cut_bytes
    _, inner, cut = lay_out(made.graph, [0] * len(made.graph))
    assert len(inner) == 1, "the residual branch"
    assert not cut


def test_drawing_without_matplotlib_names_the_command(made: PartitionedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'hybridpar\[plots\]'"):
        draw_partition(made.graph, made.plan, "plan.svg")


def test_table_fits_a_terminal_and_names_what_matters(made: PartitionedModel) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_partition(made.plan, console)
    text = console.export_text()
    assert "…" not in text
    for word in ("residual: 3 stages", "fwd ms", "saved", "cut", "largest load / mean", "100 %"):
        assert word in text


def test_command_writes_plan_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    config = PlanRequest(
        "tests.partition.test_planning:residual_net",
        stages=2,
        input="3x8x8",
        passes=2,
        devices=("cpu", "cpu@0.5"),
        memory="1GB",
        link="1GB/s@0.1ms",
        output=plan,
        draw=picture,
    )
    assert run_plan(config) == 0
    assert picture.exists()
    assert run_show(plan) == 0
    assert "2 stages" in capsys.readouterr().out
    assert read_plan(plan).layout.texts() == ("0,1",)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"model": "resnet81"}, "resnet"),
        ({"input": "3,224"}, "--input"),
        ({"batch": 0}, "--batch"),
        ({"devices": ("tpu:0", "cpu")}, "tpu:0"),
        ({"devices": ("cpu*0", "cpu")}, "cpu*0"),
        ({"memory": "lots"}, "--memory"),
        ({"memory": "1kB"}, "cap that works"),
        ({"link": "fast"}, "--link"),
        ({"stages": 1000}, "--stages"),
        ({"in_flight": "2f2b"}, "2f2b"),
        ({"output": Path("/nowhere/plan.json")}, "/nowhere"),
        ({"draw": Path("plan.bmp")}, ".svg"),
        ({"placement": "v", "stages": 3, "devices": ("cpu", "cpu")}, "3 stages on 2 lanes"),
        ({"stages": 0}, "--stages"),
        ({"classes": 0}, "--classes"),
        ({"passes": 1}, "--passes"),
        ({"threads": 0}, "--threads"),
        ({"seed": -1}, "--seed"),
        ({"memory_format": "channels_last", "input": "8"}, "--memory-format"),
        ({"memory": "0.1B"}, "--memory"),
        ({"link": "0.1B/s"}, "--link"),
        ({"in_flight": "²"}, "in-flight"),
        ({"co_run": 0.0, "devices": ("cpu*2",)}, "co_run"),
        ({"output": Path("/tmp")}, "directory"),
        ({"output": Path("/dev/full")}, "No space left"),
        ({"input": "3x9999999x9999999"}, "--input"),
        ({"input": "4x8x8"}, "conv1"),
        ({"devices": ("cuda:99", "cpu")}, "cuda:99"),
    ],
)
def test_bad_requests_are_one_error_each(wrong: dict[str, object], says: str) -> None:
    options: dict[str, object] = {
        "model": "tests.partition.test_planning:residual_net",
        "input": "3x8x8",
        "measure": False,
    }
    with pytest.raises(HybridparError) as caught:
        run_plan(PlanRequest(**{**options, **wrong}))  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("problem", [Problem(1000), Problem(2, (Worker(memory=1), Worker(memory=1)))])
def test_what_no_measurement_can_help_is_refused_before_it(problem: Problem) -> None:
    said: list[str] = []
    with pytest.raises(UsageError):
        partition_model(Residual(), torch.randn(*IMAGES), problem, announce=said.append)
    assert said == ["tracing"]


@pytest.mark.parametrize(
    ("inputs", "says"),
    [([], "no inputs"), ([1.0], "float"), (torch.ones(()), r"\(\)"), (torch.ones(0, 3, 8, 8), "micro")],
)
def test_inputs_that_are_no_micro_batch_are_refused(inputs: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        partition_model(Residual(), inputs, 2, measure=False)


def test_a_model_whose_step_fails_is_one_error() -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = self.body(x).exp()
            square = result * result
            result += 1  # autograd needs it as it was
            return square

    with pytest.raises(UsageError, match="training step of Overwriting fails") as caught:
        partition_model(Overwriting(), torch.randn(4, 6), 1)
    assert "--no-measure" in caught.value.fix


class Parameterless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).relu().flatten(1).sum(1)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.parametrize("make", [Parameterless, Frozen])
def test_models_without_anything_to_train_are_cut_too(make: type[nn.Module]) -> None:
    model, example = make(), torch.randn(*IMAGES)
    made = partition_model(model, example, 2, passes=2)
    assert torch.equal(run_stages(made.stages, example), model(example))
    assert len(stages_from_plan(model, made.plan, example)) == 2


def test_a_table_that_cannot_be_printed_keeps_the_plan(tmp_path: Path) -> None:
    factory = "tests.partition.test_planning:residual_net"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hybridpar", "plan", factory, "--input", "3x8x8", "--no-measure", "-o",
             str(tmp_path / "plan.json")],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot print the table: No space left")
    assert "Traceback" not in done.stderr
    assert len(read_plan(tmp_path / "plan.json").partition.stages) == 2


def test_sizes_links_shapes_and_workers_are_read() -> None:
    assert parse_bytes("1.5GB") == 1_500_000_000
    assert parse_bytes("800") == 800
    assert parse_link("100MB/s@0.2ms") == Link(1e8, 0.2)
    assert parse_link(None).is_free
    assert parse_shape("3x8x9") == (3, 8, 9)
    config = PlanRequest("resnet18", devices=("cuda:0*2", "cpu@0.5"), memory="8GB", co_run=1.4)
    assert parse_workers(config) == (
        Worker("cuda:0", 2, 1.0, 8_000_000_000, 1.4),
        Worker("cpu", 1, 0.5, 8_000_000_000, 1.4),
    )
    assert [readable_bytes(size) for size in (0, 999, 1500, 2.5e6, 3e9)] == ["0 B", "999 B", "1.5 kB", "2.5 MB", "3 GB"]


def test_describing_the_command_imports_no_torch() -> None:
    code = "import sys, hybridpar.commands.plan.partition; sys.exit('torch' in sys.modules)"
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
    ("program", "options", "arenas"),
    [
        (["-m", "hybridpar", "plan"], [], "1"),
        ([str(ROOT / "scripts" / "partition_model.py")], [], "1"),
        pytest.param(["-m", "hybridpar", "plan"], ["--no-tune-process"], "None", marks=pytest.mark.sweep),
        pytest.param(["-m", "hybridpar", "plan"], ["--no-measure"], "None", marks=pytest.mark.sweep),
    ],
)
def test_what_is_measured_on_a_cpu_is_measured_as_it_will_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: list[str], options: list[str], arenas: str
) -> None:
    (tmp_path / "mine.py").write_text(MEASURED)
    for name in ("HYBRIDPAR_TUNED", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run(
        [sys.executable, *program, "mine:net", "--input", "3x8x8", "--passes", "2", *options],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if "% apart" not in line]  # whatever else runs meanwhile
    assert (done.returncode, said) == (0, [])
    assert "mine:net: 2 stages" in done.stdout
    assert set((tmp_path / "environments").read_text().split()) == {arenas}, "built by the process that measures alone"


def test_only_measuring_on_a_cpu_needs_a_tuned_process() -> None:
    assert PlanRequest("resnet18").wants_tuned_process
    assert not PlanRequest("resnet18", measure=False).wants_tuned_process
    assert not PlanRequest("resnet18", tune_process=False).wants_tuned_process
    assert PlanRequest("resnet18", devices=("cpu*2@0.5",)).measured_device == "cpu"
    assert not PlanRequest("resnet18", devices=("cuda:1*2@0.5", "cpu")).wants_tuned_process
    assert PlanRequest("resnet18", devices=("cuda:1*2@0.5", "cpu")).measured_device == "cuda:1"


def test_the_script_runs_from_a_clone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "partition_model.py"), "resnet18", "--stages", "4", "--no-measure",
         "--input", "3x64x64", "--draw", "plan.svg", "-o", "plan.json"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "resnet18: 4 stages" in done.stdout
    assert len(read_plan(tmp_path / "plan.json").partition.stages) == 4
    assert (tmp_path / "plan.svg").stat().st_size > 10_000
