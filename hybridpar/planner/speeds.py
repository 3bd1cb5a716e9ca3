"""How fast the workers, stages and replicas of a shape are, where the devices of a cluster differ in speed or memory.

Speeds are throughputs: over that of the device of the profile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from hybridpar.planner.cuts import StageDevice
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.schedule.actions import Shape
from hybridpar.schedule.shares import WorkCost, best_division, longest_time

#: What a pass takes at least, so that what it keeps is kept for some time; and a sample.
LEAST_MS = 1e-6


def worker_speeds(inputs: PlannerInputs, shape: Shape) -> tuple[float, ...]:
    """For every worker of a replica the throughput that its stages are cut for.

    Of several replicas the slowest worker counts, as all have the same stages. Where replicas may take shares of
    a batch instead, and do more so, stages are cut for equal workers, as fast as the slowest of all.
    """
    rows = [
        [host.throughput for _, host in inputs.by_worker[first : first + shape.replicas]]
        for first in range(0, shape.workers, shape.replicas)
    ]
    least = tuple(map(min, rows))
    alike = (min(least),) * shape.positions
    if inputs.profile.batch_norm:
        return least
    done = [sum(paces(list(zip(*rows, strict=True)), speeds)) for speeds in (least, alike)]
    return alike if done[1] > done[0] * (1 + 1e-9) else least


def paces(rows: Sequence[Sequence[float]], speeds: Sequence[float]) -> list[float]:
    """How fast replicas are whose stages were cut for workers of certain speeds, as throughputs of a worker."""
    if len(set(speeds)) == 1:
        return [min(row) for row in rows]
    mean = sum(speeds) / len(speeds)
    return [mean * min(own / planned for own, planned in zip(row, speeds, strict=True)) for row in rows]


def worker_kinds(inputs: PlannerInputs, shape: Shape) -> list[tuple[float, float]]:
    """For every worker of a replica the throughput that is counted on, and the memory, of the smallest one."""
    placed = inputs.by_worker
    sizes = [
        min(math.inf if host.memory is None else float(host.memory) for _, host in placed[first:last])
        for first, last in pairwise(range(0, shape.workers + 1, shape.replicas))
    ]
    return list(zip(worker_speeds(inputs, shape), sizes, strict=True))


def stage_devices(inputs: PlannerInputs, shape: Shape) -> tuple[StageDevice, ...]:
    """Of every stage what device its cut is for; empty where a replica's devices are alike."""
    if shape.positions == 1 or shape.homes is not None:
        return ()
    kinds = worker_kinds(inputs, shape)
    if len(set(kinds)) == 1:
        return ()
    slowest, smallest = (min(column) for column in zip(*kinds, strict=True))
    layout = shape.layout()
    own = [kinds[layout.home(stage)] for stage in range(shape.stages)]
    return tuple(
        StageDevice(speed / slowest, memory / smallest if math.isfinite(smallest) else 1.0) for speed, memory in own
    )


def stage_speeds(inputs: PlannerInputs, shape: Shape) -> tuple[float, ...]:
    """For every stage the speed of its device over that of the fastest one; all 1 where they are alike."""
    speeds = [one.speed for one in stage_devices(inputs, shape)] or [1.0] * shape.stages
    return tuple(speed / max(speeds) for speed in speeds)


def replica_speeds(inputs: PlannerInputs, shape: Shape) -> list[float]:
    """Of each replica the throughput, as that of one of its workers."""
    placed = inputs.by_worker
    rows = [[placed[rank][1].throughput for rank in shape.ranks(each)] for each in range(shape.replicas)]
    return [min(row) for row in rows] if shape.homes is not None else paces(rows, worker_speeds(inputs, shape))


def stage_throughputs(
    inputs: PlannerInputs, shape: Shape, shares: tuple[float, ...] | None, coded: bool | None, replica: int
) -> tuple[float, ...]:
    """Of the device of every stage, in the slowest replica. Workers of one host may slow each other down.

    With shares replicas take equally long, as many devices of one speed in between would with equal parts.
    """
    placed, profile = inputs.by_worker, inputs.profile
    beside = max(Counter(host for host, _ in placed[: shape.workers]).values())
    slower = profile.crowding(beside) * (profile.slowing(coded) if shape.workers > 1 else 1.0)
    if shape.homes is not None:
        return tuple(placed[rank][1].throughput / slower for rank in shape.homes[replica])
    speeds, layout = worker_speeds(inputs, shape), shape.layout()
    own = [speeds[layout.home(stage)] for stage in range(shape.stages)]
    if shares is None:
        return tuple(speed / slower for speed in own)
    fixed, sample = _work(inputs, shape)
    equal = fixed + sample * inputs.batch / shape.replicas
    whole = equal / longest_time(_work_of_replicas(inputs, shape), shares) / slower
    mean = sum(speeds) / len(speeds)
    return tuple(whole * (speed / mean) for speed in own)


def shares_by_speed(inputs: PlannerInputs, shape: Shape) -> tuple[float, ...] | None:
    """Samples of each replica, all of which have equal numbers of workers; None where they are equally fast."""
    if len(set(replica_speeds(inputs, shape))) == 1:
        return None
    return tuple(round(part, 2) for part in best_division(_work_of_replicas(inputs, shape), inputs.batch))


def _work_of_replicas(inputs: PlannerInputs, shape: Shape) -> list[WorkCost]:
    fixed, sample = _work(inputs, shape)
    return [WorkCost(fixed / speed, sample / speed) for speed in replica_speeds(inputs, shape)]


def _work(inputs: PlannerInputs, shape: Shape) -> WorkCost:
    """What a step takes the device of the profile, whatever its samples are, and for each of them."""
    profile, count = inputs.profile, shape.micro_batches
    samples = inputs.batch / (shape.replicas * count)
    whole, half = (sum(map(sum, profile.variants[0].unit_ms(part * samples))) for part in (1.0, 0.5))
    sample = max((whole - half) / (0.5 * samples), LEAST_MS)
    return WorkCost(count * max(0.0, whole - sample * samples) + (profile.update_ms or 0.0), sample)
