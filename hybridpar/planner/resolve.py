"""Makes the one plan of a run from the user's request and the plan that is followed, if any.

Options that the user decided on win over the plan that is followed, and what neither says is at the options' defaults.
What results is a `ResolvedPlan`, and everything that runs reads it alone: a plan's file, the answer of a search, the
plan of a run that is resumed and plain options (`--stages 2 --micro-batches 4`) all become one by `resolve`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace

import torch

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import PlanError, UsageError, refuse
from hybridpar.machine.devices import require_gpu
from hybridpar.machine.process import available_cores, threads_per_worker
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
from hybridpar.schedule.layout import Layout

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
        config.check_conflicts()
    layout, sync = _layout(config, workers, plan, decided), resolve_sync(config, plan, decided)
    if not layout.is_equal:
        replace(config, shard_optimizer=sync.shard_optimizer, batch_norm=sync.batch_norm).check_unequal()
    shares = plan.placement.shares if plan is not None and plan.placement is not None else None
    if shares is not None and ("shares" in decided or len(shares) != layout.replicas):
        shares = None
    count = layout.stages
    pipeline = Pipeline(
        schedule=config.schedule or "greedy",
        micro_batches=config.micro_batches,
        recompute=tuple(range(count)) if "all" in config.recompute else config.recompute,
        offload=config.offload,
    )
    if plan is not None and plan.pipeline is not None:
        wins = {"micro_batches", "schedule"} & set(decided)
        if {"recompute", "offload"} & set(decided):
            wins |= {"recompute", "offload"}
        pipeline = plan.pipeline.model_copy(update={name: getattr(pipeline, name) for name in wins})
        if (layout, pipeline.schedule) != (plan.layout, plan.pipeline.schedule):
            pipeline = pipeline.model_copy(update={"rows": ()})
    if count == 1:
        if pipeline.offload:
            raise UsageError(
                "--offload without --stages",
                "A whole model goes backward right after its forward pass, so that nothing has to wait.",
                "Cut it: --stages 8 --placement loop runs eight stages one after the other on one device.",
            )
        pipeline = pipeline.model_copy(update={"schedule": Pipeline().schedule, "recompute": ()})
    for option in ("recompute", "offload"):
        for stage in getattr(pipeline, option):
            if not 0 <= stage < count:
                raise UsageError(
                    f"--{option} {stage}", f"Stages are numbered from 0 to {count - 1}.", "Name such stages."
                )
    if both := sorted(set(pipeline.recompute) & set(pipeline.offload)):
        raise refuse(f"--recompute {both[0]}", f"--offload {both[0]}", "What is computed again need not wait.")
    if pipeline.offload and config.cuda_graph == "on":
        raise refuse("--cuda-graph on", "--offload", "Memory of the host is not allocated within a graph.")
    measured = plan.measured if plan is not None else None
    compute = compute_of(config, None if plan is None or plan.compute is None else plan.compute.threads)
    facts = {"memory_format": compute.memory_format, "dtype": DTYPES[config.amp], "seed": config.seed}
    searched = plan is not None and plan.inputs is not None
    return ResolvedPlan(
        model=model or (_UNKNOWN if plan is None else plan.model),
        partition=Partition(stages=(Stage(units=()),) * count) if plan is None else plan.partition,
        placement=Placement(layout=layout, device=device, shares=shares),
        pipeline=pipeline,
        sync=sync,
        compute=compute,
        kernels=Kernels(database=compute.kernels) if config.uses_kernels else None,
        measured=(measured or Measured()).model_copy(update=facts),
        predicted=plan.predicted if plan is not None and searched else None,
        checksum=None if plan is None else plan.checksum or plan.digest,
        inputs=plan.inputs if plan is not None else None,
    )


def cut_for_recompute(config: TrainConfig, workers: int, stages: int = 8) -> TrainConfig:
    """The options with stages for `--recompute all` without any: one after the other on the device of each worker."""
    if "all" not in config.recompute or config.is_staged:
        return config
    return replace(config, stages=stages, replicas=config.replicas or workers, placement=config.placement or "loop")


def compute_of(config: TrainConfig, threads: int | None = None) -> Compute:
    """How steps are computed with options."""
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
        lanes=config.exchange.lanes,
        bucket_bytes=config.exchange.bucket_bytes,
        policy=(SyncRule(codec=config.compress),),
        batch_norm=config.batch_norm,
        outer=None if config.outer is None else config.outer.every,
        shard_optimizer=config.shard_optimizer,
    )
    if plan is None or plan.sync is None:
        return asked
    option_of = {"policy": "compress", "outer": "sync", "lanes": "sync", "bucket_bytes": "sync"}
    option_of |= {name: name for name in ("batch_norm", "shard_optimizer")}
    if config.compress.strip() == plan.sync.codec:  # the same in other words
        del option_of["policy"]
    wins = [field for field, option in option_of.items() if option in decided]
    return plan.sync.model_copy(update={field: getattr(asked, field) for field in wins})


def join_workers(config: TrainConfig, plan: Plan | None = None) -> World:
    """Join the workers of a run, with as many groups as options and plan exchange gradients on."""
    if plan is None and config.plan_file is not None:
        with contextlib.suppress(PlanError):  # raised on all workers once they have joined, so that no rank blocks
            plan = read_plan(config.plan_file)
    sync = resolve_sync(config, plan, decided_options(config))
    require_gpu(config.device)
    device = torch.device("cpu") if config.device == "cpu" else None
    return World.join(lanes=sync.groups, timeout=config.timeout, device=device)


def _layout(config: TrainConfig, workers: int, plan: Plan | None, decided: Collection[str]) -> Layout:
    """Where stages run: as options or a plan say, or as the kind of placement deals them out to these workers."""
    stages, replicas, layout = config.stages, config.replicas, config.layout
    kind = config.placement if layout is None else None
    if plan is not None:
        count = len(plan.partition.stages)
        if stages != count and ("stages" in decided or stages > 1):
            raise UsageError(
                f"--stages {stages} with a plan of {count} stages",
                "A plan says how many stages there are.",
                f"Leave out --stages, or make a plan with `hybridpar plan ... --stages {stages}`.",
            )
        stages = count
    if layout is None and plan is not None and plan.placement is not None and kind in (None, plan.layout.kind):
        planned = plan.layout
        if plan.inputs is not None and "replicas" not in decided:
            replicas = planned.replicas
        if replicas in (None, planned.replicas) and (planned.workers == workers or not planned.is_equal):
            layout = planned
        elif stages > 1 and not planned.is_usual:
            raise UsageError(
                f"the plan places its stages on {planned.workers} worker(s), and here are {workers}",
                "Only stages that are dealt out to workers in a usual way can be dealt out to others.",
                f"Start {planned.workers} workers, or plan again for these.",
            )
        kind = planned.kind
    if layout is not None:
        if layout.workers != workers:
            raise UsageError(
                f"stages are placed on {layout.workers} worker(s), and here are {workers}",
                "Every worker runs stages of one replica.",
                f"Start {layout.workers} workers.",
            )
        return layout
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
    kind = kind or ("linear" if each == 1 or positions == 1 else "loop")
    if kind == "v" and each != 2:
        raise UsageError(
            f"--placement v with {stages} stages on {positions} worker(s)",
            "Up and down again is two stages on every worker.",
            f"Ask for --stages {2 * positions}, or another placement.",
        )
    lanes = stages if kind == "linear" else positions
    return Layout.dealt(stages, lanes, kind, workers=positions, replicas=replicas)


def lane_threads(layout: Layout, device: torch.device) -> int:
    """Intra-op threads of a lane on a CPU: those of the process, divided."""
    return max(1, torch.get_num_threads() // layout.lanes_each) if device.type == "cpu" else 1


def share_of_worker(config: TrainConfig, workers: int) -> tuple[int, int]:
    """Samples of a micro-batch and intra-op threads of a lane, of each of so many workers on this machine."""
    plan = resolve(config, workers, None if config.plan_file is None else read_plan(config.plan_file))
    threads = threads_per_worker(workers, available_cores())
    return plan.micro_batch_samples(config.samples_per_step), max(1, threads // plan.layout.lanes_each)
