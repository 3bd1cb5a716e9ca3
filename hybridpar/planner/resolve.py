"""Makes the one plan of a run from the user's request and the plan that is followed, if any.

Options that the user decided on win over the plan that is followed, and what neither says is at the options' defaults.
What results is a `ResolvedPlan`, and everything that runs reads it alone: a plan's file, the answer of a search, the
plan of a run that is resumed and plain options (`--stages 2 --micro-batches 4`) all become one by `resolve`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import cast

import torch

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.config.recipe import refuse
from hybridpar.errors import PlanError, UsageError
from hybridpar.machine.process import available_cores, threads_per_worker
from hybridpar.partition.cost import PlacementKind
from hybridpar.plan import (
    Compute,
    Kernels,
    Measured,
    ModelInfo,
    Partition,
    Pipeline,
    Placement,
    Plan,
    ResolvedPlan,
    Stage,
    Sync,
    SyncRule,
    read_plan,
)
from hybridpar.planner.fixed import decided_options
from hybridpar.schedule.actions import place_stages

#: Type that the forward pass computes in, by `--amp`.
DTYPES = {"none": "float32", "bf16": "bfloat16", "fp16": "float16"}

#: Of a plan that is made before the model is known.
_UNKNOWN = ModelInfo(name="", fingerprint="", parameters=0)


def resolve(
    config: TrainConfig,
    workers: int,
    plan: Plan | None = None,
    decided: Collection[str] | None = None,
    *,
    model: ModelInfo | None = None,
    device: str = "cpu",
) -> ResolvedPlan:
    """The plan of a run."""
    decided = decided_options(config) if decided is None else decided
    if plan is not None and plan.compute is not None:
        left = plan.compute.options.keys() - set(decided)
        if "kernels" in decided and config.uses_kernels:
            left -= {"memory_format"}  # that of the kernels
        config = replace(config, **{name: plan.compute.options[name] for name in left})
    placement, sync = _place(config, workers, plan, decided, device), resolve_sync(config, plan, decided)
    if placement.homes is not None:
        replace(config, shard_optimizer=sync.shard_optimizer, batch_norm=sync.batch_norm).check_unequal()
    shares = plan.placement.shares if plan is not None and plan.placement is not None else None
    if shares is not None and "shares" not in decided and len(shares) == placement.replicas:
        placement = placement.model_copy(update={"shares": shares})
    count = len(placement.stages)
    pipeline = plan.pipeline if plan is not None else None
    micro_batches, schedule = config.micro_batches, config.schedule or "greedy"
    recompute, offload, speed = config.recompute, config.offload, None
    if pipeline is not None:
        micro_batches = micro_batches if "micro_batches" in decided else pipeline.micro_batches
        schedule = schedule if "schedule" in decided else pipeline.schedule
        speed = pipeline.link_bytes_per_second
        if not {"recompute", "offload"} & set(decided):
            recompute, offload = pipeline.recompute, pipeline.offload
    if count == 1:
        if offload:
            raise UsageError(
                "--offload without --stages",
                "A whole model goes backward right after its forward pass, so that nothing has to wait.",
                "Cut it: --stages 8 --placement loop runs eight stages one after the other on one device.",
            )
        schedule, recompute = Pipeline().schedule, ()
    for option, named in (("recompute", recompute), ("offload", offload)):
        for stage in named:
            if not 0 <= stage < count:
                raise UsageError(
                    f"--{option} {stage}", f"Stages are numbered from 0 to {count - 1}.", "Name such stages."
                )
    if both := sorted(set(recompute) & set(offload)):
        raise refuse(f"--recompute {both[0]}", f"--offload {both[0]}", "What is computed again need not wait.")
    if offload and config.cuda_graph:
        raise refuse("--cuda-graph", "--offload", "Memory of the host is not allocated within a graph.")
    measured = plan.measured if plan is not None else None
    compute = compute_of(config, None if plan is None or plan.compute is None else plan.compute.threads)
    facts = {"memory_format": compute.memory_format, "dtype": DTYPES[config.amp], "seed": config.seed}
    searched = plan is not None and plan.inputs is not None
    return ResolvedPlan(
        model=model or (_UNKNOWN if plan is None else plan.model),
        partition=Partition(stages=(Stage(units=()),) * count) if plan is None else plan.partition,
        placement=placement,
        pipeline=Pipeline(
            schedule=schedule,
            link_bytes_per_second=speed,
            micro_batches=micro_batches,
            recompute=recompute,
            offload=offload,
        ),
        sync=sync,
        compute=compute,
        kernels=Kernels(database=compute.kernels) if config.uses_kernels else None,
        measured=(measured or Measured()).model_copy(update=facts),
        predicted=plan.predicted if plan is not None and searched else None,
        followed=None if plan is None or searched else True,
        checksum=plan.checksum if plan is not None else None,
        inputs=plan.inputs if plan is not None else None,
    )


def compute_of(config: TrainConfig, threads: int | None = None) -> Compute:
    """How steps are computed with these options."""
    return Compute(
        memory_format="channels_last" if config.uses_channels_last else "contiguous",
        kernels=config.kernels.strip(),
        amp=config.amp,
        compile=config.compile,
        cuda_graph=config.cuda_graph,
        threads=threads,
    )


def resolve_sync(config: TrainConfig, plan: Plan | None, decided: Collection[str]) -> Sync:
    """How gradients are exchanged, which must be known before workers join."""
    asked = Sync(
        lanes=config.sync_lanes,
        bucket_bytes=config.bucket_bytes,
        policy=(SyncRule(codec=config.compress),),
        batch_norm=config.batch_norm,
        outer=None if config.outer is None else config.outer.every,
        shard_optimizer=config.shard_optimizer,
    )
    if plan is None or plan.sync is None:
        return asked
    own = {"lanes": "sync_lanes", "bucket_bytes": "bucket_mb", "policy": "compress", "outer": "sync"}
    own |= {name: name for name in ("batch_norm", "shard_optimizer")}
    if config.compress.strip() == plan.sync.codec:  # the same in other words
        del own["policy"]
    wins = {field: getattr(asked, field) for field, option in own.items() if option in decided}
    return plan.sync.model_copy(update=wins)


def join_workers(config: TrainConfig, given: Collection[str] = (), plan: Plan | None = None) -> World:
    """Join the workers of a run, with as many groups as options and plan exchange gradients on."""
    if plan is None and config.plan_file is not None:
        with contextlib.suppress(PlanError):  # raised on all workers once they have joined, so that no rank blocks
            plan = read_plan(config.plan_file)
    sync = resolve_sync(config, plan, decided_options(config, given))
    return World.join(lanes=sync.groups, timeout=config.timeout)


def _place(config: TrainConfig, workers: int, plan: Plan | None, decided: Collection[str], device: str) -> Placement:
    """Where stages run: as a plan places them, or as the kind of placement deals them out to these workers."""
    stages, replicas, homes = config.stages, config.replicas, config.homes
    kind = None if homes is not None else cast("PlacementKind | None", config.placement)
    if plan is not None:
        count = len(plan.partition.stages)
        if stages != count and ("stages" in decided or stages > 1):
            raise UsageError(
                f"--stages {stages} with a plan of {count} stages",
                "A plan says how many stages there are.",
                f"Leave out --stages, or make a plan with `hybridpar plan ... --stages {stages}`.",
            )
        stages = count
    said = plan.placement if plan is not None else None
    if homes is None and config.placement is None and config.replicas is None and said is not None:
        homes = said.homes
    if homes is not None:
        named = 1 + max(map(max, homes))
        if named != workers:
            raise UsageError(
                f"stages are placed on {named} worker(s), and here are {workers}",
                "Every worker runs stages of one replica.",
                f"Start {named} workers.",
            )
        return Placement.of_homes(homes, device)
    if plan is not None and said is not None:
        if "replicas" not in decided and (plan.inputs is not None or plan.workers == workers):
            replicas = said.replicas
        if stages > 1 and not said.is_usual and kind in (None, said.kind):
            return _as_placed(said, workers, replicas, device)
        kind = kind or said.kind
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
    dealt: PlacementKind = kind or ("linear" if each == 1 or positions == 1 else "loop")
    if dealt == "v" and each != 2:
        raise UsageError(
            f"--placement v with {stages} stages on {positions} worker(s)",
            "Up and down again is two stages on every worker.",
            f"Ask for --stages {2 * positions}, or another placement.",
        )
    layout = place_stages(stages, stages if dealt == "linear" else positions, dealt, workers=positions)
    return Placement.of_lanes(layout.lane_of, layout.worker_of, dealt, replicas, device)


def _as_placed(own: Placement, workers: int, asked: int | None, device: str) -> Placement:
    """The places that a plan names, for all workers."""
    lanes = own.lanes_each
    if own.lanes != tuple(divmod(lane, lanes) for lane in range(own.workers * lanes)):
        told = ", ".join(f"stage {one.stage} on lane {one.lane} of worker {one.worker}" for one in own.stages[:8])
        raise PlanError(
            f"the plan's placement cannot be run: {told}",
            "Workers and the lanes of each are numbered from 0 without gaps, and every worker has as many lanes.",
            f"Correct placement.stages, or leave it to --placement {own.kind}.",
        )
    replicas = workers // own.workers if asked is None else asked
    if not replicas or replicas * own.workers != workers:
        raise UsageError(
            f"the plan places its stages on {own.workers} worker(s), and here are {workers}"
            + (f" for --replicas {asked}" if asked is not None else ""),
            "A replica has the workers that the plan names, and replicas use all workers.",
            f"Start {own.workers * (asked or 1)} workers.",
        )
    return Placement.of_lanes(own.lane_of, own.worker_of, own.kind, replicas, device)


def lane_threads(placement: Placement, device: torch.device) -> int:
    """Intra-op threads of a lane on a CPU: those of the process, divided."""
    return max(1, torch.get_num_threads() // placement.lanes_each) if device.type == "cpu" else 1


@dataclass(frozen=True)
class WorkerShare:
    """What one CPU worker of a run does.

    Attributes:
        samples: Of a micro-batch, where batches divide evenly.
        threads: Intra-op threads of a lane.
    """

    samples: int
    threads: int


def share_of_worker(config: TrainConfig, workers: int) -> WorkerShare:
    """What each of so many workers on this machine does, as the launcher sets it up."""
    plan = resolve(config, workers, None if config.plan_file is None else read_plan(config.plan_file))
    threads = threads_per_worker(workers, available_cores())
    return WorkerShare(plan.micro_batch_samples(config.batch_size), max(1, threads // plan.placement.lanes_each))
