"""Builds the order of actions as simulated time passes.

List scheduling (Graham 1969): whenever a lane is idle it takes, of all actions that could start, the one that a
rule puts first. Which rule is best depends on the case, so there are several, and `greedy` tries them all.

Also counts the activations that a lane may hold without a deadlock.

A forward pass starts only where every micro-batch under way can still be carried to its end, the oldest first:
the safe states of Dijkstra's banker's algorithm (EWD-108), with micro-batches as customers.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import Action, Kind, Layout, Schedule
from hybridpar.schedule.schedules.base import ScheduleRequest


class LaneMemory:
    """What one lane holds while its order is built.

    Args:
        saved: For every stage of the lane what one micro-batch holds.
        cap: The most that the lane may hold; None for no limit.
    """

    def __init__(self, saved: dict[int, int], cap: int | None) -> None:
        self._saved = saved
        self._cap = cap
        self._taken = dict.fromkeys(saved, 0)
        self._freed = dict.fromkeys(saved, 0)

    def admits(self, stage: int) -> bool:
        """Whether the next forward pass of a stage may start.

        Args:
            stage: One of the lane's.
        """
        if self._cap is None:
            return True
        taken = self._taken | {stage: self._taken[stage] + 1}
        held = sum((taken[one] - self._freed[one]) * size for one, size in self._saved.items())
        for index in range(min(self._freed.values()), max(taken.values())):
            to_come = sum(size for one, size in self._saved.items() if taken[one] <= index)
            if held + to_come > self._cap:
                return False
            # This micro-batch can end; what it holds is then free for the next.
            held -= sum(size for one, size in self._saved.items() if self._freed[one] <= index < taken[one])
        return True

    def take(self, stage: int) -> None:
        """A forward pass starts.

        Args:
            stage: One of the lane's.
        """
        self._taken[stage] += 1

    def free(self, stage: int) -> None:
        """A backward pass ends.

        Args:
            stage: One of the lane's.
        """
        self._freed[stage] += 1


def lane_caps(layout: Layout, saved: Sequence[int], cap: int | None) -> list[int | None]:
    """A worker's cap dealt out to its lanes, in proportion to what one micro-batch holds on each.

    Lanes of a worker run at their own pace. Only if each keeps its own part is the whole kept at any pace.

    Args:
        layout: Where stages run.
        saved: For every stage what one micro-batch holds.
        cap: The most that a worker may hold; None for no limit.

    Raises:
        ScheduleError: A single micro-batch holds more than the cap.
    """
    if cap is None:
        return [None] * layout.lanes
    lanes, workers = [0] * layout.lanes, [0] * layout.workers
    for stage, size in enumerate(saved):
        lanes[layout.lane_of[stage]] += size
        workers[layout.home(stage)] += size
    for worker, size in enumerate(workers):
        if size > cap:
            raise ScheduleError(
                f"worker {worker} holds {size} bytes for one micro-batch, and its cap is {cap}",
                "At least one micro-batch must fit.",
                "Use smaller micro-batches, more stages, or recompute activations.",
            )
    return [
        cap * size // workers[layout.worker_of[lane]] if workers[layout.worker_of[lane]] else cap
        for lane, size in enumerate(lanes)
    ]


#: A rule gives an action that could start now its place: the smallest goes first.
Rule = Callable[["ListScheduler", Action], tuple[Any, ...]]


class ListScheduler:
    """Builds one schedule for a request.

    Args:
        request: The layout, the times, the link and the memory cap.
        rule: Which of the actions that could start now a lane takes.
        split: Whether backward passes are split into their two halves.

    Raises:
        ScheduleError: One micro-batch alone exceeds the memory cap.
    """

    def __init__(self, request: ScheduleRequest, rule: Rule, *, split: bool = False) -> None:
        layout = self._layout = request.layout
        self._count, self._rule, self._costs = request.micro_batches, rule, request.costs
        #: The kinds in the order in which a stage runs them for a micro-batch.
        self._kinds = [Kind.FORWARD, *((Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if split else (Kind.BACKWARD,))]
        stages = range(layout.stages)
        self._stages_of = [layout.stages_on(lane) for lane in range(layout.lanes)]
        self._into, self._out_of = [layout.into(stage) for stage in stages], [layout.out_of(stage) for stage in stages]
        saved = request.saved_bytes or (0,) * layout.stages
        self._memory = [
            LaneMemory({stage: saved[stage] for stage in own}, cap)
            for own, cap in zip(self._stages_of, lane_caps(layout, saved, request.memory_cap), strict=True)
        ]
        #: The micro-batch that is next; every stage takes them in ascending order.
        self._next = {(kind, stage): 0 for kind in self._kinds for stage in stages}
        #: How many of the tensors that an action needs have come.
        self._arrived: Counter[Action] = Counter()
        self._needed = {(Kind.FORWARD, stage): len(self._into[stage]) for stage in stages}
        for stage in stages:
            self._needed[self._kinds[1], stage] = sum(edge.gradient_bytes > 0 for edge in self._out_of[stage])
        self._busy = [False] * layout.lanes
        #: When the last transfer that a worker has sent is off its link.
        self._link_free = [0.0] * layout.workers
        self._now = 0.0
        #: Time, number, action, and whether it ends then or something that it needs arrives.
        self._events: list[tuple[float, int, Action, bool]] = []
        self._pushed = 0
        #: The time of one micro-batch on the slowest lane.
        self.period_ms = max(
            sum(self._ms(kind, stage) for kind in self._kinds for stage in own) for own in self._stages_of
        )
        #: For every kind and stage the time of the longest path from its start to the end of the micro-batch.
        self.path_ms = self._longest_paths()

    def run(self, name: str) -> Schedule:
        """The schedule.

        Args:
            name: How to call it.
        """
        rows: list[list[Action]] = [[] for _ in self._stages_of]
        while True:
            for lane, row in enumerate(rows):
                options = [] if self._busy[lane] else self._options(lane)
                if options:
                    row.append(min(options, key=lambda action: self._rule(self, action)))
                    self._start(lane, row[-1])
            if not self._events:
                return Schedule(name, tuple(tuple(row) for row in rows), self._count)
            self._now = self._events[0][0]
            while self._events and self._events[0][0] == self._now:
                _, _, action, ended = heapq.heappop(self._events)
                if ended:
                    self._end(action)
                else:
                    self._arrived[action] += 1

    def feeds_idle_lane(self, action: Action) -> bool:
        """Whether a lane that has nothing to do waits for a forward pass.

        Args:
            action: One that could start now.
        """
        if action.kind is not Kind.FORWARD:
            return False
        lanes = {self._layout.lane_of[edge.target] for edge in self._out_of[action.stage]}
        return any(not self._busy[lane] and not self._options(lane) for lane in lanes)

    def _options(self, lane: int) -> list[Action]:
        """What a lane could start now."""
        options = []
        for stage in self._stages_of[lane]:
            # What comes before in the stage has ended: a lane does one thing at a time, and this one is idle.
            before = self._count
            for kind in self._kinds:
                action = Action(stage, kind, index := self._next[kind, stage])
                there = index < before and self._arrived[action] >= self._needed.get((kind, stage), 0)
                if there and (kind is not Kind.FORWARD or self._memory[lane].admits(stage)):
                    options.append(action)
                before = index
        return options

    def _start(self, lane: int, action: Action) -> None:
        self._busy[lane] = True
        self._next[action.kind, action.stage] += 1
        if action.kind is Kind.FORWARD:
            self._memory[lane].take(action.stage)
        self._push(self._now + self._ms(action.kind, action.stage), action, True)

    def _end(self, action: Action) -> None:
        stage, lane = action.stage, self._layout.lane_of[action.stage]
        self._busy[lane] = False
        if action.kind is self._kinds[-1]:
            self._memory[lane].free(stage)
        if action.kind is Kind.FORWARD:
            for edge in self._out_of[stage]:
                self._deliver(stage, Action(edge.target, Kind.FORWARD, action.index), edge.bytes)
        elif action.kind is self._kinds[1]:
            for edge in self._into[stage]:
                if edge.gradient_bytes > 0:
                    self._deliver(stage, Action(edge.source, action.kind, action.index), edge.gradient_bytes)

    def _deliver(self, source: int, user: Action, size: int) -> None:
        """Bring a tensor to the action that uses it; what a worker sends leaves it one after the other."""
        home = self._layout.home(source)
        if home == self._layout.home(user.stage):
            self._arrived[user] += 1
            return
        self._link_free[home] = max(self._now, self._link_free[home]) + self._costs.link.wire_ms(size)
        self._push(self._link_free[home] + self._costs.link.latency_ms, user, False)

    def _push(self, time: float, action: Action, ended: bool) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (time, self._pushed, action, ended))

    def _ms(self, kind: Kind, stage: int) -> float:
        return self._costs.compute_ms(stage, kind)

    def _longest_paths(self) -> dict[tuple[Kind, int], float]:
        link, layout = self._costs.link, self._layout
        paths: dict[tuple[Kind, int], float] = {}
        backward = self._kinds[1]
        for stage in range(layout.stages):
            after = [self._ms(kind, stage) for kind in self._kinds[2:]]
            for edge in self._into[stage]:
                if edge.gradient_bytes > 0:
                    travel = link.latency_ms + link.wire_ms(edge.gradient_bytes) if layout.crosses(edge) else 0.0
                    after.append(travel + paths[backward, edge.source])
            paths[backward, stage] = self._ms(backward, stage) + max(after, default=0.0)
            for kind in self._kinds[2:]:
                paths[kind, stage] = self._ms(kind, stage)
        for stage in reversed(range(layout.stages)):
            after = [paths[backward, stage]]
            for edge in self._out_of[stage]:
                travel = link.latency_ms + link.wire_ms(edge.bytes) if layout.crosses(edge) else 0.0
                after.append(travel + paths[Kind.FORWARD, edge.target])
            paths[Kind.FORWARD, stage] = self._ms(Kind.FORWARD, stage) + max(after)
        return paths
