"""Proves that a schedule is complete and cannot deadlock, and counts what it holds.

The lists of actions that workers issue follow from the schedule: `lower` cuts them from one total order, so they cannot
deadlock either, also where transfers block both ends until both have come.
"""

from __future__ import annotations

from collections import Counter

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import Action, Kind, Schedule
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.picture import draw_schedule
from hybridpar.schedule.program import LaneRun, dependencies, require_own_lanes
from hybridpar.schedule.simulate import HeldPasses, most_held


def check(schedule: Schedule, layout: Layout) -> HeldPasses:
    """Prove that a schedule computes everything once and cannot deadlock.

    Args:
        schedule: The order of computation.
        layout: Where stages run.

    Returns:
        How many micro-batches stages hold.

    Raises:
        ScheduleError: It does not hold. The text has a picture of the schedule with the cell where it fails.
    """
    _require_complete(schedule, layout)
    run = LaneRun(schedule, layout, dependencies(layout, schedule))
    if run.stuck:
        action, reason = run.why_stuck()
        what = f"schedule {schedule.name!r} deadlocks"
        raise failure(schedule, layout, what, action, reason, "Let one of these actions come earlier.")
    return most_held(schedule, layout)


def _require_complete(schedule: Schedule, layout: Layout) -> None:
    """Every stage has F and B of every micro-batch, once and on its own lane."""
    require_own_lanes(schedule, layout)
    counts = Counter(action for row in schedule.rows for action in row)
    for stage in range(layout.stages):
        for index in range(schedule.micro_batches):
            passes = tuple(kind for kind in _PASSES for _ in range(counts[Action(stage, kind, index)]))
            if passes != _PASSES:
                raise failure(
                    schedule,
                    layout,
                    f"stage {stage} does {' '.join(passes) or 'nothing'} for micro-batch {index}",
                    Action(stage, passes[-1], index) if passes else None,
                    "A stage does F and B of every micro-batch, each once.",
                    "Add what is missing, and take out what is too much.",
                )


_PASSES = (Kind.FORWARD, Kind.BACKWARD)


def failure(schedule: Schedule, layout: Layout, what: str, cell: Action | None, reason: str, fix: str) -> ScheduleError:
    """An error with the picture of the schedule and the cell where it fails."""
    return ScheduleError(what, f"{reason}\n{draw_schedule(schedule, layout, mark=cell, note='here')}", fix)
