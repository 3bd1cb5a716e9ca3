"""Proves that a schedule is complete and cannot deadlock, and counts what it holds.

`check` proves a schedule on a layout; `check_program` proves lists of actions as workers issue them. Both run the
queues themselves with transfers that block both ends until both have come, so that a proof does not rest on buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import COMPUTE, RECEIVES, Action, Kind, Layout, Schedule
from hybridpar.schedule.memory import most_held
from hybridpar.schedule.picture import draw_schedule, run_lanes
from hybridpar.schedule.program import Program, QueueRun, dependencies, lower, require_own_lanes


@dataclass(frozen=True)
class Proof:
    """What holds for a schedule that was checked, whatever its actions and transfers take.

    Attributes:
        peak_in_flight: For every stage the most micro-batches between the start of their forward and the end of their
            backward pass.
        peak_saved_bytes: For every stage the most bytes that these hold.
        slots: Length in unit time: forward passes take 1, backward passes 2.
    """

    peak_in_flight: tuple[int, ...]
    peak_saved_bytes: tuple[int, ...]
    slots: int


def check(schedule: Schedule, layout: Layout, *, saved_bytes: Sequence[int] | None = None) -> Proof:
    """Prove that a schedule computes everything once and cannot deadlock.

    Args:
        schedule: The order of computation.
        layout: Where stages run.
        saved_bytes: For every stage what one micro-batch holds from its forward to its backward pass.

    Returns:
        What was found on the way: peaks of memory, and the length in unit time.

    Raises:
        ScheduleError: It does not hold. The text has a picture of the schedule with the cell where it fails.
    """
    _require_complete(schedule, layout)
    run = run_lanes(schedule, layout)
    if run.stuck:
        action, reason = run.why_stuck()
        what = f"schedule {schedule.name!r} deadlocks"
        raise _failure(schedule, layout, what, action, reason, "Let one of these actions come earlier.")
    check_program(lower(schedule, layout))
    held = most_held(schedule, layout, saved_bytes)
    return Proof(held.in_flight, held.stage_bytes, run.slots)


def check_program(program: Program) -> None:
    """Prove that workers which issue these lists finish the step.

    Every action is on its own worker, once; computation has the order of the schedule; what an action needs of its own
    worker is issued before it; and with queues that run in order, and transfers that block both ends until both have
    come, every queue comes to its end.

    Args:
        program: The lists, with the schedule and the layout that they are for.

    Raises:
        ScheduleError: It does not hold.
    """
    schedule, layout = program.schedule, program.layout
    _require_complete(schedule, layout)
    needs = _require_all(program)
    for lane, row in enumerate(schedule.rows):
        own = [one for one in program.workers[layout.worker_of[lane]] if one.kind in COMPUTE]
        for wanted, found in zip(row, (one for one in own if layout.lane_of[one.stage] == lane), strict=True):
            if wanted != found:
                what = (
                    f"worker {layout.worker_of[lane]} computes {found} where lane {lane} of the schedule has {wanted}"
                )
                raise _failure(schedule, layout, what, wanted, "A program keeps the order of its schedule.", _LOWER)
    queues: dict[str, list[Action]] = {}
    for worker, actions in enumerate(program.workers):
        issued: set[Action] = set()
        for action in actions:
            late = [one for one in needs[action] if layout.home(one.stage) == worker and one not in issued]
            if late:
                what = f"worker {worker} issues {action} before {late[0]}, which it needs"
                reason = "On a device an event must be recorded before it is waited for."
                raise _failure(schedule, layout, what, _cell(action, needs), reason, _LOWER)
            issued.add(action)
            # A send and its receive are one transfer, which stands in the queues of both.
            meeting = needs[action][0] if action.kind in RECEIVES else action
            queues.setdefault(_queue_name(program, action), []).append(meeting)
    ends = {one: needs[one][0] for one in needs if one.kind in RECEIVES}
    meetings = {
        action: [ends.get(one, one) for one in before] for action, before in needs.items() if action not in ends
    }
    run = QueueRun(queues, meetings)
    if run.stuck:
        action, reason = run.why_stuck()
        what = f"the program of {schedule.name!r} deadlocks"
        raise _failure(schedule, layout, what, _cell(action, needs), reason, _LOWER)


def _require_complete(schedule: Schedule, layout: Layout) -> None:
    """Every stage has F and B of every micro-batch, once and on its own lane."""
    require_own_lanes(schedule, layout)
    counts = Counter(action for row in schedule.rows for action in row)
    for stage in range(layout.stages):
        for index in range(schedule.micro_batches):
            found = tuple(kind for kind in _PASSES for _ in range(counts[Action(stage, kind, index)]))
            if found != _PASSES:
                raise _failure(
                    schedule,
                    layout,
                    f"stage {stage} does {' '.join(found) or 'nothing'} for micro-batch {index}",
                    Action(stage, found[-1], index) if found else None,
                    "A stage does F and B of every micro-batch, each once.",
                    "Add what is missing, and take out what is too much.",
                )


_LOWER = "Make the program with `hybridpar.schedule.program.lower`."
_PASSES = (Kind.FORWARD, Kind.BACKWARD)


def _require_all(program: Program) -> dict[Action, tuple[Action, ...]]:
    """What all actions need, once it is sure that they are there, and nothing else."""
    layout = program.layout
    buckets = [0] * layout.stages
    for action in program.needs:
        if action.kind is Kind.SYNC:
            buckets[action.stage] += 1
    needs = dependencies(layout, program.schedule, buckets)
    places = Counter((worker, action) for worker, actions in enumerate(program.workers) for action in actions)
    wanted = Counter((layout.home(action.stage), action) for action in needs)
    for worker, action in wanted - places:
        users = [one for one, before in needs.items() if action in before] or [action]
        what, reason = f"worker {worker} never does {action}", f"{users[0]} waits for it for ever."
        raise _failure(program.schedule, layout, what, _cell(users[0], needs), reason, _LOWER)
    for worker, action in places - wanted:
        raise ScheduleError(
            f"worker {worker} does {action}, which is not its work or already done",
            "A worker does what its stages need, once.",
            _LOWER,
        )
    return needs


def _cell(action: Action, needs: dict[Action, tuple[Action, ...]]) -> Action | None:
    """The computation in the picture that an action belongs to."""
    if action.kind in COMPUTE:
        return action
    return next((one for one in needs[action] if one.kind in COMPUTE), None) if action.kind not in RECEIVES else None


def _queue_name(program: Program, action: Action) -> str:
    kind, worker, other = program.queue_of(action)
    if kind == "send":
        return f"worker {worker}'s way to worker {other}"
    if kind == "receive":
        return f"worker {worker}'s way from worker {other}"
    return f"lane {other}" if kind == "compute" else f"worker {worker}'s sync lane {other}"


def _failure(
    schedule: Schedule, layout: Layout, what: str, cell: Action | None, reason: str, fix: str
) -> ScheduleError:
    """An error with the picture of the schedule and the cell where it fails."""
    return ScheduleError(what, f"{reason}\n{draw_schedule(schedule, layout, mark=cell, note='here')}", fix)
