"""Builds the order of actions as simulated time passes.

List scheduling (Graham 1969): whenever a lane is idle it takes, of all actions that could start, the one that a
rule puts first. Which rule is best depends on the case, so there are several, and `greedy` tries them all.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import Any

from hybridpar.schedule.actions import Action, Kind, Schedule
from hybridpar.schedule.layout import Edge
from hybridpar.schedule.schedules.base import ScheduleRequest

#: The kinds in the order in which a stage runs them for a micro-batch.
_KINDS = (Kind.FORWARD, Kind.BACKWARD)

#: A rule gives an action that could start now its place: the smallest goes first.
Rule = Callable[["ListScheduler", Action], tuple[Any, ...]]


class ListScheduler:
    """Builds one schedule for a request."""

    def __init__(self, request: ScheduleRequest, rule: Rule) -> None:
        layout = self._layout = request.layout
        self._count, self._rule, self._link = request.micro_batches, rule, request.costs.link
        self._ms = request.costs.compute_ms
        stages = range(layout.stages)
        self._stages_of = [layout.stages_on(lane) for lane in range(layout.lanes)]
        self._into, self._out_of = [layout.into(stage) for stage in stages], [layout.out_of(stage) for stage in stages]
        #: The micro-batch that is next; every stage takes them in ascending order.
        self._next = {(kind, stage): 0 for kind in _KINDS for stage in stages}
        #: How many of the tensors that an action needs have come.
        self._arrived: Counter[Action] = Counter()
        self._needed = {(Kind.FORWARD, stage): len(self._into[stage]) for stage in stages}
        for stage in stages:
            self._needed[Kind.BACKWARD, stage] = sum(edge.gradient_bytes > 0 for edge in self._out_of[stage])
        self._busy = [False] * layout.lanes
        #: When the last transfer that a worker has sent is off its link.
        self._link_free = [0.0] * layout.workers
        self._now = 0.0
        #: Time, number, action, and whether it ends then or something that it needs arrives.
        self._events: list[tuple[float, int, Action, bool]] = []
        self._pushed = 0
        #: The time of one micro-batch on the slowest lane.
        self.period_ms = max(
            sum(self._ms(stage, kind) for kind in _KINDS for stage in stages) for stages in self._stages_of
        )
        #: For every kind and stage the time of the longest path from its start to the end of the micro-batch.
        self.path_ms = self._longest_paths()

    def run(self, name: str) -> Schedule:
        """The schedule."""
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
        """Whether a lane that has nothing to do waits for a forward pass."""
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
            for kind in _KINDS:
                action = Action(stage, kind, index := self._next[kind, stage])
                if index < before and self._arrived[action] >= self._needed[kind, stage]:
                    options.append(action)
                before = index
        return options

    def _start(self, lane: int, action: Action) -> None:
        self._busy[lane] = True
        self._next[action.kind, action.stage] += 1
        self._push(self._now + self._ms(action.stage, action.kind), action, True)

    def _end(self, action: Action) -> None:
        stage = action.stage
        self._busy[self._layout.lane_of[stage]] = False
        if action.kind is Kind.FORWARD:
            for edge in self._out_of[stage]:
                self._deliver(stage, Action(edge.target, Kind.FORWARD, action.index), edge.bytes)
        else:
            for edge in self._into[stage]:
                if edge.gradient_bytes > 0:
                    self._deliver(stage, Action(edge.source, action.kind, action.index), edge.gradient_bytes)

    def _deliver(self, source: int, user: Action, size: int) -> None:
        """Bring a tensor to the action that uses it; what a worker sends leaves it one after the other."""
        home = self._layout.home(source)
        if home == self._layout.home(user.stage):
            self._arrived[user] += 1
            return
        self._link_free[home] = max(self._now, self._link_free[home]) + self._link.wire_ms(size)
        self._push(self._link_free[home] + self._link.latency_ms, user, False)

    def _push(self, time: float, action: Action, ended: bool) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (time, self._pushed, action, ended))

    def _longest_paths(self) -> dict[tuple[Kind, int], float]:
        paths: dict[tuple[Kind, int], float] = {}
        for stage in range(self._layout.stages):
            edges = [edge for edge in self._into[stage] if edge.gradient_bytes > 0]
            after = [self._travel_ms(edge, edge.gradient_bytes) + paths[Kind.BACKWARD, edge.source] for edge in edges]
            paths[Kind.BACKWARD, stage] = self._ms(stage, Kind.BACKWARD) + max(after, default=0.0)
        for stage in reversed(range(self._layout.stages)):
            edges = self._out_of[stage]
            after = [self._travel_ms(edge, edge.bytes) + paths[Kind.FORWARD, edge.target] for edge in edges]
            paths[Kind.FORWARD, stage] = self._ms(stage, Kind.FORWARD) + max([*after, paths[Kind.BACKWARD, stage]])
        return paths

    def _travel_ms(self, edge: Edge, size: int) -> float:
        """Time of so many bytes over an edge, where its stages are on different workers."""
        return self._link.latency_ms + self._link.wire_ms(size) if self._layout.crosses(edge) else 0.0
