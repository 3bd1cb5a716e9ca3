"""Counts the memory that the device of each worker needs for a plan.

A worker has of its own stages parameters, gradients, optimizer state, moving averages and, where they are exchanged,
the buckets that gradients are copied into and with a codec residuals; to that come the activations that wait, and of
stages that compute theirs again those of one pass of each lane, of those whose activations wait in the host's memory
those of three. Where replicas divide the optimizer's state, each has its part, and in place of activations what is
handed round after a step. A pass works in some tensors of its own, and adds gradients of one parameter after the other
to those of the micro-batches before. On a CPU a process grows by what libraries need, and has weights of a layer in the
form in which they compute, and a part of what workers share, or what arrives over sockets: gradients that a host's
workers add in shared memory are there in place of their own. Where workers of a pipeline hold the whole model, the
first one gathers the optimizer state of all for a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridpar.planner.costs import CandidateCosts
from hybridpar.planner.cuts import StageFigures
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.network import stage_buckets
from hybridpar.planner.space import Candidate
from hybridpar.schedule.layout import Layout
from hybridpar.sync.shards import CHUNK_BYTES as HANDED_BYTES

#: What a process on a CPU grows by in its first steps, whatever the model is: threads, code that libraries compile, and
#: holes in a heap that planning has used.
PROCESS_BYTES = 32 << 20
#: How many of its largest tensor a pass needs beside what it keeps: the gradients with respect to input and output.
#: On a CPU both again, in the layout in which a library computes, or as holes that the allocator is left with.
_WORKING_TENSORS = {"cuda": 2, "cpu": 4}
#: How many of its largest parameter a pass needs on a CPU: weights, and in channels_last also the gradient, in the
#: layout in which a library computes, and holes of that size.
_WORKING_WEIGHTS = {"contiguous": 1, "channels_last": 3}


def device_bytes(
    costs: CandidateCosts, candidate: Candidate, saved: Sequence[int], replica: int = 0
) -> list[tuple[float, float]]:
    """The bytes that the device of every worker of a replica needs, with the margin, and those that it has.

    `saved` is what the schedule keeps at its peak for backward passes.
    """
    inputs, job, count, sharded = costs.inputs, candidate.layout, candidate.micro_batches, candidate.sharded
    layout, figures = costs.layout(candidate, replica), costs.figures(candidate, replica)
    hosts, owned = costs.network(job).grouping.hosts, costs.stepped_bytes(candidate)
    gradients = _gradient_bytes(figures, job.replicas, count, inputs.bucket_bytes)
    divided, kind = inputs.optimizer_copies - inputs.averages, inputs.by_worker[0][1].kind
    lasting, stepped, state, buckets = ([0] * layout.workers for _ in range(4))
    again, added, working, weights = ([0] * layout.lanes for _ in range(4))
    model_bytes = figures.model_bytes
    holds_all = (inputs.whole_model or not job.is_equal) and layout.workers > 1
    if holds_all or layout.workers == 1:
        lasting, model_bytes = [inputs.profile.model_bytes] * layout.workers, (0,) * job.stages
    for stage, size in enumerate(figures.parameter_bytes):
        home, lane = layout.home(stage), layout.lane_of[stage]
        state[home] += divided * owned[stage]
        # From one step to the next.
        lasting[home] += model_bytes[stage] + (1 + inputs.averages + (candidate.codec.order > 0)) * size
        if kind != "cpu" or hosts > 1 or candidate.codec.order:  # else workers add them where they share memory
            buckets[home] += gradients[stage] - size  # until they are summed
        working[lane] = max(working[lane], figures.largest_bytes[stage])
        weights[lane] = max(weights[lane], *(4 * parameter.count for parameter in figures.parameters[stage]), 0)
        if count > 1:
            added[lane] = weights[lane]
        # One pass's leave while the next one computes, and others come back.
        beside = min(3, count * len(layout.stages_on(lane))) if candidate.cut.offload else 1
        again[lane] = max(again[lane], beside * figures.again_bytes[stage])
        if sharded:
            stepped[home] = max(stepped[home], (job.replicas + 1) * min(HANDED_BYTES, owned[stage]))
        if candidate.codec.outer is not None:  # weights of the last exchange, and what is sent
            lasting[home] += 2 * size
    held = list(saved)
    copies = _WORKING_WEIGHTS[inputs.profile.memory_format] if kind == "cpu" else 0
    for lane, home in enumerate(layout.worker_of):
        held[home] += again[lane] + _WORKING_TENSORS[kind] * working[lane]
        lasting[home] += added[lane] + copies * weights[lane]
    needs = [
        weights_held + state_held + max(size + copied, handed)
        for weights_held, state_held, size, copied, handed in zip(lasting, state, held, buckets, stepped, strict=True)
    ]
    if kind == "cpu":
        beside = PROCESS_BYTES + (_arriving_bytes(inputs, figures) if hosts > 1 and job.replicas > 1 else 0)
        needs = [need + beside for need in needs]
    if holds_all and not sharded:
        needs[0] = max(needs[0], lasting[0] + divided * sum(figures.parameter_bytes))
    return [
        (inputs.memory_margin * need, limit) for need, limit in zip(needs, _limits(costs, job, replica), strict=True)
    ]


def _arriving_bytes(inputs: PlannerInputs, figures: StageFigures) -> int:
    """Between hosts each lane has memory in which a bucket arrives."""
    buckets = [bucket for parameters in figures.parameters for bucket in stage_buckets(parameters, inputs.bucket_bytes)]
    sizes = sorted((4 * sum(parameter.count for parameter in bucket) for bucket in buckets), reverse=True)
    return sum(sizes[: inputs.sync_lanes])


def _gradient_bytes(figures: StageFigures, replicas: int, micro_batches: int, bucket_bytes: int) -> tuple[int, ...]:
    """For every stage the most that its gradients take.

    Gradients are copied into a bucket that several parameters share, as soon as all of these have theirs: in the
    last micro-batch. Where there is one micro-batch only, so few wait to be copied as a bucket has.
    """
    sizes = []
    for parameters in figures.parameters:
        buckets = stage_buckets(parameters, bucket_bytes) if replicas > 1 else []
        copied = [4 * sum(parameter.count for parameter in bucket) for bucket in buckets if len(bucket) > 1]
        waiting = sum(copied) if micro_batches > 1 else max(copied, default=0)
        sizes.append(4 * sum(parameter.count for parameter in parameters) + waiting)
    return tuple(sizes)


def _limits(costs: CandidateCosts, layout: Layout, replica: int) -> list[float]:
    """The memory of every worker of a replica, of several that are alike of the smallest one."""
    alike = [ranks for ranks, kind in zip(layout.ranks, costs.kinds(layout), strict=True) if kind == replica]
    placed = costs.inputs.by_worker
    return [min(placed[rank][1].memory or math.inf for rank in column) for column in zip(*alike, strict=True)]
