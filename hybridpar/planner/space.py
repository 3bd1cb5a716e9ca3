"""The candidates of a search, as a list that can be written down.

The space is: workers used x replicas x stages x placement x micro-batches x schedule x cut x codecs.
It always holds plain data parallelism, one device, and no compression.

`exact` asks for the same result. A layer that normalises over the micro-batch makes its size part of the result; so for
a model with BatchNorm only plans are candidates whose micro-batches are those of plain data parallelism over all
workers: replicas x micro-batches equals the number of workers. For other models the number is free. Where none of these
plans fits into memory, looser fidelities also allow more and smaller micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import truediv
from typing import Any

from hybridpar.planner.codecs import PLAIN, CodecChoice, codec_choices
from hybridpar.planner.cuts import Cut, CutLibrary, StageDevice
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.schedule.layout import Layout, PlacementKind
from hybridpar.schedule.schedules import SCHEDULES, planned_schedules

#: Most forward passes of a step that are simulated, where their number is not decided, and for which a schedule that
#: simulates several orders is tried: beyond, that takes longer than it can gain.
MOST_PASSES = 128

#: Schedules that were never the best of all plans that were measured (benchmarks/planner), though `greedy` takes their
#: orders into account; tried where they are asked for, and where there are too many passes for `greedy`.
NEVER_BEST = ("gpipe", "interleaved", "looped_bfs")

#: What a pass takes at least, so that what it keeps is kept for some time; and a sample.
LEAST_MS = 1e-6


@dataclass(frozen=True)
class Candidate:
    """One plan of the space.

    Attributes:
        layout: Where stages run.
        micro_batches: Per replica and step.
        cut: How the model is cut.
        schedule: Name of the schedule.
        codec: What gradients are sent as.
        sharded: Replicas divide the optimizer's state among each other.
    """

    layout: Layout
    micro_batches: int
    cut: Cut
    schedule: str
    codec: CodecChoice = PLAIN
    sharded: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is data parallelism, or one device, with gradients as they are."""
        return self.layout.stages == 1 and self.codec.order == 0

    @property
    def saving(self) -> list[str]:
        """How it takes less memory, in words; empty where it does nothing for that."""
        return ([self.cut.saving] if self.cut.saving else []) + ["optimizer divided"] * self.sharded

    @property
    def simplicity(self) -> tuple[Any, ...]:
        """Plans that are equally fast are taken in this order: fewer things that differ from plain training first."""
        layout = self.layout
        tried = ("accumulate", *planned_schedules(layout.kind))
        return (
            self.cut.recompute or self.cut.offload,
            self.sharded,
            layout.stages,
            self.codec.order,
            layout.workers,
            self.micro_batches,
            tried.index(self.schedule),
            not layout.is_usual,
            layout.rows,
            self.cut.name,
        )


