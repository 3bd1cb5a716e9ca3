"""Why: gradients that travel while something still computes cost nothing, and that is to be seen, not believed.

Two stages times two replicas: four processes, each in a network namespace of its own, on shaped links, so that a sum of
gradients is wire time and not core time. What is hidden is read from the spans of real steps: the time in which a
stage's gradients travel while any worker of the step still computes.

Time is *hideable* from the moment when a stage's first bucket is ready to the end of the last computation of anyone; a
stage cannot hide more. The second promise is about all of it, where M = 2 and the link is so fast that the larger
stage's gradients take as long as one backward pass of a micro-batch.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.pipeline.methods import Ours
from benchmarks.pipeline.setups import TINY, Setting, cut_on_main, problem
from benchmarks.rig.rank import link, process_group
from hybridpar.pipeline.actions import COMPUTE, Kind
from hybridpar.pipeline.clocks import gather_spans
from hybridpar.pipeline.spans import StepSpans
from hybridpar.pipeline.sync import SyncOptions
from hybridpar.pipeline.world import World

RATE = "1gbit"
SIDE, BATCH = 112, 32
HIDEABLE_AT_LEAST, ALL_AT_LEAST = 0.9, 0.8
#: Below this a stage has nothing worth hiding: its only bucket is ready when everything has been computed.
LEAST_MS = 2.0
_BUCKET = 1 << 20


def measure(
    quick: bool, rounds: int, keep_busy: bool, output: str | None, micro_batches: int, notes: str, matched: bool
) -> None:
    """Measure one setting in this rank; rank 0 writes rows, and to `notes` the rate that matches the larger stage."""
    del keep_busy  # what is hidden is judged within a step
    setting = Setting(TINY, 16, 16, micro_batches) if quick else Setting("resnet18", SIDE, BATCH, micro_batches)
    with process_group() as (rank, _):
        world = World.join(lanes=2)
        plan = cut_on_main(setting, problem(2, 2, micro_batches=micro_batches), world, replicas=2, passes=3)
        ours = Ours(setting, plan, world, "1f1b", sync=SyncOptions(bucket_bytes=_BUCKET))
        spans: dict[int, StepSpans] = {}
        for number in range(3 + (5 if quick else rounds)):
            ours.step()
            if number >= 3:  # buckets are cut anew after the first step
                assert ours.outcome is not None
                spans[number] = ours.outcome.spans
        steps = gather_spans(world, spans).steps
        ours.close()
        world.close()
    if rank:
        return
    found = [hidden(step) for step in steps.values()]
    backward = statistics.median(last_backward(step, stage=0) for step in steps.values())
    sizes = [stage.parameter_bytes or 0 for stage in plan.partition.stages]
    Path(notes).write_text(json.dumps({"mbit": max(1, round(max(sizes) * 8 / backward / 1e3))}))
    write_checks(_rows(setting, found, sizes, backward, matched), output)


def hidden(step: Mapping[int, StepSpans]) -> dict[int, tuple[float, float, float]]:
    """For every stage: milliseconds of its sums, how much was hideable, and how much was hidden.

    A sum has begun when the last of its replicas has come to it, and is over when the last has left it.
    """
    computed = max(
        one.origin * 1e3 + span.end_ms for one in step.values() for span in one.spans if span.action.kind in COMPUTE
    )
    sums: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in step.values():
        for span in one.spans:
            if span.action.kind is Kind.SYNC:
                key = (span.action.stage, span.action.index or 0)
                sums.setdefault(key, []).append((one.origin * 1e3 + span.start_ms, one.origin * 1e3 + span.end_ms))
    result = {}
    for stage in sorted({stage for stage, _ in sums}):
        times = [
            (max(start for start, _ in both), max(end for _, end in both))
            for (owner, _), both in sums.items()
            if owner == stage
        ]
        total = _length(times)
        window = max(0.0, computed - min(start for start, _ in times))
        result[stage] = (total, min(total, window), _length((start, min(end, computed)) for start, end in times))
    return result


def last_backward(step: Mapping[int, StepSpans], stage: int) -> float:
    """Milliseconds of the last backward pass of a stage; of the slowest replica."""
    return max(
        max((span for span in one.spans if span.action.kind is Kind.BACKWARD), key=lambda span: span.end_ms).duration_ms
        for one in step.values()
        if any(span.action.stage == stage and span.action.kind is Kind.BACKWARD for span in one.spans)
    )


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _rows(
    setting: Setting,
    found: list[dict[int, tuple[float, float, float]]],
    sizes: list[int],
    backward: float,
    matched: bool,
) -> list[Check]:
    rows = []
    name = f"{setting}, 2 stages x 2 replicas"
    for stage in found[0]:
        totals, hideable, done = (statistics.median(one[stage][part] for one in found) for part in range(3))
        parts = [one[stage][2] / one[stage][1] for one in found if one[stage][1] >= LEAST_MS]
        extra = f"{sizes[stage] / 1e6:.1f} MB, {totals:.0f} ms, hideable {hideable:.0f} ms, hidden {done:.0f} ms"
        if parts:
            rows.append(
                Check(
                    setting=name,
                    link=link(),
                    what=f"hidden of the hideable sync, stage {stage}",
                    value=statistics.median(parts),
                    low=min(parts),
                    high=max(parts),
                    at_least=HIDEABLE_AT_LEAST,
                    extra=extra,
                )
            )
    whole = [sum(one[stage][2] for stage in one) / sum(one[stage][0] for stage in one) for one in found]
    rows.append(
        Check(
            setting=name,
            link=link(),
            what="hidden of all sync",
            value=statistics.median(whole),
            low=min(whole),
            high=max(whole),
            at_least=ALL_AT_LEAST if matched else None,
            extra=f"last backward pass of stage 0: {backward:.0f} ms",
        )
    )
    return rows
