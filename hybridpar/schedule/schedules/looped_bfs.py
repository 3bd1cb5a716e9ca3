"""Schedule `looped_bfs`: GPipe for lanes with any number of stages.

Breadth first also leaves a tensor the longest time between two stages of a lane, so slow links matter least.
"""

from __future__ import annotations

from hybridpar.schedule.actions import Action, Schedule
from hybridpar.schedule.schedules.base import ScheduleRequest, backwards, forwards, register_schedule


@register_schedule(
    "looped_bfs",
    "all micro-batches through one stage of the lane, then through its next (any layout)",
    placements=("loop", "v"),
)
def looped_bfs(request: ScheduleRequest) -> Schedule:
    """All forward passes stage by stage, then all backward passes stage by stage, last stage first.

    Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023 (arXiv:2211.05953). Backward passes of a stage run in
    ascending order of micro-batches. Every stage holds M micro-batches.

    Args:
        request: The layout, the number of micro-batches, and what was measured.
    """
    layout, count = request.layout, request.micro_batches
    rows: list[list[Action]] = [[] for _ in range(layout.lanes)]
    for stage in range(layout.stages):
        rows[layout.lane_of[stage]] += forwards(stage, count)
    for stage in reversed(range(layout.stages)):
        rows[layout.lane_of[stage]] += backwards(stage, count)
    return Schedule("looped_bfs", tuple(tuple(row) for row in rows), count)
