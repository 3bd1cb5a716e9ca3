"""A model is cut into the stages of its plan, the same on all workers, and runs where the plan places them."""

from __future__ import annotations

import pytest
import torch

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.models import model_fingerprint
from hybridpar.partition.stage import Stage
from hybridpar.plan import ModelInfo, Plan, ResolvedPlan
from hybridpar.planner.resolve import resolve
from hybridpar.schedule.actions import Schedule
from hybridpar.schedule.schedules import SCHEDULES
from hybridpar.train.stages import cut_model
from hybridpar.train.trainer import Trainer
from tests.pipeline.oracle import Residuals, images, seeded
from tests.planner.test_resolve import placed
from tests.ranks import run_ranks

EXAMPLE = images(2)[0]


def cut(
    model: torch.nn.Module, config: TrainConfig, world: World, example: torch.Tensor = EXAMPLE
) -> tuple[ResolvedPlan, list[Stage]]:
    info = ModelInfo(name="net", fingerprint=model_fingerprint(model), parameters=1)
    return cut_model(model, example, resolve(config, world.size, model=info), config, world)


def test_the_stages_are_the_models_own() -> None:
    model = seeded(Residuals)
    plan, stages = cut(model, TrainConfig(stages=2), World())
    assert [list(section.units) != [] for section in plan.partition.stages] == [True] * 2
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    own = {id(parameter) for parameter in model.parameters()}
    assert all(id(parameter) in own for stage in stages for parameter in stage.parameters())


def passes_of(config: TrainConfig, plan: Plan | None = None) -> tuple[ResolvedPlan, Schedule]:
    """The plan of a training, and the passes that its first step ran."""
    with Trainer(seeded(Residuals), config=config, plan=plan, example=EXAMPLE) as trainer:
        trainer.step(images(6))
        program = trainer.engine.pipeline.executor.program
        assert program is not None
        return trainer.plan, program.schedule


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "accumulate"])
def test_the_passes_that_run_are_those_of_the_plan(schedule: str) -> None:
    stages, kind = (4, "loop") if schedule in ("interleaved", "looped_bfs") else (2, "linear")
    config = TrainConfig(stages=stages, placement=kind, schedule=schedule, micro_batches=3)
    plan, ran = passes_of(config)
    assert plan.orders() == (ran,)
    assert plan.pipeline.rows == (tuple(ran.to_csv().splitlines()),)


def test_the_passes_that_a_plan_names_run_whatever_its_schedule_would_make() -> None:
    plan, ran = passes_of(TrainConfig(stages=2, schedule="gpipe", micro_batches=3))
    named = plan.pipeline.model_copy(update={"schedule": "1f1b"})
    _, again = passes_of(TrainConfig(), Plan.model_validate(plan.model_dump() | {"pipeline": named}))
    assert again.rows == ran.rows
    other, fewer = passes_of(TrainConfig(micro_batches=2), plan)
    assert fewer.micro_batches == 2, "made for another number of micro-batches"
    assert other.orders() == (fewer,)


def cut_by_main(world: World) -> tuple[str, list[list[str]]]:
    plan, stages = cut(seeded(Residuals), TrainConfig(stages=world.size), world)
    return plan.to_json(), [list(stage.state_dict()) for stage in stages]


def test_all_workers_follow_what_rank_0_measured() -> None:
    first, second = run_ranks(cut_by_main, 2)
    assert first == second


def trained_by(world: World, plan: Plan) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The stages that this worker ran, and the model after some steps."""
    batches = [images(4, seed=step) for step in range(3)]
    config = TrainConfig(plan="none", micro_batches=2)
    with Trainer(seeded(Residuals), config=config, world=world, plan=plan, example=EXAMPLE) as trainer:
        for batch in batches:
            trainer.step(batch)
        trainer.wait()
        assert trainer.plan.is_staged
        trainer.engine.synchronize_buffers()  # the model is whole on all workers then
        return sorted(trainer.engine.pipeline.stages), dict(trainer.engine.model_state())


def test_stages_run_on_the_workers_that_the_plan_names() -> None:
    ((stages, alone),) = run_ranks(trained_by, 1, placed((0, 0), (1, 0), (2, 0)))
    assert stages == [0, 1, 2]
    for places in [((1, 0), (0, 0), (1, 0)), ((1, 0), (1, 0), (0, 0))]:
        moved = run_ranks(trained_by, 2, placed(*places))
        assert [stages for stages, _ in moved] == [
            [stage for stage in range(3) if places[stage][0] == rank] for rank in range(2)
        ]
        for name, tensor in alone.items():
            assert torch.equal(tensor, moved[0][1][name])
            assert torch.equal(tensor, moved[1][1][name])
