"""How fast the workers, stages and replicas of a layout are, where the devices of a cluster differ in speed or memory.

Speeds are throughputs: over that of the device of the profile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridpar.planner.cuts import StageDevice
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.shares import WorkCost, best_division, longest_time

#: What a pass takes at least, so that what it keeps is kept for some time; and a sample.
LEAST_MS = 1e-6


def worker_speeds(inputs: PlannerInputs, layout: Layout) -> tuple[float, ...]:
    """For every worker of a replica the throughput that its stages are cut for.

    Of several replicas the slowest worker counts, as all have the same stages. Where replicas may take shares of
    a batch instead, and do more so, stages are cut for equal workers, as fast as the slowest of all.
    """
    rows = [[inputs.by_worker[rank][1].throughput for rank in ranks] for ranks in layout.ranks]
    least = tuple(map(min, zip(*rows, strict=True)))
    alike = (min(least),) * layout.positions
    if inputs.profile.batch_norm:
        return least
    done = [sum(paces(rows, speeds)) for speeds in (least, alike)]
    return alike if done[1] > done[0] * (1 + 1e-9) else least


def paces(rows: Sequence[Sequence[float]], speeds: Sequence[float]) -> list[float]:
    """How fast replicas are whose stages were cut for workers of certain speeds, as throughputs of a worker."""
    if len(set(speeds)) == 1:
        return [min(row) for row in rows]
    mean = sum(speeds) / len(speeds)
    return [mean * min(own / planned for own, planned in zip(row, speeds, strict=True)) for row in rows]


def worker_kinds(inputs: PlannerInputs, layout: Layout) -> list[tuple[float, float]]:
    """For every worker of a replica the throughput that is counted on, and the memory, of the smallest one."""
    placed, columns = inputs.by_worker, zip(*layout.ranks, strict=True)
    sizes = [min(placed[rank][1].memory or math.inf for rank in column) for column in columns]
    return list(zip(worker_speeds(inputs, layout), sizes, strict=True))


def stage_devices(inputs: PlannerInputs, layout: Layout) -> tuple[StageDevice, ...]:
    """Of every stage what device its cut is for; empty where a replica's devices are alike."""
    if layout.positions == 1 or not layout.is_equal:
        return ()
    kinds = worker_kinds(inputs, layout)
    if len(set(kinds)) == 1:
        return ()
    slowest, smallest = (min(column) for column in zip(*kinds, strict=True))
    own = [kinds[layout.home(stage)] for stage in range(layout.stages)]
    return tuple(
        StageDevice(speed / slowest, memory / smallest if math.isfinite(smallest) else 1.0) for speed, memory in own
    )


def stage_speeds(inputs: PlannerInputs, layout: Layout) -> tuple[float, ...]:
    """For every stage the speed of its device over that of the fastest one; all 1 where they are alike."""
    speeds = [one.speed for one in stage_devices(inputs, layout)] or [1.0] * layout.stages
    return tuple(speed / max(speeds) for speed in speeds)


def replica_speeds(inputs: PlannerInputs, layout: Layout) -> list[float]:
    """Of each replica the throughput, as that of one of its workers."""
    placed = inputs.by_worker
    rows = [[placed[rank][1].throughput for rank in ranks] for ranks in layout.ranks]
    return paces(rows, worker_speeds(inputs, layout)) if layout.is_equal else [min(row) for row in rows]


def stage_throughputs(
    inputs: PlannerInputs,
    layout: Layout,
    count: int,
    shares: tuple[float, ...] | None,
    replica: int,
) -> tuple[float, ...]:
    """Of the device of every stage, in the slowest replica.

    With shares replicas take equally long, as many devices of one speed in between would with equal parts.
    """
    if not layout.is_equal:
        return tuple(inputs.by_worker[rank][1].throughput for rank, _ in layout.rows[replica])
    speeds = worker_speeds(inputs, layout)
    own = [speeds[layout.home(stage)] for stage in range(layout.stages)]
    if shares is None:
        return tuple(own)
    fixed, sample = _work(inputs, layout, count)
    equal = fixed + sample * inputs.batch / layout.replicas
    whole = equal / longest_time(_work_of_replicas(inputs, layout, count), shares)
    mean = sum(speeds) / len(speeds)
    return tuple(whole * (speed / mean) for speed in own)


def shares_by_speed(inputs: PlannerInputs, layout: Layout, count: int) -> tuple[float, ...] | None:
    """Samples of each replica, all of which have equal numbers of workers; None where they are equally fast."""
    if len(set(replica_speeds(inputs, layout))) == 1:
        return None
    return tuple(round(part, 2) for part in best_division(_work_of_replicas(inputs, layout, count), inputs.batch))


def _work_of_replicas(inputs: PlannerInputs, layout: Layout, count: int) -> list[WorkCost]:
    fixed, sample = _work(inputs, layout, count)
    return [WorkCost(fixed / speed, sample / speed) for speed in replica_speeds(inputs, layout)]


def _work(inputs: PlannerInputs, layout: Layout, count: int) -> WorkCost:
    """What a step takes the device of the profile, whatever its samples are, and for each of them."""
    profile = inputs.profile
    samples = inputs.batch / (layout.replicas * count)
    whole, half = (sum(map(sum, profile.unit_ms(part * samples))) for part in (1.0, 0.5))
    sample = max((whole - half) / (0.5 * samples), LEAST_MS)
    return WorkCost(count * max(0.0, whole - sample * samples) + (profile.update_ms or 0.0), sample)
