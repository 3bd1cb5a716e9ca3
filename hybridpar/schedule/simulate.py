"""Predicts the time of a step, and the memory that its schedule needs.

The simulation reads the same lists of actions that the executor issues and keeps its rules: each queue in order, each
action after what it needs, a transfer only when both ends have come to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule
from hybridpar.schedule.costs import Costs
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import Program
from hybridpar.schedule.resources import EventLoop, Job, Machine, Phase
from hybridpar.schedule.spans import Span


@dataclass(frozen=True)
class Simulation:
    """What one step of one replica is predicted to take. All times are in milliseconds.

    Attributes:
        step_ms: From the first action to the end of the last.
        compute_ms: Until the last forward or backward pass of any lane ends.
        bubble: Part of `compute_ms` in which lanes do not compute, over all lanes.
        busy_ms: For every lane the time of its forward and backward passes.
        exposed_sync_ms: For every stage how long its last all-reduce outlasts the last computation of anyone.
        peak_saved_bytes: For every worker the most that its forward passes held for backward passes at one time, by
            lane; zero where the costs do not say.
        bytes_sent: For every worker what it sends: transfers, and its part of the all-reduces.
        timeline: Every action, by start.
    """

    step_ms: float
    compute_ms: float
    bubble: float
    busy_ms: tuple[float, ...]
    exposed_sync_ms: tuple[float, ...]
    peak_saved_bytes: tuple[int, ...]
    bytes_sent: tuple[float, ...]
    timeline: tuple[Span, ...]


def simulate(program: Program, costs: Costs) -> Simulation:
    """Predict one step."""
    run = _Run(program, costs)
    run.loop.run()
    stuck = sum(len(queue) for queue in run.queues)
    if stuck:
        raise ScheduleError(
            f"the program of {program.schedule.name!r} stops with {stuck} action(s) left",
            "Its workers wait for each other, or for something that nobody does.",
            "Make the program with `hybridpar.schedule.program.lower`.",
        )
    return _summary(program, costs, run)


class _Run:
    """One simulation under way. Actions and queues are numbers here, for speed."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.machine = Machine(program.layout, costs)
        self.loop = EventLoop()
        self.spans: list[Span] = []
        self.actions = [action for actions in program.workers for action in actions]
        number = {action: index for index, action in enumerate(self.actions)}
        self._control_ms = costs.control_ms
        #: For every action how many others it waits for; -1 once it has started.
        self._waits = [0] * len(self.actions)
        self._after: list[list[int]] = [[] for _ in self._waits]
        #: For the last backward pass of a stage: after which part of it which buckets are ready.
        self._marks: dict[int, list[tuple[float, int]]] = {}
        #: What runs as one: both ends of a transfer, and the decision of all workers.
        self._together: dict[int, list[int]] = {}
        self._make_queues(program, costs.sync_lanes)
        for action, index in number.items():
            self._connect(program, costs, number, action, index)
        decisions = [index for action, index in number.items() if action.kind is Kind.DECIDE]
        self._together |= dict.fromkeys(decisions, decisions)
        for queue in range(len(self.queues)):
            self._try(queue)

    def _make_queues(self, program: Program, sync_lanes: int) -> None:
        self.queues: list[list[int]] = []
        self._queue_of: list[int] = []
        self._key_of: list[tuple[str, int, int]] = []
        known: dict[tuple[str, int, int], int] = {}
        for index, action in enumerate(self.actions):
            kind, worker, lane = program.queue_of(action)
            key = (kind, worker, lane % sync_lanes if kind == "sync" else lane)
            queue = known.setdefault(key, len(self.queues))
            if queue == len(self.queues):
                self.queues.append([])
            self.queues[queue].append(index)
            self._queue_of.append(queue)
            self._key_of.append(key)
        for actions in self.queues:
            actions.reverse()  # the head is at the end, where it is taken off in no time

    def _connect(self, program: Program, costs: Costs, number: dict[Action, int], action: Action, index: int) -> None:
        """Note what an action waits for. Something that is not in the program never comes, and the run stops short."""
        if action.kind in RECEIVES:
            # A receive does not come after its send: they are the two ends of one transfer.
            (send,) = program.needs[action]
            if send in number:
                self._together |= dict.fromkeys(both := [number[send], index], both)
            return
        for need in program.needs[action]:
            self._waits[index] += 1
            if need not in number:
                continue
            ready = costs.buckets[action.stage][action.index or 0].ready if action.kind is Kind.SYNC else 1.0
            if ready < 1:
                self._marks.setdefault(number[need], []).append((ready, index))
            else:
                self._after[number[need]].append(index)

    def _try(self, queue: int) -> None:
        """Start what is at the head of a queue, if all that it waits for is there, and all that it runs with."""
        if not self.queues[queue]:
            return
        index = self.queues[queue][-1]
        action, together = self.actions[index], self._together.get(index, (index,))
        if not all(map(self._can_start, together)):
            return
        marks: list[tuple[float, int]] = []
        if action.kind in COMPUTE or action.kind is Kind.STEP:
            marks = sorted(self._marks.get(index, ()))
            phases = self.machine.compute(action, [mark for mark, _ in marks])
        elif action.kind is Kind.SYNC:
            phases = self.machine.sync(action)
        elif action.kind is Kind.DECIDE:
            phases = [Phase(self._control_ms)]
        elif action.peer is not None:
            if len(together) == 1:
                return  # its other end never comes
            phases = self.machine.transfer(self.actions[together[0]])
        else:  # as good as no time beside what it waits for; moves to the host's memory are in the times of passes
            phases = [Phase(0.0)]
        self._start(together, phases, [bucket for _, bucket in marks])

    def _can_start(self, index: int) -> bool:
        queue = self.queues[self._queue_of[index]]
        return bool(queue) and queue[-1] == index and not self._waits[index]

    def _start(self, indices: Sequence[int], phases: list[Phase], ready: Sequence[int]) -> None:
        """Run actions as one; after phase i the bucket `ready[i]` is ready."""
        start = self.loop.now
        for index in indices:
            self._waits[index] = -1

        def on_phase(ended: int) -> None:
            if ended < len(ready):
                self._release(ready[ended])
            if ended == len(phases) - 1:
                self._finish(indices, start)

        self.loop.start(Job(phases, on_phase))

    def _finish(self, indices: Sequence[int], start: float) -> None:
        for index in indices:
            queue, (kind, worker, lane) = self._queue_of[index], self._key_of[index]
            self.queues[queue].pop()
            self.spans.append(Span(worker, kind, lane, self.actions[index], start, self.loop.now))
        for index in indices:
            for after in self._after[index]:
                self._release(after)
            self._try(self._queue_of[index])

    def _release(self, index: int) -> None:
        """One of the things that an action waits for is there."""
        self._waits[index] -= 1
        if not self._waits[index]:
            self._try(self._queue_of[index])