class Space:
    """All candidates of a search, as far as nothing of them is decided (`PlannerInputs.fixed`)."""

    def __init__(self, inputs: PlannerInputs, workers: int | None = None, library: CutLibrary | None = None) -> None:
        self.inputs = inputs
        self.workers = inputs.workers if workers is None else workers
        self.codec_choices = codec_choices(inputs)
        self.library = library or CutLibrary(inputs.profile)

    def candidates(self, saving: bool = False) -> Iterator[Candidate]:
        """All of them, in an order that does not change."""
        fixed = self.inputs.fixed
        for layout, count in self.layouts(saving):
            many = layout.stages > 1 and layout.stages * count > MOST_PASSES and fixed.micro_batches is None
            if many or (cut := self.cut(layout)) is None:
                continue
            sharded = bool(fixed.shard_optimizer) and layout.replicas > 1
            for schedule in self._schedules(layout, count):
                for codec in self._codecs(layout):
                    candidate = Candidate(layout, count, cut, schedule, codec, sharded)
                    yield from self._saving(candidate) if saving else [candidate]

    def _codecs(self, layout: Layout) -> Sequence[CodecChoice]:
        choices = self.codec_choices
        if layout.replicas == 1:
            return choices[:1]
        if self.inputs.fixed.codecs is not None:
            return choices[-1:]
        # In an outer loop replicas are whole models on hosts of their own, all of them.
        hosts = [host for host, _ in self.inputs.by_worker[: layout.workers]]
        may_part = layout.stages == 1 and layout.replicas == self.workers and len(set(hosts)) == len(hosts)
        return [choice for choice in choices if choice.outer is None or may_part]

    def _saving(self, candidate: Candidate) -> Iterator[Candidate]:
        """Ways in which a plan takes less memory."""
        layout, inputs, cut = candidate.layout, self.inputs, candidate.cut
        may_shard = inputs.fixed.shard_optimizer is None and layout.replicas > 1 and layout.is_equal
        # Handing parameters round takes a group of its own from gradients, of which one is left.
        may_shard = may_shard and (layout.stages > 1 or inputs.sync_lanes > 1)
        if may_shard:
            yield replace(candidate, sharded=True)
        if candidate.micro_batches not in self.micro_batch_counts(layout.replicas):
            yield candidate
        if layout.stages > 1:
            cuts = [] if inputs.profile.counts else [replace(cut, recompute=True)]
            if all(host.host_link is not None for _, host in inputs.by_worker[: layout.workers]):
                cuts.append(replace(cut, offload=True))
            for changed in cuts:
                for sharded in {candidate.sharded, candidate.sharded or may_shard}:
                    yield replace(candidate, cut=changed, sharded=sharded)

    def cut(self, layout: Layout) -> Cut | None:
        """How the model is cut for a layout, and the link of the cluster; None where it cannot be."""
        link = self.inputs.cluster.outer
        speed = link.bandwidth if link is not None and layout.positions > 1 else None
        return self.library.balanced(layout.stages, stage_devices(self.inputs, layout), speed)

    def smallest_cut(self, layout: Layout) -> Cut | None:
        """The cut to try where that one does not fit into memory."""
        return self.library.smallest(layout.stages, stage_devices(self.inputs, layout))

    def layouts(self, saving: bool = False) -> Iterator[tuple[Layout, int]]:
        """All layouts, each with the micro-batches of a replica."""
        most = min(self.inputs.most_stages, len(self.inputs.profile.graph))
        for workers in self._worker_counts():
            for positions in (count for count in range(1, min(workers, most) + 1) if workers % count == 0):
                replicas = workers // positions
                for stages, kind in self._placements(positions, most, saving):
                    layout = Layout.dealt(stages, positions, kind, workers=positions, replicas=replicas)
                    for count in self.micro_batch_counts(replicas, saving):
                        if _is_decided_layout(self.inputs.fixed, layout, count):
                            yield layout, count
            yield from self._unequal_layouts(workers, most)

    def _unequal_layouts(self, workers: int, most: int) -> Iterator[tuple[Layout, int]]:
        """Replicas of few fast devices beside replicas of more slow ones, or of ones with less memory.

        The workers are divided where devices differ. Each side has replicas of its own number of workers, and the
        stages are those of the side with more.
        """
        if self.inputs.fixed.equal or self.inputs.fixed.shard_optimizer:
            return
        placed = [host for _, host in self.inputs.by_worker[:workers]]
        for first in range(1, workers):
            if placed[first] == placed[first - 1]:
                continue
            for few, many in self._sides(first, workers - first, most):
                stages = max(few, many)
                layout = Layout.unequal(
                    tuple(rank for rank in range(start, start + size) for _ in range(stages // size))
                    for size, begin, end in ((few, 0, first), (many, first, workers))
                    for start in range(begin, end, size)
                )
                for count in self.micro_batch_counts(layout.replicas):
                    if self.inputs.fixed.placement is None and _is_decided_layout(self.inputs.fixed, layout, count):
                        yield layout, count

    def _sides(self, first: int, rest: int, most: int) -> Iterator[tuple[int, int]]:
        """Numbers of workers of a replica on both sides, one a multiple of the other."""
        for few in (size for size in range(1, min(first, most) + 1) if first % size == 0):
            for many in (size for size in range(1, min(rest, most) + 1) if rest % size == 0):
                if few != many and max(few, many) % min(few, many) == 0:
                    yield few, many

    def micro_batch_counts(self, replicas: int, saving: bool = False) -> list[int]:
        """Numbers of micro-batches to try; the first is the plain one.

        Where layers normalise over them, only a looser fidelity and the need to save memory allow more than that.
        """
        inputs = self.inputs
        if inputs.fixed.micro_batches is not None:
            return [inputs.fixed.micro_batches]
        if inputs.profile.batch_norm:
            counts = [self.workers // replicas] if self.workers % replicas == 0 else []
            if not counts or not saving or inputs.fidelity == "exact":
                return counts
            most = inputs.batch // (2 * replicas)  # two samples each
        else:
            counts, most = [1], min(inputs.most_micro_batches, max(1, inputs.batch // replicas))
        while counts[-1] * 2 <= most:
            counts.append(counts[-1] * 2)
        return counts

    def _worker_counts(self) -> list[int]:
        """Workers that may be used: up to 8, powers of two, all, and all that are no slower than some kind of host."""
        most, placed = self.workers, self.inputs.by_worker[: self.workers]
        few = set(range(1, min(most, 8) + 1))
        powers = {1 << power for power in range(most.bit_length())}
        slower = {at for at in range(1, most) if placed[at][1].throughput < placed[at - 1][1].throughput}
        return sorted(few | powers | slower | {most})

    def _placements(self, positions: int, most: int, saving: bool) -> Iterator[tuple[int, PlacementKind]]:
        """Stages and kind of placement that so many workers of a replica may have."""
        yield positions, "linear"
        if positions > 1 and 2 * positions <= most:
            if self.inputs.fixed.placement == "loop" or self.inputs.fixed.schedule in NEVER_BEST:
                yield 2 * positions, "loop"  # never the best either
            yield 2 * positions, "v"
        for stages in (2, 4, 8, 16) if positions == 1 and saving else ():
            if stages <= most:
                yield stages, "loop"

    def _schedules(self, layout: Layout, count: int) -> tuple[str, ...]:
        if layout.stages == 1:
            return ("accumulate",)
        few, asked = layout.stages * count <= MOST_PASSES, self.inputs.fixed.schedule
        tried = [name for name in planned_schedules(layout.kind) if few or not SCHEDULES.get(name).searches]
        best = [name for name in tried if name not in NEVER_BEST] or tried
        return tuple(best if asked is None else (name for name in tried if name == asked))


def _is_decided_layout(fixed: Fixed, layout: Layout, count: int) -> bool:
    """Whether a layout is one of those that were decided on; without stages there is one placement."""
    decided = (
        (fixed.workers, layout.workers),
        (fixed.stages, layout.stages),
        (fixed.replicas, layout.replicas),
        (fixed.micro_batches, count),
        (fixed.placement if layout.stages > 1 else None, layout.kind),
    )
    acts = (layout.replicas > 1 or not fixed.exchanged) and (layout.stages > 1 or not fixed.staged)
    return acts and all(value is None or value == value_here for value, value_here in decided)


# Speeds are throughputs: over that of the device of the profile.


def worker_speeds(inputs: PlannerInputs, layout: Layout) -> tuple[float, ...]:
    """For every worker of a replica the throughput that its stages are cut for.

    Of several replicas the slowest worker counts, as all have the same stages. Where replicas may take shares of
    a batch instead, and do more so, stages are cut for equal workers, as fast as the slowest of all.
    """
    rows = [[inputs.by_worker[rank][1].throughput for rank in ranks] for ranks in layout.ranks]
    least = tuple(map(min, zip(*rows, strict=True)))
    # How much work replicas do together, each as fast as its worker with the most to do.
    mean = sum(least) / len(least)
    by_speed = sum(mean * min(map(truediv, row, least)) for row in rows)
    equally = sum(map(min, rows))
    if inputs.profile.batch_norm or equally <= by_speed * (1 + 1e-9):
        return least
    return (min(least),) * layout.positions


def stage_devices(inputs: PlannerInputs, layout: Layout) -> tuple[StageDevice, ...]:
    """Of every stage what device its cut is for; empty where a replica's devices are alike."""
    if layout.positions == 1 or not layout.is_equal:
        return ()
    # Of every position the memory of the smallest worker.
    columns = zip(*layout.ranks, strict=True)
    sizes = [min(float(inputs.by_worker[rank][1].memory or math.inf) for rank in column) for column in columns]
    kinds = list(zip(worker_speeds(inputs, layout), sizes, strict=True))
    if len(set(kinds)) == 1:
        return ()
    slowest, smallest = (min(column) for column in zip(*kinds, strict=True))
    stage_kinds = [kinds[layout.home(stage)] for stage in range(layout.stages)]
    return tuple(
        StageDevice(speed / slowest, memory / smallest if math.isfinite(smallest) else 1.0)
        for speed, memory in stage_kinds
    )


def stage_speeds(inputs: PlannerInputs, layout: Layout) -> tuple[float, ...]:
    """For every stage the speed of its device over that of the fastest one; all 1 where they are alike."""
    speeds = [device.speed for device in stage_devices(inputs, layout)] or [1.0] * layout.stages
    return tuple(speed / max(speeds) for speed in speeds)
