"""Turns the result of a search into a `Plan`, and finds the candidate of a plan again."""

from __future__ import annotations

import itertools
from typing import TypedDict

from hybridpar.compress import format_codec
from hybridpar.compress.policy import exact_rules
from hybridpar.errors import PlanError
from hybridpar.partition.planning import plan_stages
from hybridpar.plan import (
    Kernels,
    Measured,
    Partition,
    Pipeline,
    Placement,
    Plan,
    Predicted,
    StagePlacement,
    Sync,
    SyncRule,
)
from hybridpar.planner.codecs import CodecChoice
from hybridpar.planner.evaluate import Evaluator, Outcome
from hybridpar.planner.inputs import inputs_of_plan
from hybridpar.planner.search import Answer
from hybridpar.planner.space import Candidate, Space
from hybridpar.planner.speeds import stage_speeds


def plan_of(answer: Answer, outcome: Outcome | None = None) -> Plan:
    """The plan of an outcome, with what the search read.

    Args:
        answer: Of the search.
        outcome: One of its outcomes; default: the chosen one.
    """
    outcome = outcome or answer.chosen
    candidate, evaluator = outcome.candidate, answer.evaluator
    inputs = evaluator.space.inputs
    profile, variant = inputs.profile, inputs.profile.variants[candidate.variant]
    link = inputs.cluster.outer
    return Plan(
        model=profile.info,
        partition=_partition(evaluator, outcome),
        **_sections(candidate, evaluator),
        measured=Measured(
            device=profile.device,
            threads=profile.threads,
            memory_format="channels_last" if variant.memory_format == "channels_last" else "contiguous",
            profile=profile.source,
            noise=round(profile.noise, 4),
            link_bytes_per_second=link.bandwidth if link is not None else None,
            link_latency_ms=link.latency_ms if link is not None else None,
            versions=dict(profile.versions),
        ),
        predicted=Predicted(
            step_ms=round(outcome.step_ms, 3),
            bubble=round(outcome.bubble, 4),
            exposed_sync_ms=round(outcome.exposed_sync_ms, 3),
            bytes_sent_per_step=round(outcome.bytes_sent),
            peak_saved_bytes=outcome.peak_saved_bytes,
            memory_bytes=round(outcome.memory_bytes),
        ),
        inputs=inputs.to_data(),
    )


class _Sections(TypedDict):
    """Sections of a plan."""

    placement: Placement
    pipeline: Pipeline
    sync: Sync
    kernels: Kernels | None


def _sections(candidate: Candidate, evaluator: Evaluator) -> _Sections:
    """The sections of a plan that are the same for every cut of a shape."""
    shape, inputs = candidate.shape, evaluator.space.inputs
    choice, everything = evaluator.space.codec_choices[candidate.codec], tuple(range(shape.stages))
    return {
        "placement": _placement(candidate, evaluator),
        "pipeline": Pipeline(
            schedule=candidate.schedule,
            micro_batches=shape.micro_batches,
            recompute=everything if candidate.cut.recompute else (),
            offload=everything if candidate.cut.offload else (),
        ),
        "sync": Sync(
            lanes=inputs.sync_lanes,
            bucket_bytes=inputs.bucket_bytes,
            policy=_rules(choice),
            outer=choice.every if choice.every > 1 else None,
            shard_optimizer=candidate.sharded,
        ),
        "kernels": Kernels(database="auto") if inputs.profile.variants[candidate.variant].kernels != "stock" else None,
    }


def candidate_of(plan: Plan, evaluator: Evaluator) -> Candidate:
    """The candidate that a plan says, so that it can be predicted again.

    Args:
        plan: The plan, of the space that the evaluator is for.
        evaluator: What predicts.

    Raises:
        PlanError: No candidate of the space is like it.
    """
    part, measured = plan.partition, plan.measured or Measured()
    said = _told(
        len(part.stages),
        part.cut,
        measured.memory_format,
        plan.placement or Placement(stages=(StagePlacement(stage=0),)),
        plan.pipeline or Pipeline(),
        plan.sync or Sync(),
        plan.kernels,
    )
    space = evaluator.space
    for one in itertools.chain(space.candidates(), space.candidates(saving=True)):
        form = space.inputs.profile.variants[one.variant].memory_format
        if _told(one.shape.stages, one.cut.name, form, **_sections(one, evaluator)) == said:
            return one
    raise PlanError(
        "the plan is not one of the plans that its recorded inputs leave open",
        "What is predicted is a candidate of the search that the plan records.",
        "Plan again; a plan that was edited by hand cannot be compared with what was predicted.",
    )


