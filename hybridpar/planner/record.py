"""Turns the result of a search into a `Plan`, and says whether a plan is still as its search made it."""

from __future__ import annotations

from hybridpar.compress import format_codec
from hybridpar.partition.planning import balance_of, plan_stages
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
from hybridpar.planner.cuts import Cut
from hybridpar.planner.evaluate import Evaluator, Outcome
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
    choice, everything = evaluator.space.codec_choices[candidate.codec], tuple(range(candidate.layout.stages))
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
            rows=_rows(evaluator, candidate),
            link_bytes_per_second=candidate.cut.link_speed,
            micro_batches=candidate.micro_batches,
            recompute=everything if candidate.cut.recompute else (),
            offload=everything if candidate.cut.offload else (),
        ),
        sync=Sync(
            lanes=inputs.sync_lanes,
            bucket_bytes=inputs.bucket_bytes,
            policy=_rules(choice),
            outer=choice.every if choice.every > 1 else None,
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
            memory_bytes=round(outcome.memory_bytes / inputs.memory_margin),
        ),
        inputs=inputs.to_data(),
    )
    return plan.model_copy(update={"checksum": plan.digest})


def candidate_of(plan: Plan, space: Space) -> Candidate | None:
    """The candidate that a plan describes; None where it says what the space does not know."""
    pipeline, sync = plan.pipeline, plan.sync
    inputs, count = space.inputs, len(plan.partition.stages)
    assert pipeline is not None
    stage_of = {unit: stage for stage, section in enumerate(plan.partition.stages) for unit in section.units}
    units = [unit.name for unit in inputs.profile.graph.units]
    form = (plan.measured or Measured()).memory_format, plan.kernels is not None
    variants = [(one.memory_format, one.kernels != "stock") for one in inputs.profile.variants]
    codecs = [(_rules(one), one.every if one.every > 1 else None) for one in space.codec_choices]
    wanted = (sync.policy, sync.outer) if sync is not None else None
    if form not in variants or wanted not in codecs or (count > 1 and not stage_of.keys() >= set(units)):
        return None
    cut = Cut(
        plan.partition.cut,
        tuple(stage_of.get(unit, 0) for unit in units),
        *(pipeline.link_bytes_per_second, bool(pipeline.recompute), bool(pipeline.offload)),
    )
    sharded = sync is not None and sync.shard_optimizer
    way = codecs.index(wanted), variants.index(form)
    return Candidate(plan.layout, pipeline.micro_batches, cut, pipeline.schedule, *way, sharded)


def _rows(evaluator: Evaluator, candidate: Candidate) -> tuple[tuple[str, ...], ...]:
    """The passes of every lane, for each replica that differs from others; none of a model that is not cut."""
    kinds = candidate.layout.kinds if candidate.layout.stages > 1 else ()
    return tuple(tuple(evaluator.schedule(candidate, replica).to_csv().splitlines()) for replica in kinds)


def _partition(evaluator: Evaluator, outcome: Outcome) -> Partition:
    candidate = outcome.candidate
    samples = evaluator.samples(candidate.layout, candidate.micro_batches)
    graph = evaluator.space.inputs.profile.timed(candidate.variant, samples)
    stages = plan_stages(graph, candidate.cut.stage_of, stage_speeds(evaluator.space.inputs, candidate.layout))
    if len(stages) == 1:  # it holds everything
        stages = (stages[0].model_copy(update={"units": ()}),)
    return Partition(
        stages=stages,
        cut=candidate.cut.name,
        micro_batch=samples,
        balance=balance_of(stages),
        cut_bytes=sum(stage.cut_bytes or 0 for stage in stages),
        edges=evaluator.figures(candidate).edges,
    )


def _rules(codec: CodecChoice) -> tuple[SyncRule, ...]:
    """Codec rules for gradients."""
    return tuple(SyncRule(pattern=rule.pattern, codec=format_codec(rule.codec)) for rule in codec.policy.rules)
