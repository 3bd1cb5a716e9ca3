"""Schedule `greedy`: an order built for the measured times, link and memory.

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
from hybridpar.schedule.schedules.list_scheduler import ListScheduler, Rule, lane_caps
from hybridpar.schedule.schedules.one_forward_one_backward import in_turns
from hybridpar.schedule.simulate import simulate


@register_schedule(
    "greedy",
    "made for the measured times, link and memory cap; never slower than the others (any layout)",
    placements=("linear", "loop", "v"),
    searches=True,
)
def greedy(request: ScheduleRequest) -> Schedule:
    """The fastest of all fixed schedules that fit, and of the orders that list scheduling builds by several rules.

    Backward passes are split only where the request has times for both halves. Of equally fast ones the one that holds
    least is taken.

    Args:
        request: The layout, the number of micro-batches, and what was measured.

    Raises:
        ScheduleError: One micro-batch alone exceeds the memory cap.
    """
    best, least = None, (math.inf, math.inf)
    seen: set[tuple[tuple[Action, ...], ...]] = set()
    for schedule in _candidates(request):
        if schedule.rows in seen:
            continue  # rules often agree
        seen.add(schedule.rows)
        held = most_held(schedule, request.layout, request.saved_bytes)
        if request.memory_cap is not None and max(held.worker_bytes) > request.memory_cap:
            continue
        time = simulate(lower(schedule, request.layout), request.costs).step_ms
        cost = (round(time, 9), sum(held.worker_bytes) or sum(held.in_flight))
        if cost < least:
            best, least = schedule, cost
    assert best is not None, "list scheduling keeps the cap"
    return Schedule("greedy", best.rows, best.micro_batches)


def _candidates(request: ScheduleRequest) -> Iterator[Schedule]:
    splits = (False,) if request.input_ms is None else (False, True)
    for split in splits:
        for rule in RULES:
            yield ListScheduler(request, rule, split=split).run("greedy")
    if sorted(request.layout.lane_of) == list(range(request.layout.lanes)):
        for factor in (1, 2, 3):
            yield _eager(request, factor)
    for name in SCHEDULES:
        if name == "greedy":
            continue
        try:
            schedule = SCHEDULES.get(name)(request)
        except ScheduleError:
            continue  # made for another layout
        halves = any(action.kind is Kind.BACKWARD_INPUT for row in schedule.rows for action in row)
        if not halves or request.input_ms is not None:
            yield schedule


def _eager(request: ScheduleRequest, factor: int) -> Schedule:
    """1F1B with so many times its warm-up, as far as memory goes; what waits for a slow link then has a substitute.

    The stage that follows never runs further ahead than this one: else both would wait for each other.
    """
    layout, count = request.layout, request.micro_batches
    rows: list[tuple[Action, ...]] = [()] * layout.lanes
    ahead = count
    for stage in range(layout.stages):
        ahead = min(ahead, factor * (layout.stages - 1 - stage))
        if request.memory_cap is not None and request.saved_bytes is not None and request.saved_bytes[stage]:
            # A worker's other lanes hold no more than their part either.
            cap = lane_caps(layout, request.saved_bytes, request.memory_cap)[layout.lane_of[stage]]
            assert cap is not None
            ahead = min(ahead, cap // request.saved_bytes[stage] - 1)
        rows[layout.lane_of[stage]] = in_turns(forwards(stage, count), backwards(stage, count), ahead)
    return Schedule("greedy", tuple(rows), count)


def _group(action: Action) -> int:
    """Backward passes before forward passes before actions that no other waits for."""
    return {Kind.FORWARD: 1, Kind.BACKWARD_WEIGHT: 2}.get(action.kind, 0)


def _deep(scheduler: ListScheduler, action: Action) -> tuple[Any, ...]:
    """Backward first, then the latest stage: a micro-batch leaves as soon as it can."""
    return (_group(action), -action.stage, action.index)


def _broad(scheduler: ListScheduler, action: Action) -> tuple[Any, ...]:
    """Backward first, then the earliest stage: the lanes behind get work as soon as they can."""
    return (_group(action), action.stage, action.index)


def _oldest(scheduler: ListScheduler, action: Action) -> tuple[Any, ...]:
    """Backward first, then the oldest micro-batch."""
    return (_group(action), action.index, action.stage)


def _starving(scheduler: ListScheduler, action: Action) -> tuple[Any, ...]:
    """First a forward pass for which a lane with nothing to do waits, then as `_deep`."""
    return (not scheduler.feeds_idle_lane(action), *_deep(scheduler, action))


def _critical(scheduler: ListScheduler, action: Action) -> tuple[Any, ...]:
    """What has the most behind it: the rest of its micro-batch's path, and the micro-batches that follow."""
    rest = scheduler.path_ms[action.kind, action.stage] - scheduler.period_ms * (action.index or 0)
    return (action.kind is Kind.BACKWARD_WEIGHT, -rest, action.stage)


RULES: tuple[Rule, ...] = (_deep, _broad, _oldest, _starving, _critical)
