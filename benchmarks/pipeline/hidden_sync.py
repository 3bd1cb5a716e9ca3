"""Measures how much of the gradient synchronisation overlaps with computation in a pipeline with replicas.

Two stages times two replicas: four processes, each in a network namespace of its own, on shaped links, so that a sum of
gradients is wire time and not core time. What is hidden is read from the spans of real steps: the time in which a
stage's gradients are sent while any worker of the step still computes.

What is *hideable* of a stage's sums is what would lie before the end of the last computation of any worker if each
began at once when the last replica had gathered its bucket, or when the sum before it was over. A late start, a wait
for another stage's sums and an idle link all count as not hidden.

The second target is that all of it is hidden, where M = 2 and the larger stage's sums take as long as the last backward
pass of a micro-batch in the other stage. The link's rate is changed until these two times agree in the very steps that
are judged.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.pipeline.methods import Ours, cut_on_main, describe
from benchmarks.rig.checks import Check, check_of, write_checks
from benchmarks.rig.rank import link, process_group
from benchmarks.rig.task import TINY, Setting
from hybridpar.comm.clocks import gather_spans
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.schedule.actions import COMPUTE, Kind
from hybridpar.schedule.spans import Span, StepSpans

#: Where the search for the rate of the second promise begins.
RATE = "1gbit"
#: The two times of the second promise agree when their ratio is in here.
AGREE = (0.9, 1.1)
SETTING, QUICK = Setting("resnet18", 112, 32), Setting(TINY, 16, 16)
HIDEABLE_AT_LEAST, ALL_AT_LEAST = 0.9, 0.8
#: Below this a stage has nothing worth hiding: its only bucket is ready when everything has been computed.
LEAST_MS = 2.0


def measure(quick: bool, rounds: int, output: str | None, micro_batches: int, notes: str, judge: bool) -> None:
    """Measure one setting in this rank, and write rows in rank 0.

    Args:
        quick: A small net and few steps.
        rounds: Steps to judge.
        output: Table to add rows to.
        micro_batches: Micro-batches of a step.
        notes: File for the ratio of the larger stage's sync to the other's last backward pass.
        judge: Judge all of the sync, if that ratio is in `AGREE`; write nothing if it is not.
    """
    setting = QUICK if quick else SETTING
    with process_group() as (rank, _):
        world = World.join(lanes=2)
        plan = cut_on_main(setting, world, micro_batches, replicas=2)
        config = TrainConfig(schedule="1f1b", micro_batches=micro_batches, sync="allreduce:bucket=1")
        ours = Ours(setting, plan, world, config)
        spans: dict[int, StepSpans] = {}
        for number in range(3 + (5 if quick else rounds)):
            ours.step()
            if number >= 3:  # buckets are cut anew after the first step
                assert ours.result is not None
                spans[number] = ours.result.outcome.spans
        steps = gather_spans(world, spans).steps
        ours.close()
        world.close()
    if rank:
        return
    times = [hidden(step) for step in steps.values()]
    sizes = [stage.parameter_bytes or 0 for stage in plan.partition.stages]
    large = max(times[0], key=lambda stage: sizes[stage])
    backward = [last_backward(step, stage=1 - large) for step in steps.values()]
    ratio = statistics.median(step[large][0] / taken for step, taken in zip(times, backward, strict=True))
    Path(notes).write_text(json.dumps({"ratio": ratio}))
    agree = AGREE[0] <= ratio <= AGREE[1]
    if agree or not judge:
        extra = f"sync of stage {large} / last backward pass of stage {1 - large}: {ratio:.2f}"
        words = f"{describe(setting, micro_batches)}, 2 stages x 2 replicas"
        write_checks(_rows(words, times, sizes, extra, agree and judge), output, "pipeline")


def hidden(step: Mapping[int, StepSpans]) -> dict[int, tuple[float, float, float]]:
    """For every stage: milliseconds of its sums, how much was hideable, and how much was hidden.

    A sum is ready when the last of its replicas has gathered the bucket, has begun when the last has come to it, and is
    over when the last has left it.
    """
    spans = [span.shifted(worker.origin * 1e3) for worker in step.values() for span in worker.spans]
    computed = max(span.end_ms for span in spans if span.action.kind in COMPUTE)
    sums: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        if span.action.kind is Kind.SYNC:
            sums.setdefault((span.action.stage, span.action.index or 0), []).append(span)
    result = {}
    for stage in sorted({stage for stage, _ in sums}):
        mine = [both for (owner, _), both in sums.items() if owner == stage]
        times = [(max(span.start_ms for span in both), max(span.end_ms for span in both)) for both in mine]
        ready = [max(span.ready_ms for span in both if span.ready_ms is not None) for both in mine]
        total = _length(times)
        # Sums of several sync lanes overlap: each counts for its part of the time in which any of them ran.
        share = total / sum(end - start for start, end in times)
        best = _one_after_another(ready, [share * (end - start) for start, end in times])
        hideable, done = (_length((start, min(end, computed)) for start, end in which) for which in (best, times))
        result[stage] = (total, hideable, done)
    return result


def last_backward(step: Mapping[int, StepSpans], stage: int) -> float:
    """Milliseconds of the last backward pass of a stage; of the slowest replica."""
    passes = [
        [span for span in worker.spans if span.action.stage == stage and span.action.kind is Kind.BACKWARD]
        for worker in step.values()
    ]
    return max(max(spans, key=lambda span: span.end_ms).duration_ms for spans in passes if spans)


def _one_after_another(ready: Sequence[float], durations: Sequence[float]) -> list[tuple[float, float]]:
    """When sums would run that each begin as soon as they are ready and the one before is over."""
    free, result = float("-inf"), []
    for begin, duration in sorted(zip(ready, durations, strict=True)):
        start = max(begin, free)
        free = start + duration
        result.append((start, free))
    return result


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _rows(
    setting: str, times: list[dict[int, tuple[float, float, float]]], sizes: list[int], ratio: str, judge: bool
) -> list[Check]:
    rows = []
    for stage in times[0]:
        total, hideable, done = (statistics.median(step[stage][part] for step in times) for part in range(3))
        parts = [step[stage][2] / step[stage][1] for step in times if step[stage][1] >= LEAST_MS]
        extra = f"{sizes[stage] / 1e6:.1f} MB, {total:.0f} ms, hideable {hideable:.0f} ms, hidden {done:.0f} ms"
        what = f"hidden of the hideable sync, stage {stage}"
        if parts:
            rows.append(check_of(setting, link(), what, parts, at_least=HIDEABLE_AT_LEAST, extra=extra))
    shares = [sum(done for *_, done in step.values()) / sum(total for total, *_ in step.values()) for step in times]
    at_least = ALL_AT_LEAST if judge else None
    return [*rows, check_of(setting, link(), "hidden of all sync", shares, at_least=at_least, extra=ratio)]
