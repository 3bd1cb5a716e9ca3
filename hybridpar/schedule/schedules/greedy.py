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
from hybridpar.schedule.memory import most_held
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules.base import SCHEDULES, ScheduleRequest, backwards, forwards, register_schedule
from hybridpar.schedule.schedules.list_scheduler import ListScheduler, Rule
from hybridpar.schedule.schedules.one_forward_one_backward import in_turns
from hybridpar.schedule.simulate import simulate


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
    if sorted(request.layout.lane_of) == list(range(request.layout.lanes)):
        for factor in (1, 2, 3):
            yield _eager(request, factor)
    for name in SCHEDULES:
        if name == "greedy":
            continue
        try:
            yield SCHEDULES.get(name)(request)
        except ScheduleError:
            continue  # made for another layout


def _eager(request: ScheduleRequest, factor: int) -> Schedule:
    """1F1B with so many times its warm-up; what waits for a slow link then has a substitute.

    The stage that follows never runs further ahead than this one: else both would wait for each other.
    """
    layout, count = request.layout, request.micro_batches
    rows: list[tuple[Action, ...]] = [()] * layout.lanes
    ahead = count
    for stage in range(layout.stages):
        ahead = min(ahead, factor * (layout.stages - 1 - stage))
        rows[layout.lane_of[stage]] = in_turns(forwards(stage, count), backwards(stage, count), ahead)
    return Schedule("greedy", tuple(rows), count)


def _deep(scheduler: ListScheduler, action: Action) -> tuple[Any, ...]:
    """Backward first, then the latest stage: a micro-batch leaves as soon as it can."""
    return (action.kind is Kind.FORWARD, -action.stage, action.index)


def _broad(scheduler: ListScheduler, action: Action) -> tuple[Any, ...]:
    """Backward first, then the earliest stage: the lanes behind get work as soon as they can."""
    return (action.kind is Kind.FORWARD, action.stage, action.index)


def _oldest(scheduler: ListScheduler, action: Action) -> tuple[Any, ...]:
    """Backward first, then the oldest micro-batch."""
    return (action.kind is Kind.FORWARD, action.index, action.stage)


def _starving(scheduler: ListScheduler, action: Action) -> tuple[Any, ...]:
    """First a forward pass for which a lane with nothing to do waits, then as `_deep`."""
    return (not scheduler.feeds_idle_lane(action), *_deep(scheduler, action))


def _critical(scheduler: ListScheduler, action: Action) -> tuple[Any, ...]:
    """What has the most behind it: the rest of its micro-batch's path, and the micro-batches that follow."""
    rest = scheduler.path_ms[action.kind, action.stage] - scheduler.period_ms * (action.index or 0)
    return (-rest, action.stage)


RULES: tuple[Rule, ...] = (_deep, _broad, _oldest, _starving, _critical)
