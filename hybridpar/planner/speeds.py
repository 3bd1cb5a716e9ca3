"""How fast the workers and stages of a layout are, where the devices of a cluster differ in speed or memory.

Speeds are throughputs: over that of the device of the profile.
"""

from __future__ import annotations

import math
from operator import truediv

from hybridpar.planner.cuts import StageDevice
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.schedule.layout import Layout

#: What a pass takes at least, so that what it keeps is kept for some time; and a sample.
LEAST_MS = 1e-6


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


def worker_kinds(inputs: PlannerInputs, layout: Layout) -> list[tuple[float, float]]:
    """For every worker of a replica the throughput that is counted on, and the memory, of the smallest one."""
    placed = inputs.by_worker
    sizes = [
        min(math.inf if (size := placed[rank][1].memory) is None else float(size) for rank in column)
        for column in zip(*layout.ranks, strict=True)
    ]
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
