"""Predicts the time of a step from measurements.

Computation comes from the profile of the stages, where each ran without the others. Transfers, sums of gradients, the
optimizer and the agreement of the workers depend on the machine under load, so they come from the first steps of the
run itself. The simulator then predicts how these overlap. Predictions are compared with later steps, not with those
they were taken from.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import RECEIVES, Action, Kind
from hybridpar.schedule.costs import BucketCost, Costs, Link
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import Program, lower
from hybridpar.schedule.resources import Machine
from hybridpar.schedule.spans import Span, StepSpans

if TYPE_CHECKING:
    from hybridpar.pipeline.engine import PipelineEngine

#: One step as all workers ran it: by rank, origins on one clock.
StepOfAll = Mapping[int, StepSpans]


@dataclass(frozen=True)
class StageFacts:
    """What its own worker knows of a stage.

    Attributes:
        bucket_bytes: Size of every gradient bucket; empty where nothing is synchronised.
        saved_bytes: What a forward pass keeps for the backward pass of one micro-batch.
    """

    bucket_bytes: tuple[int, ...] = ()
    saved_bytes: int = 0


def gather_facts(pipeline: PipelineEngine) -> tuple[StageFacts, ...]:
    """The facts of all stages, after the first step. A collective; all workers get the result."""
    known = pipeline.borders.first
    mine = {
        index: StageFacts(
            tuple(bucket.bytes for bucket in stage.reducer.buckets) if stage.reducer is not None else (),
            known.saved_bytes[index] if known is not None else 0,
        )
        for index, stage in pipeline.stages.items()
    }
    merged: dict[int, StageFacts] = {}
    for answer in pipeline.world.gather(mine):
        assert isinstance(answer, dict)
        merged |= answer
    return tuple(merged[index] for index in sorted(merged))


def whole_program(program: Program, facts: Sequence[StageFacts]) -> Program:
    """A program with the sums of all stages; that of a worker has only those of its own."""
    return lower(program.schedule, program.layout, [len(one.bucket_bytes) for one in facts])


def fit_link(samples: Iterable[tuple[float, float]]) -> Link:
    """The link on which transfers take the times that were measured.

    A line through the medians of every size, by least squares, with neither latency nor speed below zero. Transfers of
    a single size say nothing about latency: it is then a part of the speed.
    """
    by_size: dict[float, list[float]] = defaultdict(list)
    for size, ms in samples:
        if size > 0:
            by_size[size].append(ms)
    points = [(size, statistics.median(times)) for size, times in sorted(by_size.items())]
    if not points:
        return Link()
    slope, latency = _line(points)
    if latency < 0:
        latency = 0.0
        slope = sum(size * ms for size, ms in points) / sum(size * size for size, _ in points)
    elif slope < 0:
        slope, latency = 0.0, statistics.mean(ms for _, ms in points)
    return Link(latency, 1e3 / slope if slope > 0 else None)


def predicted_costs(
    program: Program,
    facts: Sequence[StageFacts],
    *,
    forward_ms: Sequence[float] | None = None,
    backward_ms: Sequence[float] | None = None,
    steps: Sequence[StepOfAll] = (),
    layout: Layout,
    sync_lanes: int = 1,
    commit: bool = True,
    cores: float | None = None,
) -> Costs:
    """Costs for `simulate`, from a profile and from steps that ran."""
    observed = _Observed(program, steps, layout)
    stages = range(program.layout.stages)
    return Costs(
        forward_ms=_profile(forward_ms, observed, Kind.FORWARD, stages),
        backward_ms=_profile(backward_ms, observed, Kind.BACKWARD, stages),
        step_ms=observed.all_compute_ms(Kind.STEP, stages),
        saved_bytes=tuple(one.saved_bytes for one in facts),
        link=fit_link(observed.transfers()),
        cores=cores,
        buckets=tuple(
            tuple(
                BucketCost(size, observed.ready(Action(stage, Kind.SYNC, bucket)))
                for bucket, size in enumerate(one.bucket_bytes)
            )
            for stage, one in enumerate(facts)
        ),
        replicas=layout.replicas,
        sync_link=fit_link(observed.sums(facts)),
        sync_lanes=sync_lanes,
        commit=commit,
        control_ms=observed.control_ms() if commit else 0.0,
    )


class _Observed:
    """What steps that ran tell of costs. Times are seconds on one clock in here, results are milliseconds."""

    def __init__(self, program: Program, steps: Sequence[StepOfAll], layout: Layout) -> None:
        self._program = program
        self._layout = layout
        #: Per step and rank: when every action started and ended.
        self._steps: list[dict[int, dict[Action, tuple[float, float]]]] = [
            {rank: {span.action: _absolute(one, span) for span in one.spans} for rank, one in step.items()}
            for step in steps
        ]

    def compute_ms(self, kind: Kind, stage: int) -> float | None:
        """Median time of a stage's passes, or of its optimizer; None where it has none."""
        times = [
            1e3 * (end - start)
            for step in self._steps
            for spans in step.values()
            for action, (start, end) in spans.items()
            if action.kind is kind and action.stage == stage
        ]
        return statistics.median(times) if times else None

    def all_compute_ms(self, kind: Kind, stages: Iterable[int]) -> tuple[float, ...] | None:
        """The same for all stages; None where any of them has none."""
        times = [self.compute_ms(kind, stage) for stage in stages]
        known = tuple(time for time in times if time is not None)
        return known if len(known) == len(times) else None

    def transfers(self) -> list[tuple[float, float]]:
        """Bytes and milliseconds of every transfer, from when both ends had come to it."""
        machine = Machine(self._program.layout, Costs((), ()))
        samples = []
        for step in self._steps:
            for rank, spans in step.items():
                for receive, (came, end) in spans.items():
                    if receive.kind not in RECEIVES:
                        continue
                    (send,) = self._program.needs[receive]
                    peer = self._layout.rows[self._layout.replica_of(rank)][send.stage][0]
                    sent = step.get(peer, {}).get(send)
                    if sent is not None:
                        samples.append((float(machine.transfer_bytes(send)), 1e3 * max(0.0, end - max(came, sent[0]))))
        return samples

    def sums(self, facts: Sequence[StageFacts]) -> list[tuple[float, float]]:
        """Bytes that each replica sent and milliseconds of every sum, from when the last replica had come to it."""
        factor = Costs((), (), replicas=self._layout.replicas).sync_factor
        samples = []
        for step in self._steps:
            joined: dict[Action, list[tuple[float, float]]] = defaultdict(list)
            for spans in step.values():
                for action, times in spans.items():
                    if action.kind is Kind.SYNC:
                        joined[action].append(times)
            for action, all_times in joined.items():
                sizes = facts[action.stage].bucket_bytes
                if action.index is not None and action.index < len(sizes):
                    ms = 1e3 * (max(end for _, end in all_times) - max(start for start, _ in all_times))
                    samples.append((factor * sizes[action.index], ms))
        return samples

    def ready(self, sync: Action) -> float:
        """When a bucket is ready at the latest, as a fraction of the last backward pass of its stage."""
        fractions = []
        for backward in self._program.needs.get(sync, ()):  # the last backward pass of the stage, and nothing else
            for spans in (spans for step in self._steps for spans in step.values()):
                if sync in spans and backward in spans:
                    start, end = spans[backward]
                    if end > start:
                        fractions.append((spans[sync][0] - start) / (end - start))
        return min(1.0, max(0.0, min(fractions))) if fractions else 1.0

    def control_ms(self) -> float:
        """Median time from the last thing that optimizers wait for to the first optimizer."""
        gaps = []
        for step in self._steps:
            everything = [item for spans in step.values() for item in spans.items()]
            ends = [end for action, (_, end) in everything if action.kind is not Kind.STEP]
            starts = [start for action, (start, _) in everything if action.kind is Kind.STEP]
            if ends and starts:
                gaps.append(1e3 * max(0.0, min(starts) - max(ends)))
        return statistics.median(gaps) if gaps else 0.0


def _profile(
    given: Sequence[float] | None, observed: _Observed, kind: Kind, stages: Sequence[int]
) -> tuple[float, ...]:
    if given is not None:
        return tuple(given)
    found = [observed.compute_ms(kind, stage) for stage in stages]
    known = tuple(time for time in found if time is not None)
    if len(known) < len(found):
        raise ScheduleError(
            f"nothing says how long stage {found.index(None)} takes ({kind.value})",
            "A prediction needs a profile of every stage, or a step in which all stages ran.",
            "Give forward_ms and backward_ms, or steps.",
        )
    return known


def _absolute(step: StepSpans, span: Span) -> tuple[float, float]:
    return step.origin + span.start_ms / 1e3, step.origin + span.end_ms / 1e3


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the line through points, by least squares; through the origin where there is one size."""
    if len(points) == 1:
        return points[0][1] / points[0][0], 0.0
    line = statistics.linear_regression([size for size, _ in points], [ms for _, ms in points])
    return line.slope, line.intercept
