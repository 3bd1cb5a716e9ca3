"""Schedule `greedy`: an order built for the measured times and link.

No rule for building an order is best everywhere, and the fixed schedules are hard to beat where they fit. So all are
made, the simulator times each, and the fastest is taken: by the same times it is never slower than a fixed one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import Action, Kind, Schedule
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules.base import SCHEDULES, ScheduleRequest, register_schedule
from hybridpar.schedule.schedules.list_scheduler import ListScheduler, Rule
from hybridpar.schedule.simulate import most_held, simulate


@register_schedule(
    "greedy",
    "made for the measured times and link; never slower than the others (any layout)",
    placements=("linear", "loop", "v"),
    searches=True,
)
def greedy(request: ScheduleRequest) -> Schedule:
    """The fastest of all fixed schedules that fit, and of the orders that list scheduling builds by several rules.

    Of equally fast ones the one that holds least is taken.
    """
    best, least = None, (math.inf, math.inf)
    seen: set[tuple[tuple[Action, ...], ...]] = set()
    for schedule in _candidates(request):
        if schedule.rows in seen:
            continue  # rules often agree
        seen.add(schedule.rows)
        held = most_held(schedule, request.layout, request.costs.saved_bytes)
        time = simulate(lower(schedule, request.layout), request.costs).step_ms
        cost = (round(time, 9), sum(held.worker_bytes) or sum(held.in_flight))
        if cost < least:
            best, least = schedule, cost
    assert best is not None
    return Schedule("greedy", best.rows, best.micro_batches)


def _candidates(request: ScheduleRequest) -> Iterator[Schedule]:
    for rule in RULES:
        yield ListScheduler(request, rule).run("greedy")
    for name in SCHEDULES:
        if name == "greedy":
            continue
        try:
            yield SCHEDULES.get(name)(request)
        except ScheduleError:
            continue  # made for another layout


def _broad(scheduler: ListScheduler, action: Action) -> tuple[Any, ...]:
    """Backward first, then the earliest stage: the lanes behind get work as soon as they can."""
    return (action.kind is Kind.FORWARD, action.stage, action.index)


def _starving(scheduler: ListScheduler, action: Action) -> tuple[Any, ...]:
    """First a forward pass for which a lane with nothing to do waits, then backward, then the latest stage."""
    return (not scheduler.feeds_idle_lane(action), action.kind is Kind.FORWARD, -action.stage, action.index)


def _critical(scheduler: ListScheduler, action: Action) -> tuple[Any, ...]:
    """What has the most behind it: the rest of its micro-batch's path, and the micro-batches that follow."""
    rest = scheduler.path_ms[action.kind, action.stage] - scheduler.period_ms * (action.index or 0)
    return (-rest, action.stage)


RULES: tuple[Rule, ...] = (_broad, _starving, _critical)