def _summary(program: Program, costs: Costs, run: _Run) -> Simulation:
    layout = program.layout
    compute = [span for span in run.spans if span.action.kind in COMPUTE]
    compute_ms = max(span.end_ms for span in compute)
    busy = [0.0] * layout.lanes
    for span in compute:
        busy[span.lane] += span.duration_ms
    exposed = [0.0] * layout.stages
    sent = [0.0] * layout.workers
    for span in run.spans:
        stage = span.action.stage
        if span.action.kind is Kind.SYNC:
            exposed[stage] = max(exposed[stage], span.end_ms - compute_ms)
            sent[span.worker] += run.machine.sync_bytes(span.action)
        elif span.action.kind in SENDS:
            sent[span.worker] += run.machine.transfer_bytes(span.action)
    return Simulation(
        step_ms=max(span.end_ms for span in run.spans),
        compute_ms=compute_ms,
        bubble=max(0.0, 1 - sum(busy) / (layout.lanes * compute_ms)) if compute_ms else 0.0,
        busy_ms=tuple(busy),
        exposed_sync_ms=tuple(exposed),
        peak_saved_bytes=most_held(program.schedule, layout, costs.saved_bytes).worker_bytes,
        bytes_sent=tuple(sent),
        timeline=tuple(sorted(run.spans, key=lambda span: (span.start_ms, span.end_ms))),
    )


@dataclass(frozen=True)
class HeldPasses:
    """The most that forward passes hold for backward passes at one time.

    A micro-batch is held by a stage from the start of its forward pass to the end of its backward pass.

    Attributes:
        in_flight: For every stage the most micro-batches.
        worker_bytes: For every worker the sum over its lanes of the most that each holds. With several lanes the real
            peak may be lower; it is never higher.
    """

    in_flight: tuple[int, ...]
    worker_bytes: tuple[int, ...]


def most_held(schedule: Schedule, layout: Layout, saved_bytes: Sequence[int] | None = None) -> HeldPasses:
    """The peaks of a schedule."""
    saved = [0] * layout.stages if saved_bytes is None else saved_bytes
    count, peak = [0] * layout.stages, [0] * layout.stages
    workers = [0] * layout.workers
    for lane, row in enumerate(schedule.rows):
        held = most = 0
        for action in row:
            stage = action.stage
            if action.kind is Kind.FORWARD:
                count[stage] += 1
                held += saved[stage]
                peak[stage] = max(peak[stage], count[stage])
                most = max(most, held)
            else:
                count[stage] -= 1
                held -= saved[stage]
        workers[layout.worker_of[lane]] += most
    return HeldPasses(tuple(peak), tuple(workers))
