"""Schedule `gpipe`: all forward passes, then all backward passes."""

from __future__ import annotations

from hybridpar.schedule.actions import Schedule
from hybridpar.schedule.schedules.base import (
    ScheduleRequest,
    backwards,
    forwards,
    one_stage_per_lane,
    register_schedule,
)


@register_schedule(
    "gpipe", "all forward passes, then all backward passes; holds every micro-batch", placements=("linear",)
)
def gpipe(request: ScheduleRequest) -> Schedule:
    """All forward passes of a stage, then all its backward passes: M micro-batches in flight on every stage.

    Huang et al., GPipe, NeurIPS 2019. The paper runs the backward passes in reverse; here they run in ascending order,
    so that gradients add up as in one process. With equal stages the time is the same.
    """
    count, stages = request.micro_batches, one_stage_per_lane("gpipe", request.layout, "looped_bfs")
    rows = tuple((*forwards(stage, count), *backwards(stage, count)) for stage in stages)
    return Schedule("gpipe", rows, count)
