"""Turns the result of a search into a `Plan`."""

from __future__ import annotations

from hybridpar.partition.planning import plan_stages
from hybridpar.plan import (
    Compute,
    Measured,
    Partition,
    Pipeline,
    Placement,
    Plan,
    StepFigures,
    Sync,
    SyncRule,
)
from hybridpar.planner.evaluate import Evaluator, Outcome
from hybridpar.planner.search import Answer
from hybridpar.planner.space import stage_speeds


def plan_of(answer: Answer, outcome: Outcome | None = None, compute: Compute | None = None) -> Plan:
    """The plan of an outcome, with what the search read.

    Args:
        answer: Of the search.
        outcome: An outcome of it; default: the chosen one.
        compute: How steps are computed, where that was chosen.
    """
    outcome = outcome or answer.chosen
    candidate, evaluator = outcome.candidate, answer.evaluator
    inputs = evaluator.space.inputs
    profile, choice, everything = inputs.profile, candidate.codec, tuple(range(candidate.layout.stages))
    plan = Plan(
        model=profile.info,
        partition=_partition(evaluator, outcome),
        placement=Placement(
            layout=candidate.layout,
            device=inputs.by_worker[0][1].kind,
            shares=evaluator.shares(candidate.layout, candidate.micro_batches),
        ),
        pipeline=Pipeline(
            schedule=candidate.schedule,
            rows=tuple(
                tuple(evaluator.schedule(candidate, replica).to_csv().splitlines())
                for replica in (candidate.layout.kinds if candidate.layout.stages > 1 else ())
            ),
            link_bytes_per_second=candidate.cut.link_speed,
            micro_batches=candidate.micro_batches,
            recompute=everything if candidate.cut.recompute else (),
            offload=everything if candidate.cut.offload else (),
        ),
        sync=Sync(
            lanes=inputs.sync_lanes,
            bucket_bytes=inputs.bucket_bytes,
            policy=tuple(SyncRule(pattern=rule.pattern, codec=rule.codec) for rule in choice.policy.rules),
            outer=choice.every if choice.outer is not None else None,
            shard_optimizer=candidate.sharded,
        ),
        compute=compute,
        measured=Measured(
            device=profile.device,
            threads=profile.threads,
            profile=profile.source,
            noise=round(profile.noise, 4),
            versions=dict(profile.versions),
        ),
        predicted=StepFigures(
            step_ms=round(outcome.step_ms, 3),
            bubble=round(outcome.bubble, 4),
            exposed_sync_ms=round(outcome.exposed_sync_ms, 3),
            bytes_sent_per_step=round(outcome.bytes_sent),
            peak_saved_bytes=outcome.peak_saved_bytes,
            memory_bytes=round(outcome.memory_bytes / inputs.memory_margin),
        ),
        inputs=inputs.to_data(),
    )
    return plan.model_copy(update={"checksum": plan.digest})


def _partition(evaluator: Evaluator, outcome: Outcome) -> Partition:
    candidate = outcome.candidate
    samples = evaluator.samples(candidate.layout, candidate.micro_batches)
    graph = evaluator.space.inputs.profile.timed(samples)
    stages = plan_stages(graph, candidate.cut.stage_of, stage_speeds(evaluator.space.inputs, candidate.layout))
    if len(stages) == 1:  # it holds everything
        stages = (stages[0].model_copy(update={"units": ()}),)
    return Partition(
        stages=stages,
        cut=candidate.cut.name,
        micro_batch=samples,
        edges=evaluator.figures(candidate).edges,
    )