def is_as_recorded(plan: Plan) -> bool:
    """Whether a plan still says what its search said, so that its prediction holds: it was not edited.

    Args:
        plan: The plan.
    """
    inputs = inputs_of_plan(plan)
    evaluator = Evaluator(Space(inputs))
    try:
        candidate = candidate_of(plan, evaluator)
    except PlanError:
        return False
    sync = plan.sync or Sync(lanes=inputs.sync_lanes, bucket_bytes=inputs.bucket_bytes)
    if (sync.lanes, sync.bucket_bytes, sync.batch_norm) != (inputs.sync_lanes, inputs.bucket_bytes, Sync().batch_norm):
        return False
    units, homes = inputs.profile.graph.units, candidate.cut.stage_of
    placed = [(unit.name, home) for unit, home in zip(units, homes, strict=True)]
    said = [(unit, stage) for stage, one in enumerate(plan.partition.stages) for unit in one.units]
    return sorted(placed) == sorted(said) or (candidate.shape.stages == 1 and not said)


def _told(
    stages: int,
    cut: str,
    memory_format: str,
    placement: Placement,
    pipeline: Pipeline,
    sync: Sync,
    kernels: Kernels | None,
) -> tuple[object, ...]:
    """What tells a plan from the others of its space."""
    return (
        (stages, cut, memory_format, kernels is not None),
        (placement.replicas, placement.shares, placement.homes, placement.kind if stages > 1 else "linear"),
        [placement.lanes[lane] for lane in placement.lane_of],
        (pipeline.micro_batches, pipeline.schedule, bool(pipeline.recompute), bool(pipeline.offload)),
        (sync.policy, sync.outer, sync.shard_optimizer),
    )


def _placement(candidate: Candidate, evaluator: Evaluator) -> Placement:
    shape, layout = candidate.shape, evaluator.layout(candidate)
    kind = evaluator.space.inputs.by_worker[0][1].kind
    if shape.homes is not None:
        placement = Placement.of_homes(shape.homes, kind)
    else:
        placement = Placement.of_lanes(layout.lane_of, layout.worker_of, shape.placement, shape.replicas, kind)
    return placement.model_copy(update={"shares": evaluator.shares(shape)})


def _partition(evaluator: Evaluator, outcome: Outcome) -> Partition:
    candidate, samples = outcome.candidate, evaluator.samples(outcome.candidate.shape)
    graph = evaluator.space.inputs.profile.timed(candidate.variant, samples)
    stages = plan_stages(graph, candidate.cut.stage_of, stage_speeds(evaluator.space.inputs, candidate.shape))
    if len(stages) == 1:  # it holds everything
        stages = (stages[0].model_copy(update={"units": ()}),)
    times = [stage.ms or 0.0 for stage in stages]
    mean = sum(times) / len(times)
    return Partition(
        stages=stages,
        cut=candidate.cut.name,
        micro_batch=samples,
        balance=max(1.0, round(max(times) / mean, 6)) if mean > 0 else None,
        cut_bytes=sum(stage.cut_bytes or 0 for stage in stages),
    )


def _rules(codec: CodecChoice) -> tuple[SyncRule, ...]:
    """Codec rules for gradients; one codec for all is one rule."""
    if codec.rank < 2:
        return (SyncRule(codec=next(iter(codec.codecs.values()), "none")),)
    policy = exact_rules(codec.codecs.items())
    return tuple(SyncRule(pattern=rule.pattern, codec=format_codec(rule.codec)) for rule in policy.rules)
