"""Turns a schedule into one list of actions per worker, with sends and receives.

`lower` turns a schedule into the lists of actions that workers issue. All workers' lists are cut from one total order
in which everything comes after what it needs. So a worker that issues its list in order never waits for an event
that it has not issued, sends and receives of a pair of workers come in the same order at both ends, and with blocking
transfers there is no deadlock: the action that comes first in the total order among all that wait can always go on.

That order comes from a run of the lanes (`LaneRun`), which the checker and the picture read as well. Nothing that one
action does can stop another that could go on. So every run gets equally far, and one run is a proof.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule
from hybridpar.schedule.costs import Costs, unit_ms
from hybridpar.schedule.layout import Layout

#: What a forward pass saves moves to the host's memory where at least so many other passes of its lane lie before its
#: backward pass: one beside which it leaves, one beside which it comes back, and one in which its memory is free.
LEAST_BETWEEN = 3


@dataclass(frozen=True)
class Program:
    """What every worker of a replica does in one step.

    Attributes:
        schedule: What it was made from.
        layout: Where stages run.
        workers: For every worker its actions, in the order in which it issues them.
        needs: For every action what must be done before it, beside what comes earlier in its own queue. For a receive
            that is the send at the other worker.
    """

    schedule: Schedule
    layout: Layout
    workers: tuple[tuple[Action, ...], ...]
    needs: Mapping[Action, tuple[Action, ...]]

    def queue_of(self, action: Action) -> tuple[str, int, int]:
        """The queue that runs an action: kind of queue, worker, and lane, other worker or stage."""
        layout = self.layout
        home = layout.home(action.stage)
        if action.kind in SENDS or action.kind in RECEIVES:
            assert action.peer is not None
            return ("send" if action.kind in SENDS else "receive", home, layout.home(action.peer))
        if action.kind is Kind.SYNC:
            return ("sync", home, action.index or 0)
        queue = "compute"
        if action.kind in (Kind.REPORT, Kind.DECIDE):
            queue = "control"
        elif action.kind in (Kind.PARK, Kind.FETCH):
            queue = "copy"
        return (queue, home, layout.lane_of[action.stage])


def dependencies(
    layout: Layout,
    schedule: Schedule,
    buckets: Sequence[int] = (),
    offload: Collection[int] = (),
    *,
    commit: bool = True,
) -> dict[Action, tuple[Action, ...]]:
    """For every action that a schedule leads to, what it needs beside the order of its own queue."""
    needs: dict[Action, tuple[Action, ...]] = {}
    last: dict[int, dict[Kind, Action]] = {}

    def arrival(made: Action, stage: int) -> Action:
        """What brings to a stage what another has made: a receive, or between stages of a worker the pass itself."""
        if layout.home(made.stage) == layout.home(stage):
            return made
        forward = made.kind is Kind.FORWARD
        send = Action(made.stage, Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD, made.index, stage)
        receive = Action(stage, Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD, made.index, made.stage)
        needs[send], needs[receive] = (made,), (send,)
        return receive

    for row in schedule.rows:
        for action in row:
            stage, index = action.stage, action.index
            before: list[Action] = []
            if action.kind is Kind.FORWARD:
                before += [arrival(Action(edge.source, Kind.FORWARD, index), stage) for edge in layout.into(stage)]
            else:
                before.append(Action(stage, Kind.FORWARD, index))
                used = [edge.target for edge in layout.out_of(stage) if edge.gradient_bytes > 0]
                before += [arrival(Action(target, Kind.BACKWARD, index), stage) for target in used]
            last.setdefault(stage, {})[action.kind] = action
            needs[action] = tuple(before)
        _move(row, offload, needs)
    decisions: dict[int, Action] = {}
    for stage, passes in sorted(last.items()):
        if len(passes) < len(COMPUTE):
            continue  # the schedule is not complete
        backward = passes[Kind.BACKWARD]
        syncs = tuple(
            Action(stage, Kind.SYNC, bucket) for bucket in range(buckets[stage] if stage < len(buckets) else 0)
        )
        needs.update(dict.fromkeys(syncs, (backward,)))
        reports = Action(stage, Kind.REPORT, 0), Action(stage, Kind.REPORT, 1)
        needs[reports[0]], needs[reports[1]] = (passes[Kind.FORWARD],), (backward, *syncs)
        decision = decisions.setdefault(layout.home(stage), Action(stage, Kind.DECIDE))
        needs[decision] = (*needs.get(decision, ()), reports[1])
        needs[Action(stage, Kind.STEP)] = (reports[1], decision) if commit else (reports[1],)
    return needs


def _move(row: Sequence[Action], offload: Collection[int], needs: dict[Action, tuple[Action, ...]]) -> None:
    """Let what stages save for their backward passes move to the host's memory, and back, beside passes of their lane.

    It has left, and its memory is free, before the second pass after it; memory to come back to is taken before the
    last pass ahead of its backward pass.
    """
    began: dict[tuple[int, int | None], int] = {}
    for number, action in enumerate(row):
        key = action.stage, action.index
        if action.kind is Kind.FORWARD:
            began[key] = number
        elif action.stage in offload and number - (first := began.get(key, number)) > LEAST_BETWEEN:
            park, fetch = Action(action.stage, Kind.PARK, action.index), Action(action.stage, Kind.FETCH, action.index)
            needs[park], needs[fetch] = (row[first],), (row[number - 2], park)
            needs[row[first + 2]] += (park,)
            needs[action] += (fetch,)


def require_own_lanes(schedule: Schedule, layout: Layout) -> None:
    """Refuse a schedule that was made for another layout."""
    if len(schedule.rows) != layout.lanes:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {len(schedule.rows)} row(s) for {layout.lanes} lane(s)",
            "There is one row per lane.",
            "Make the schedule for this layout.",
        )
    for lane, row in enumerate(schedule.rows):
        for action in row:
            if action.stage >= layout.stages or layout.lane_of[action.stage] != lane:
                raise ScheduleError(
                    f"{action} stands on lane {lane} of schedule {schedule.name!r}",
                    f"This lane has stages {layout.stages_on(lane)} of {layout.stages}.",
                    "Make the schedule for this layout.",
                )


def lower(
    schedule: Schedule,
    layout: Layout,
    buckets: Sequence[int] = (),
    offload: Collection[int] = (),
    *,
    commit: bool = True,
    costs: Costs | None = None,
) -> Program:
    """The actions of all workers.

    Sends are issued as soon as there is something to send, receives as soon as the other end sends; `SYNC` follows
    the last backward pass of its stage. Last come the reports of all stages on their gradients, the decision, and the
    optimizer steps.

    Args:
        schedule: The order of computation.
        layout: Where stages run.
        buckets: For every stage the number of its gradient buckets.
        offload: Stages whose activations wait in the host's memory.
        commit: Whether optimizers wait for the decision, because a step counts or is rolled back as a whole.
        costs: What passes take, the same on all workers. Transfers of a pair of workers are made in the order in
            which they would be ready; without costs a backward pass counts as two forward passes.

    Raises:
        ScheduleError: A pass stands on a lane that does not have its stage, or the lanes wait for each other in a
            circle, or for something that nobody does.
    """
    require_own_lanes(schedule, layout)
    needs = dependencies(layout, schedule, buckets, offload, commit=commit)
    run = LaneRun(schedule, layout, needs, costs)
    if run.stuck:
        raise ScheduleError(
            f"schedule {schedule.name!r} deadlocks: {', '.join(map(str, run.stuck))} wait for ever",
            run.why_stuck()[1],
            "Look at it with `hybridpar.schedule.check`, which marks the place.",
        )
    return Program(schedule, layout, tuple(tuple(sorted(row, key=_turn)) for row in run.issued), needs)


def _turn(action: Action) -> tuple[int, int]:
    """The place of an action in the list of its worker; equal ones keep their order.

    The end is in the same order in all replicas, wherever these run their stages, because they meet there.
    """
    late = action.kind is Kind.REPORT and action.index == 1
    turn = 1 if late else {Kind.DECIDE: 2, Kind.STEP: 3}.get(action.kind, 0)
    return turn, -action.stage if turn else 0


class LaneRun:
    """Runs the lanes of a schedule, which may be wrong, until none can go on. What is no pass takes no time."""

    def __init__(
        self,
        schedule: Schedule,
        layout: Layout,
        needs: Mapping[Action, Sequence[Action]],
        costs: Costs | None = None,
    ) -> None:
        self._rows, self._layout, self._needs = schedule.rows, layout, needs
        self._costs = costs or Costs(*unit_ms(layout.stages))
        self._users: dict[Action, list[Action]] = {}
        for action, before in needs.items():
            for need in before:
                self._users.setdefault(need, []).append(action)
        self._finished: dict[Action, float] = {}
        self._clock = [0.0] * len(self._rows)
        #: Passes that could begin: when, the lane, and the number in its row.
        self._ready: list[tuple[float, int, int]] = []
        #: For every worker what it has done, in order.
        self.issued: list[list[Action]] = [[] for _ in range(layout.workers)]
        #: For every lane when its passes began, as far as it came.
        self.starts: list[list[float]] = [[] for _ in self._rows]
        self._run()
        #: When the last pass ended.
        self.length = max(self._clock)

    @property
    def stuck(self) -> list[Action]:
        """For every lane that did not come to its end the pass at which it stopped."""
        return [head for lane in range(len(self._rows)) if (head := self._head(lane)) is not None]

    def why_stuck(self) -> tuple[Action, str]:
        """A pass at which a lane stopped, and what it waits for."""
        action = self.stuck[0]
        need = self._missing(action)
        there = any(need in row for row in self._rows)
        return action, f"{action} needs {need}, which {'waits for it, directly or not' if there else 'nobody does'}."

    def _missing(self, action: Action) -> Action:
        """The pass that an action waits for, directly or behind a transfer."""
        need = next(need for need in self._needs[action] if need not in self._finished)
        return need if need.kind in COMPUTE else self._missing(need)

    def _run(self) -> None:
        for lane in range(len(self._rows)):
            self._offer(lane)
        while self._ready:
            start, lane, number = heapq.heappop(self._ready)
            if number != len(self.starts[lane]):
                continue  # offered twice
            action = self._rows[lane][number]
            self._clock[lane] = start + self._costs.compute_ms(action.stage, action.kind)
            self.starts[lane].append(start)
            self._finish(action, self._clock[lane])
            self._offer(lane)

    def _head(self, lane: int) -> Action | None:
        """The next pass of a lane."""
        number, row = len(self.starts[lane]), self._rows[lane]
        return row[number] if number < len(row) else None

    def _offer(self, lane: int) -> None:
        """Queue the next pass of a lane if everything it needs is there."""
        head = self._head(lane)
        if head is not None and all(need in self._finished for need in self._needs[head]):
            start = max([self._clock[lane], *(self._finished[need] for need in self._needs[head])])
            heapq.heappush(self._ready, (start, lane, len(self.starts[lane])))

    def _finish(self, action: Action, when: float) -> None:
        """Note an action, and do everything that follows from it without computing."""
        self._finished[action] = when
        self.issued[self._layout.home(action.stage)].append(action)
        for user in self._users.get(action, ()):
            if user.kind in COMPUTE:
                lane = self._layout.lane_of[user.stage]
                if self._head(lane) == user:
                    self._offer(lane)
            elif user not in self._finished and all(need in self._finished for need in self._needs[user]):
                self._finish(user, when)
