from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from hybridpar.errors import PlanError, UsageError
from hybridpar.partition import profile_cache
from hybridpar.partition.balance import balance_graph
from hybridpar.partition.planning import PartitionedModel, partition_model, saved_bytes, stages_from_plan
from hybridpar.partition.stage import run_stages
from hybridpar.partition.table import print_partition
from hybridpar.plan import read_plan
from tests.partition.nets import IMAGES, Residual, Shapes


@pytest.fixture
def made() -> PartitionedModel:
    return partition_model(Residual(), torch.randn(*IMAGES), 3, measure=False, name="residual")


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
    times = [stage.ms or 0.0 for stage in part.stages]
    assert part.balance == pytest.approx(max(times) / (sum(times) / len(times)), abs=1e-5)
    assert sum(stage.cut_bytes or 0 for stage in part.stages) == part.cut_bytes
    assert sum(stage.ms or 0 for stage in part.stages) == pytest.approx(made.times.step_ms, rel=1e-2)
    stage_of = balance_graph(made.graph, 3)
    assert [stage.saved_bytes for stage in part.stages] == saved_bytes(made.graph, stage_of)
    assert sum(stage.saved_bytes or 0 for stage in part.stages) >= sum(item.bytes for item in made.graph.saved)
    assert part.micro_batch == 2
    assert made.plan.measured is not None
    assert made.plan.measured.profile == "analytic"
    again = partition_model(Residual(), torch.randn(*IMAGES), 3, measure=False, name="residual")
    assert again.plan.to_json() == made.plan.to_json()


def test_a_plan_for_another_model_says_what_differs(made: PartitionedModel) -> None:
    with pytest.raises(PlanError, match="another model") as caught:
        stages_from_plan(Shapes(), made.plan)
    assert f"plan: residual, parameters {made.plan.model.parameters:,}" in caught.value.what
    assert "here: Shapes, parameters " in caught.value.what
    assert caught.value.fix
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
    second = partition_model(Residual(), example, 2, passes=2, cache=tmp_path)
    assert second.times == first.times


def test_table_fits_a_terminal_and_names_what_matters(made: PartitionedModel) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_partition(made.plan, console)
    text = console.export_text()
    assert "…" not in text
    for word in ("residual: 3 stages", "fwd ms", "saved", "cut", "largest load / mean", "100 %"):
        assert word in text


def test_what_no_measurement_can_help_is_refused_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridpar.partition.planning.measured_profile", None)
    with pytest.raises(UsageError, match="1000 stages"):
        partition_model(Residual(), torch.randn(*IMAGES), 1000)


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
    assert caught.value.fix
