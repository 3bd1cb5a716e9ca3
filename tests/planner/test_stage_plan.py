"""From the options of a run to stages on lanes, the same on all workers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, UsageError
from hybridpar.partition import Problem, partition_model
from hybridpar.plan import Placement, Plan, StagePlacement
from hybridpar.planner.space import Shape
from hybridpar.planner.stage_plan import (
    divide_workers,
    lane_threads,
    make_stage_plan,
    pipeline_options,
    shape_of,
)
from hybridpar.sync.options import SyncOptions
from hybridpar.train.trainer import Trainer
from tests.pipeline.oracle import Residuals, images, seeded
from tests.ranks import run_ranks

EXAMPLE = images(2)[0]


@pytest.mark.parametrize(
    ("options", "workers", "shape"),
    [
        ({"stages": 2}, 1, Shape(1, 1, 2, 2, "linear")),
        ({"stages": 2}, 2, Shape(2, 1, 2, 1, "linear")),
        ({"stages": 2}, 4, Shape(2, 2, 2, 1, "linear")),
        ({"stages": 4}, 2, Shape(2, 1, 4, 1, "loop")),
        ({"stages": 4, "placement": "v"}, 2, Shape(2, 1, 4, 1, "v")),
        ({"stages": 4, "placement": "linear"}, 2, Shape(2, 1, 4, 2, "linear")),
        ({"stages": 2, "replicas": 2}, 2, Shape(1, 2, 2, 2, "linear")),
        ({"stages": 2, "replicas": 2}, 4, Shape(2, 2, 2, 1, "linear")),
        ({"stages": 4, "placement": "loop"}, 1, Shape(1, 1, 4, 1, "loop")),
        ({}, 3, Shape(1, 3, 1, 1, "linear")),
    ],
)
def test_workers_are_divided(options: dict[str, Any], workers: int, shape: Shape) -> None:
    assert shape_of(TrainConfig(**options), workers) == shape


@pytest.mark.parametrize(
    ("options", "workers", "words"),
    [
        ({"stages": 3}, 2, ("--stages 3", "do not fit 2 worker(s)", "Start 1, 3 workers")),
        ({"stages": 2}, 3, ("do not fit 3 worker(s)", "Start 1, 2 workers")),
        ({"stages": 2, "replicas": 2}, 3, ("--replicas 2", "Start 2, 4 workers")),
        ({"stages": 2, "replicas": 5}, 2, ("Start 5, 10 workers",)),
        ({"stages": 3, "placement": "v"}, 1, ("--placement v with 3 stages", "--stages 2")),
        ({"stages": 2, "placement": "v"}, 2, ("--placement v with 2 stages", "--stages 4")),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    options: dict[str, Any], workers: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as info:
        divide_workers(TrainConfig(**options), workers)
    for word in words:
        assert word in str(info.value)


def test_every_division_covers_all_workers_and_stages() -> None:
    for stages, workers, replicas, kind in itertools.product(
        range(1, 7), range(1, 7), (None, 1, 2), (None, "loop", "v")
    ):
        try:
            shape = divide_workers(TrainConfig(stages=stages, replicas=replicas, placement=kind), workers)
        except UsageError:
            continue
        assert shape.positions * shape.replicas == workers
        assert shape.stages == stages
        Problem(shape.stages, (partition_worker(shape.lanes),) * shape.positions, shape.placement)  # refuses misfits


def partition_worker(lanes: int) -> Any:
    from hybridpar.partition.cost import Worker

    return Worker(lanes=lanes)


def test_the_threads_of_a_process_are_divided_among_its_lanes() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        device = torch.device("cpu")
        assert [lane_threads(Shape(1, 1, n, n), device) for n in (1, 2, 3, 8)] == [4, 2, 1, 1]
        assert lane_threads(Shape(1, 1, 2, 2, "linear"), torch.device("cuda:0")) == 1
    finally:
        torch.set_num_threads(before)


def plan_file(path: Path, stages: int) -> Path:
    path.write_text(partition_model(seeded(Residuals), EXAMPLE, stages, measure=False).plan.to_json())
    return path


def test_a_plan_says_how_many_stages_there_are(tmp_path: Path) -> None:
    path = plan_file(tmp_path / "plan.json", 3)
    model = seeded(Residuals)
    made = make_stage_plan(model, EXAMPLE, TrainConfig(plan=path), World())
    assert (made.shape.stages, made.lane_of, made.worker_of) == (3, (0, 1, 2), (0, 0, 0))
    assert shape_of(TrainConfig(plan=path), 1) == made.shape
    assert [list(section.units) != [] for section in made.plan.partition.stages] == [True] * 3
    make_stage_plan(model, EXAMPLE, TrainConfig(plan=path, stages=3), World())
    with pytest.raises(UsageError, match="--stages 2 with a plan of 3 stages"):
        make_stage_plan(model, EXAMPLE, TrainConfig(plan=path, stages=2), World())


def test_the_stages_are_the_models_own() -> None:
    model = seeded(Residuals)
    made = make_stage_plan(model, EXAMPLE, TrainConfig(stages=2), World())
    names = [name for stage in made.stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    own = {id(parameter) for parameter in model.parameters()}
    assert all(id(parameter) in own for stage in made.stages for parameter in stage.parameters())


def test_times_of_the_plan_reach_the_schedule() -> None:
    model = seeded(Residuals)
    config = TrainConfig(stages=2, seed=5, recompute=(1,), sync_lanes=3, schedule="gpipe")
    made = make_stage_plan(model, EXAMPLE, config, World())
    options = pipeline_options(made, config, SyncOptions(), torch.device("cpu"))
    assert options.forward_ms == tuple(stage.forward_ms for stage in made.plan.partition.stages)
    assert options.backward_ms == tuple(stage.backward_ms for stage in made.plan.partition.stages)
    twice = pipeline_options(
        make_stage_plan(model, torch.cat([EXAMPLE, EXAMPLE]), TrainConfig(stages=2), World(), plan=made.plan),
        *(config, SyncOptions(), torch.device("cpu")),
    )
    assert options.backward_ms is not None
    assert twice.backward_ms == tuple(2 * time for time in options.backward_ms), "times are those of the plan's batch"
    assert (options.schedule, options.seed, options.recompute, options.sync_lanes) == ("gpipe", 5, (1,), 3)
    with pytest.raises(UsageError, match="Stages are numbered from 0 to 1"):
        pipeline_options(made, TrainConfig(recompute=(-1,)), SyncOptions(), torch.device("cpu"))


def cut_by_main(world: World) -> tuple[str, list[list[str]]]:
    made = make_stage_plan(seeded(Residuals), EXAMPLE, TrainConfig(stages=world.size), world)
    return made.plan.to_json(), [list(stage.state_dict()) for stage in made.stages]


def test_all_workers_follow_what_rank_0_measured() -> None:
    first, second = run_ranks(cut_by_main, 2)
    assert first == second


def cannot_be_cut(world: World) -> str:
    try:
        make_stage_plan(torch.nn.Linear(3, 3), torch.zeros(2, 3), TrainConfig(stages=world.size), world)
    except HybridparError as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def test_a_problem_of_rank_0_is_everybodys() -> None:
    first, second = run_ranks(cannot_be_cut, 2)
    assert first == second
    assert "passed" not in first


# ------------------------------------------------------------------------------------------------- placements of a plan


def placed(stages: int, *places: tuple[int, int], kind: str = "linear", replicas: int = 1) -> Plan:
    """A plan whose stages are on these workers and lanes."""
    plan = partition_model(seeded(Residuals), EXAMPLE, stages, measure=False).plan
    put = tuple(StagePlacement(stage=stage, worker=worker, lane=lane) for stage, (worker, lane) in enumerate(places))
    return plan.model_copy(update={"placement": Placement(kind=kind, replicas=replicas, stages=put)})


def test_a_placement_of_its_own_is_followed_on_one_worker() -> None:
    made = make_stage_plan(seeded(Residuals), EXAMPLE, TrainConfig(), World(), plan=placed(3, (0, 1), (0, 0), (0, 1)))
    assert (made.shape.lanes, made.lane_of, made.worker_of) == (2, (1, 0, 1), (0, 0))
    other = TrainConfig(placement="loop")  # who names a placement decides it
    assert make_stage_plan(
        seeded(Residuals), EXAMPLE, other, World(), plan=placed(3, (0, 1), (0, 0), (0, 1))
    ).lane_of == (*(0, 0, 0),)


@pytest.mark.parametrize(
    ("places", "workers", "shape"),
    [
        ([(1, 0), (0, 0)], 2, Shape(2, 1, 2, 1, "linear")),
        ([(1, 0), (0, 0)], 4, Shape(2, 2, 2, 1, "linear")),
        ([(0, 1), (0, 0)], 2, Shape(1, 2, 2, 2, "linear")),
        ([(0, 0), (0, 0), (1, 0)], 2, Shape(2, 1, 3, 1, "linear")),
        ([(0, 0), (1, 0), (2, 0)], 1, Shape(1, 1, 3, 3, "linear")),  # the usual one is dealt out to whoever is there
    ],
)
def test_workers_are_divided_by_the_placement(places: list[tuple[int, int]], workers: int, shape: Shape) -> None:
    assert shape_of(TrainConfig(), workers, placed(len(places), *places)) == shape


@pytest.mark.parametrize(
    ("places", "workers", "words"),
    [
        ([(2, 0), (0, 0)], 3, ("stage 0 on lane 0 of worker 2", "numbered from 0 without gaps")),
        ([(0, 0), (0, 2)], 1, ("cannot be run", "numbered from 0 without gaps")),
        ([(0, 0), (1, 0), (1, 1)], 2, ("every worker has as many lanes",)),
        ([(1, 0), (0, 0)], 3, ("on 2 worker(s), and here are 3", "Start 2 workers")),
        ([(1, 0), (0, 0)], 1, ("on 2 worker(s), and here are 1", "Start 2 workers")),
    ],
)
def test_a_placement_that_cannot_be_is_refused(
    places: list[tuple[int, int]], workers: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(HybridparError) as info:
        shape_of(TrainConfig(), workers, placed(len(places), *places))
    for word in words:
        assert word in str(info.value)


def trained_by(world: World, plan: Plan) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The stages that this worker ran, and the model after some steps."""
    batches = [images(4, seed=step) for step in range(3)]
    config = TrainConfig(plan="none", micro_batches=2)
    with Trainer(seeded(Residuals), config=config, world=world, plan=plan, example=EXAMPLE) as trainer:
        for batch in batches:
            trainer.step(batch)
        trainer.wait()
        assert trainer.engine.plan is not None
        trainer.engine.synchronize_buffers()  # the model is whole on all workers then
        return sorted(trainer.engine.pipeline.stages), dict(trainer.engine.model_state())


def test_stages_run_on_the_workers_that_the_plan_names() -> None:
    ((stages, alone),) = run_ranks(trained_by, 1, placed(3, (0, 0), (1, 0), (2, 0)))
    assert stages == [0, 1, 2]
    for places in [((1, 0), (0, 0), (1, 0)), ((1, 0), (1, 0), (0, 0))]:
        moved = run_ranks(trained_by, 2, placed(3, *places))
        assert [stages for stages, _ in moved] == [
            [stage for stage in range(3) if places[stage][0] == rank] for rank in range(2)
        ]
        for name, tensor in alone.items():
            assert torch.equal(tensor, moved[0][1][name])
            assert torch.equal(tensor, moved[1][1][name])
