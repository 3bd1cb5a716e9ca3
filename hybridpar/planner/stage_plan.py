"""Divides workers into stages and replicas, cuts the model, and places its stages on lanes; equal on all workers.

Rank 0 measures the model and cuts it; the others follow its plan, so that noise cannot make two workers disagree. A
plan from a file is read by every worker, and all must have read the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.config.optimizer import state_copies
from hybridpar.errors import HybridparError, PlanError, UsageError
from hybridpar.machine.process import available_cores, threads_per_worker
from hybridpar.partition.cost import PlacementKind, Problem, Worker
from hybridpar.partition.nest import tensor_leaves
from hybridpar.partition.planning import partition_model, stages_from_plan
from hybridpar.partition.profile_cache import profiles_directory
from hybridpar.partition.stage import Stage
from hybridpar.pipeline.options import PipelineOptions
from hybridpar.pipeline.split_cost import MOST_SPLIT_COST, BackwardCost, may_split, measure_backward
from hybridpar.plan import Placement, Plan, parse_plan, read_plan
from hybridpar.planner.space import Shape
from hybridpar.sync.options import SyncOptions

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagePlan:
    """A model cut into stages that have their places.

    Attributes:
        shape: How workers are divided.
        plan: The plan, the same on all workers.
        stages: The stages, over the modules and parameters of this worker's model.
        lane_of: For every stage its lane, numbered over all workers of a replica.
        worker_of: For every lane its worker.
        devices: For every lane its device, where one worker drives several.
        backward: What the halves of the stages' backward passes cost; None where that was not measured.
        scale: Samples of a micro-batch over those of the plan's, in proportion to which its times and sizes are.
    """

    shape: Shape
    plan: Plan
    stages: list[Stage]
    lane_of: tuple[int, ...]
    worker_of: tuple[int, ...]
    devices: tuple[str, ...] = ()
    backward: tuple[BackwardCost, ...] | None = None
    scale: float = 1.0


def divide_workers(config: TrainConfig, workers: int) -> Shape:
    """Divide workers into positions and replicas.

    Args:
        config: Stages, replicas, placement.
        workers: Number of workers of the job.

    Raises:
        UsageError: Stages and replicas do not fit the workers.
    """
    stages = config.stages
    replicas = config.replicas
    if replicas is None:
        replicas = workers // stages if workers % stages == 0 else 1
    if workers % replicas or stages % (workers // replicas):
        fitting = sorted({count * replicas for count in range(1, stages + 1) if stages % count == 0})
        raise UsageError(
            f"--stages {stages} --replicas {replicas} do not fit {workers} worker(s)",
            "Workers are divided evenly into replicas, and the stages of a replica evenly over its workers.",
            f"Start {', '.join(map(str, fitting))} workers, or ask for other numbers.",
        )
    positions = workers // replicas
    each = stages // positions
    placement: PlacementKind = config.placement or ("linear" if each == 1 or positions == 1 else "loop")
    if placement == "v" and each != 2:
        raise UsageError(
            f"--placement v with {stages} stages on {positions} worker(s)",
            "Up and down again is two stages on every worker.",
            f"Ask for --stages {2 * positions}, or another placement.",
        )
    return Shape(positions, replicas, stages, each if placement == "linear" else 1, placement)


def shape_of(config: TrainConfig, workers: int, plan: Plan | None = None) -> Shape:
    """How the workers of a run are divided, before the model is known.

    Args:
        config: Options.
        workers: Number of workers of the job.
        plan: What is followed, instead of what `config` says of stages.

    Raises:
        UsageError: Stages, replicas and workers do not fit each other.
        PlanError: The plan cannot be read.
    """
    if plan is None and config.plan_file is not None:
        plan = read_plan(config.plan_file)
    if plan is not None:
        return _shape_of_plan(config, plan, workers)
    if not config.is_staged and config.replicas in (None, workers):
        return Shape(1, workers, 1, 1)
    return divide_workers(config, workers)


def _shape_of_plan(config: TrainConfig, plan: Plan, workers: int) -> Shape:
    """How workers are divided by a plan, whose placement is obeyed where it is not the usual one of its kind.

    Raises:
        UsageError: Options contradict it, or it needs other workers.
        PlanError: No workers can be placed so.
    """
    stages, own = follow_stages(config, plan), own_placement(config, plan)
    if own is None:
        return divide_workers(stages, workers)
    lanes = len(own.lanes) // own.workers
    if own.lanes != tuple(divmod(lane, lanes) for lane in range(own.workers * lanes)):
        told = ", ".join(f"stage {one.stage} on lane {one.lane} of worker {one.worker}" for one in own.stages[:8])
        raise PlanError(
            f"the plan's placement cannot be run: {told}",
            "Workers and the lanes of each are numbered from 0 without gaps, and every worker has as many lanes.",
            f"Correct placement.stages, or leave it to --placement {own.kind}.",
        )
    replicas = workers // own.workers if config.replicas is None else config.replicas
    if not replicas or replicas * own.workers != workers:
        raise UsageError(
            f"the plan places its stages on {own.workers} worker(s), and here are {workers}"
            + (f" for --replicas {config.replicas}" if config.replicas is not None else ""),
            "A replica has the workers that the plan names, and replicas use all workers.",
            f"Start {own.workers * (config.replicas or 1)} workers.",
        )
    return Shape(own.workers, replicas, len(own.stages), lanes, own.kind)


def own_placement(config: TrainConfig, plan: Plan) -> Placement | None:
    """Where a plan puts each stage; None where it leaves that to the kind of placement, or options name another kind.

    Args:
        config: Options.
        plan: The plan.
    """
    placement = plan.placement
    if placement is None or placement.is_usual or config.placement not in (None, placement.kind):
        return None
    return placement


def make_stage_plan(
    model: nn.Module,
    example: torch.Tensor,
    config: TrainConfig,
    world: World,
    *,
    name: str | None = None,
    plan: Plan | None = None,
) -> StagePlan:
    """Cut a model into stages and place them; a collective.

    Args:
        model: The whole model, on its device.
        example: One micro-batch, on the device, in the memory format of the training.
        config: Options.
        world: All workers.
        name: What to call the model in the plan.
        plan: The plan to follow, instead of what `config.plan_file` names.

    Raises:
        UsageError: Stages, replicas and workers do not fit each other.
        PlanError: The plan cannot be read, is for another model, or differs between workers.
        PartitionError: The model cannot be cut into so many stages.
    """
    given, scale = plan or read_own_plan(config, world), 1.0
    if given is None:
        shape = divide_workers(config, world.size)
        given = _made_by_main(model, example, config, shape, world, name)
    else:
        shape = _shape_of_plan(config, given, world.size)
        scale = example.shape[0] / (given.partition.micro_batch or example.shape[0])
    stages = stages_from_plan(model, given, (example,))
    own = own_placement(config, given)
    if own is None:
        layout = shape.layout()
        lane_of, worker_of = layout.lane_of, layout.worker_of
    else:
        lane_of, worker_of = own.lane_of, tuple(worker for worker, _ in own.lanes)
    backward = _measure_halves(stages, example, world) if config.schedule == "zero_bubble" else None
    devices = _devices(example.device, shape, world)
    return StagePlan(shape, given, stages, lane_of, worker_of, devices, backward, scale)


def _devices(device: torch.device, shape: Shape, world: World) -> tuple[str, ...]:
    """All GPUs of the machine where one worker has lanes for them and is alone."""
    count = torch.cuda.device_count() if device.type == "cuda" and world.size == 1 else 1
    return tuple(f"cuda:{lane * count // shape.lanes}" for lane in range(shape.lanes)) if count > 1 else ()


def _measure_halves(stages: list[Stage], example: torch.Tensor, world: World) -> tuple[BackwardCost, ...]:
    """Whether splitting backward passes pays, as rank 0 finds it."""

    def measure() -> tuple[BackwardCost, ...]:
        for stage in stages:
            stage.train()
        inputs = {stages[0].model_inputs[0]: example}
        return tuple(measure_backward(stages, inputs, None, _any_loss))

    costs = world.from_main(measure)
    if world.is_main and not may_split(costs):
        worst = max(range(len(costs)), key=lambda index: costs[index].ratio)
        _log.warning(
            "zero_bubble keeps backward passes whole: in halves that of stage %d costs %.2f times as much, and more "
            "than %.2f times is not worth it",
            worst,
            costs[worst].ratio,
            MOST_SPLIT_COST,
        )
    return costs


def _any_loss(output: Any, target: Any) -> torch.Tensor:
    """Something to go backward from, for any kind of output."""
    return torch.stack([leaf.float().square().mean() for _, leaf in tensor_leaves(output)]).sum()


def read_own_plan(config: TrainConfig, world: World) -> Plan | None:
    """The plan's file that the options name, if they do; a collective.

    Args:
        config: Options of the run.
        world: All workers.

    Raises:
        PlanError: It cannot be read here or elsewhere, or not all workers have read the same one.
    """
    if config.plan_file is None:
        return None
    plan: Plan | None = None
    problem: HybridparError | None = None
    try:
        plan = read_plan(config.plan_file)
    except HybridparError as error:
        problem = error
    mine = "unreadable" if plan is None else hashlib.sha256(plan.to_json().encode()).hexdigest()[:12]
    everyone = [str(answer) for answer in world.gather(mine)]
    if problem is not None:
        raise problem
    if len(set(everyone)) > 1:
        table = "\n".join(f"  rank {rank}: {fingerprint}" for rank, fingerprint in enumerate(everyone))
        raise PlanError(
            f"the workers have read different plans from {config.plan_file}:\n{table}",
            "All workers follow one plan.",
            "Copy the same file to every host.",
        )
    return plan


def _made_by_main(
    model: nn.Module, example: torch.Tensor, config: TrainConfig, shape: Shape, world: World, name: str | None
) -> Plan:
    """Measure and cut on rank 0; an error there is raised on all workers."""

    def make() -> str:
        device = example.device.type
        problem = Problem(
            shape.stages,
            (Worker(device, shape.lanes),) * shape.positions,
            shape.placement,
            micro_batches=config.micro_batches,
            optimizer_copies=state_copies(config),
        )
        made = partition_model(
            model, example, problem, threads=lane_threads(shape, example.device), cache=profiles_directory(), name=name
        )
        return made.plan.to_json()

    return parse_plan(json.loads(world.from_main(make)))


def follow_stages(config: TrainConfig, plan: Plan, decided: bool = False) -> TrainConfig:
    """The options with what a plan says of stages.

    Args:
        config: The options.
        plan: The plan.
        decided: Whether the user set the number of stages, though it may be the default.

    Raises:
        UsageError: They contradict each other.
    """
    count = len(plan.partition.stages)
    if config.stages != count and (decided or config.stages > 1):
        raise UsageError(
            f"--stages {config.stages} with a plan of {count} stages",
            "A plan says how many stages there are.",
            f"Leave out --stages, or make a plan with `hybridpar plan ... --stages {config.stages}`.",
        )
    kind = plan.placement.kind if plan.placement is not None else None
    return replace(config, stages=count, placement=config.placement or kind)


def lane_threads(shape: Shape, device: torch.device) -> int:
    """Intra-op threads of a lane on a CPU: those of the process, divided.

    Args:
        shape: How workers are divided.
        device: The device.
    """
    return max(1, torch.get_num_threads() // shape.lanes) if device.type == "cpu" else 1


def pipeline_options(plan: StagePlan, config: TrainConfig, sync: SyncOptions, device: torch.device) -> PipelineOptions:
    """The options of the pipeline, from a plan and the options of a run.

    Args:
        plan: The plan.
        config: Options of the run.
        sync: Options of the exchange of gradients.
        device: The device.
    """
    sections = plan.plan.partition.stages
    bad = [stage for stage in config.recompute if not 0 <= stage < len(sections)]
    if bad:
        raise UsageError(
            f"--recompute {bad[0]}", f"Stages are numbered from 0 to {len(sections) - 1}.", "Name such stages."
        )
    return PipelineOptions(
        plan.lane_of,
        plan.worker_of,
        devices=plan.devices,
        schedule=config.schedule or "greedy",
        recompute=config.recompute,
        compile=config.compile,
        threads=lane_threads(plan.shape, device),
        seed=config.seed,
        forward_ms=_known([stage.forward_ms for stage in sections], plan.scale),
        backward_ms=_known([stage.backward_ms for stage in sections], plan.scale),
        saved_bytes=_whole(_known([stage.saved_bytes for stage in sections], plan.scale)),
        input_ms=tuple(cost.input_ms for cost in plan.backward) if plan.backward is not None else None,
        weight_ms=tuple(cost.weight_ms for cost in plan.backward) if plan.backward is not None else None,
        split_backward=plan.backward is not None and may_split(plan.backward),
        sync=sync,
        sync_lanes=config.sync_lanes,
        capture=config.cuda_graph,
        record=config.timeline is not None,
    )


def _known(values: Sequence[float | None], scale: float) -> tuple[float, ...] | None:
    """The values for this run's micro-batches, where all of them are known."""
    known = [value * scale for value in values if value is not None]
    return tuple(known) if len(known) == len(values) else None


def _whole(values: Sequence[float] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(round(value) for value in values)


@dataclass(frozen=True)
class WorkerShare:
    """What one CPU worker of a run does.

    Attributes:
        samples: Of a micro-batch, where batches divide evenly.
        threads: Intra-op threads of a lane.
    """

    samples: int
    threads: int


def micro_batch_samples(config: TrainConfig, replicas: int) -> int:
    """Samples of a micro-batch; where they do not divide evenly some micro-batches have one more.

    Args:
        config: Options of the run.
        replicas: Copies of the model.
    """
    return max(2, config.batch_size // (replicas * config.micro_batches))


def share_of_worker(config: TrainConfig, workers: int) -> WorkerShare:
    """What each of so many workers on this machine does, as the launcher sets it up.

    Args:
        config: Options of the run.
        workers: Workers, all on this machine.

    Raises:
        UsageError: Stages, replicas and workers do not fit each other.
    """
    shape = shape_of(config, workers)
    threads = threads_per_worker(workers, available_cores())
    return WorkerShare(micro_batch_samples(config, shape.replicas), max(1, threads // shape.lanes))
