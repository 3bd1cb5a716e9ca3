"""Proves the lists of actions that workers issue, beside the schedule that they were made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import COMPUTE, RECEIVES, Action, Kind, Schedule
from hybridpar.schedule.check import Proof, check, failure
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import Program, dependencies, lower

_LOWER = "Make the program with `hybridpar.schedule.program.lower`."


def prove(schedule: Schedule, layout: Layout) -> Proof:
    """Prove a schedule, and the program that it is lowered to."""
    return check_program(lower(schedule, layout))


def check_program(program: Program) -> Proof:
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
    proof = check(schedule, layout)
    needs = _require_all(program)
    for lane, row in enumerate(schedule.rows):
        own = [one for one in program.workers[layout.worker_of[lane]] if one.kind in COMPUTE]
        for wanted, found in zip(row, (one for one in own if layout.lane_of[one.stage] == lane), strict=True):
            if wanted != found:
                what = (
                    f"worker {layout.worker_of[lane]} computes {found} where lane {lane} of the schedule has {wanted}"
                )
                raise failure(schedule, layout, what, wanted, "A program keeps the order of its schedule.", _LOWER)
    queues: dict[str, list[Action]] = {}
    for worker, actions in enumerate(program.workers):
        issued: set[Action] = set()
        for action in actions:
            late = [one for one in needs[action] if layout.home(one.stage) == worker and one not in issued]
            if late:
                what = f"worker {worker} issues {action} before {late[0]}, which it needs"
                reason = "On a device an event must be recorded before it is waited for."
                raise failure(schedule, layout, what, _cell(action, needs), reason, _LOWER)
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
        what, reason = f"the program of {schedule.name!r} deadlocks", "Actions wait for each other."
        raise failure(schedule, layout, what, _cell(run.stuck[0], needs), reason, _LOWER)
    return proof


def _require_all(program: Program) -> dict[Action, tuple[Action, ...]]:
    """What all actions need, once it is sure that they are there, and nothing else."""
    layout = program.layout
    buckets = [0] * layout.stages
    for action in program.needs:
        if action.kind is Kind.SYNC:
            buckets[action.stage] += 1
    offload = {action.stage for action in program.needs if action.kind is Kind.PARK}
    needs = dependencies(layout, program.schedule, buckets, offload)
    places = Counter((worker, action) for worker, actions in enumerate(program.workers) for action in actions)
    wanted = Counter((layout.home(action.stage), action) for action in needs)
    for worker, action in wanted - places:
        users = [one for one, before in needs.items() if action in before] or [action]
        what, reason = f"worker {worker} never does {action}", f"{users[0]} waits for it for ever."
        raise failure(program.schedule, layout, what, _cell(users[0], needs), reason, _LOWER)
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
    return f"lane {other}" if kind == "compute" else f"worker {worker}'s {kind} lane {other}"


class QueueRun:
    """Runs queues until none can go on.

    Queues run in order, and an action waits for what it needs and, if it stands in several queues, until it is the next
    in all of them.
    """

    def __init__(self, queues: Mapping[str, Sequence[Action]], needs: Mapping[Action, Sequence[Action]]) -> None:
        self._queues, self._needs = queues, needs
        self._standing: dict[Action, list[str]] = {}
        for key, queue in queues.items():
            for action in queue:
                self._standing.setdefault(action, []).append(key)
        self._passed = dict.fromkeys(queues, 0)
        self._done: set[Action] = set()
        going = True
        while going:
            going = False
            for key in queues:
                while self._advance(key):
                    going = True

    @property
    def stuck(self) -> list[Action]:
        """For every queue that did not come to its end the action at which it stopped."""
        return [action for key in self._queues if (action := self._head(key)) is not None]

    def _head(self, key: str) -> Action | None:
        passed = self._passed[key]
        return self._queues[key][passed] if passed < len(self._queues[key]) else None

    def _advance(self, key: str) -> bool:
        action = self._head(key)
        if action is None or any(need not in self._done for need in self._needs.get(action, ())):
            return False
        keys = set(self._standing[action])
        if any(self._head(other) != action for other in keys):
            return False
        self._done.add(action)
        for key in keys:
            self._passed[key] += 1
        return True
