"""Turns the result of a search into a `Plan`, and finds the candidate of a plan again."""

from __future__ import annotations

import itertools

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
    inputs, shape = evaluator.space.inputs, candidate.shape
    profile, variant = inputs.profile, inputs.profile.variants[candidate.variant]
    link = inputs.cluster.outer
    return Plan(
        model=profile.info,
        partition=_partition(evaluator, outcome),
        placement=_placement(candidate, evaluator),
        pipeline=Pipeline(
            schedule=candidate.schedule,
            micro_batches=shape.micro_batches,
            recompute=tuple(range(shape.stages)) if candidate.cut.recompute else (),
            offload=tuple(range(shape.stages)) if candidate.cut.offload else (),
        ),
        sync=Sync(
            lanes=inputs.sync_lanes,
            bucket_bytes=inputs.bucket_bytes,
            policy=_rules(evaluator.space.codec_choices[candidate.codec]),
            outer=_outer(evaluator.space.codec_choices[candidate.codec]),
            shard_optimizer=candidate.sharded,
        ),
        kernels=Kernels(database="auto") if variant.kernels != "stock" else None,
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


def candidate_of(plan: Plan, evaluator: Evaluator) -> Candidate:
    """The candidate that a plan says, so that it can be predicted again.

    Args:
        plan: The plan, of the space that the evaluator is for.
        evaluator: What predicts.

    Raises:
        PlanError: No candidate of the space is like it.
    """
    said = _said(plan)
    space = evaluator.space
    for candidate in itertools.chain(space.candidates(), space.candidates(saving=True)):
        if _said_by(candidate, evaluator) == said:
            return candidate
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


def _said(plan: Plan) -> tuple[object, ...]:
    """What tells a plan from the others of its space."""
    placement, pipeline, measured, sync = plan.placement, plan.pipeline, plan.measured, plan.sync
    stages = len(plan.partition.stages)
    return (
        stages,
        _placed(placement) if placement is not None else (1, None, None, [(0, 0)]),
        placement.kind if placement is not None and stages > 1 else "linear",
        pipeline.micro_batches if pipeline is not None else 1,
        pipeline.schedule if pipeline is not None else "accumulate",
        plan.partition.strategy,
        measured.memory_format if measured is not None else "contiguous",
        plan.kernels is not None,
        sync.policy if sync is not None else (SyncRule(),),
        sync.outer if sync is not None else None,
        sync is not None and sync.shard_optimizer,
        pipeline is not None and (bool(pipeline.recompute), bool(pipeline.offload)),
    )


def _said_by(candidate: Candidate, evaluator: Evaluator) -> tuple[object, ...]:
    shape, space = candidate.shape, evaluator.space
    variant = space.inputs.profile.variants[candidate.variant]
    return (
        shape.stages,
        _placed(_placement(candidate, evaluator)),
        shape.placement,
        shape.micro_batches,
        candidate.schedule,
        candidate.cut.name,
        variant.memory_format,
        variant.kernels != "stock",
        _rules(space.codec_choices[candidate.codec]),
        _outer(space.codec_choices[candidate.codec]),
        candidate.sharded,
        (candidate.cut.recompute, candidate.cut.offload),
    )


def _placement(candidate: Candidate, evaluator: Evaluator) -> Placement:
    shape, layout = candidate.shape, evaluator.layout(candidate)
    kind = evaluator.space.inputs.by_worker[0][1].kind
    if shape.homes is not None:
        placement = Placement.of_homes(shape.homes, kind)
    else:
        placement = Placement.of_lanes(layout.lane_of, layout.worker_of, shape.placement, shape.replicas, kind)
    return placement.model_copy(update={"shares": evaluator.shares(shape)})


def _placed(placement: Placement) -> tuple[object, ...]:
    """Replicas with their shares, and for every stage its worker and lane."""
    return placement.replicas, placement.shares, placement.homes, [placement.lanes[lane] for lane in placement.lane_of]


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
        strategy=candidate.cut.name,
        micro_batch=samples,
        balance=max(1.0, round(max(times) / mean, 6)) if mean > 0 else None,
        cut_bytes=sum(stage.cut_bytes or 0 for stage in stages),
    )


def _outer(choice: CodecChoice) -> int | None:
    return choice.every if choice.every > 1 else None


def _rules(codec: CodecChoice) -> tuple[SyncRule, ...]:
    """Codec rules for gradients; one codec for all is one rule."""
    if codec.rank < 2:
        return (SyncRule(codec=next(iter(codec.codecs.values()), "none")),)
    policy = exact_rules(codec.codecs.items())
    return tuple(SyncRule(pattern=rule.pattern, codec=format_codec(rule.codec)) for rule in policy.rules)
