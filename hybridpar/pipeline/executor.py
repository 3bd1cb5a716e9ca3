"""Runs a program: issues a step's actions, in order, to lanes.

The host thread goes through this worker's actions. Computation goes to the lane of its stage, transfers to a lane for
each peer and direction, sums of gradients to sync lanes, control messages and copies to the host's memory to lanes for
these, and each action waits for the events of what it needs and nothing else. No wait names an event that was not
issued before, so nothing can deadlock, and the host never waits within a step: it issues the next step while this runs.

The lane of a model that is not cut is the host thread itself. There, a pass runs while it is issued, and hooks of the
backward pass issue the sums of gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from hybridpar.comm.flight import noted
from hybridpar.comm.world import World
from hybridpar.errors import ScheduleError, TrainingError, first_line
from hybridpar.lanes import Event, Lane, Lanes
from hybridpar.lanes.base import start_copy
from hybridpar.pipeline.borders import BorderTable
from hybridpar.pipeline.local_stage import Agreement, LocalStage
from hybridpar.pipeline.stage_module import BorderFacts, WholeModel
from hybridpar.pipeline.stage_run import Mailbox
from hybridpar.pipeline.step import LateOutcome, PipelineOptions, Queue, SpanRecorder, StepRequest, StepState
from hybridpar.schedule.actions import Action, Kind, Schedule
from hybridpar.schedule.layout import Edge
from hybridpar.schedule.program import Program, lower
from hybridpar.schedule.schedules import ScheduleRequest, make
from hybridpar.sync.stage_gradients import StepGradients

if TYPE_CHECKING:
    from hybridpar.comm.transport import Channel, Grid, MessagePart
    from hybridpar.sync.reducer import Reducer

#: What a worker does in a step also where it has no sample: its gradients are zero, and added to those of the others.
_WITHOUT_SAMPLES = frozenset({Kind.SYNC, Kind.REPORT, Kind.DECIDE, Kind.STEP})


@dataclass(frozen=True)
class _Item:
    """What is known of an action of this worker before a step.

    Attributes:
        action: The action.
        note: Names it in the flight record while it runs.
        queue: Where the program has it.
        lane: Where it runs. A sum of gradients has the lane of its stage here: the reducer issues it.
        work: Does it, on its lane.
        prepare: What comes before that on the lane of its stage.
        needs: What must be done before it, of this worker and on other lanes.
        is_needed: Something waits for it.
        is_last: It is the last backward pass of its stage, whose gradients are sent while it runs.
    """

    action: Action
    note: AbstractContextManager[None]
    queue: Queue
    lane: Lane
    work: _Work
    prepare: _Work | None
    needs: tuple[Action, ...]
    is_needed: bool
    is_last: bool


_Work = Callable[[StepState], None]


class _Part(NamedTuple):
    """This worker's part of a program: its actions in the order of issue, and of each stage the sums."""

    items: list[_Item]
    sums: dict[int, dict[int, _Item]]


class Executor:
    """Runs this worker's part of a pipeline."""

    def __init__(
        self,
        stages: Mapping[int, LocalStage],
        borders: BorderTable,
        grid: Grid | None,
        world: World,
        replicas: World | None,
        lanes: Lanes,
        mailbox: Mailbox,
        micro_batches: int,
        options: PipelineOptions,
        *,
        sync_lanes: int,
        sums_losses: bool,
    ) -> None:
        self.stages = stages
        self.borders = borders
        self._options = options
        self._position, self._ranks = (0, (0,)) if grid is None else (grid.position, grid.ranks)
        self._replica = options.layout.replica_of(world.rank)
        self._world = world
        self._replicas = replicas
        self._micro_batches = micro_batches
        self._lanes = lanes
        self._mailbox = mailbox
        self._senders: dict[int, tuple[Channel, Lane]] = {}
        self._receivers: dict[int, tuple[Channel, Lane]] = {}
        if grid is not None:
            for peer, sender in grid.senders.items():
                self._senders[peer] = sender, lanes.open(f"send to {peer}", priority=-1)
            for peer, receiver in grid.receivers.items():
                self._receivers[peer] = receiver, lanes.open(f"receive from {peer}", priority=-1)
        self._is_whole = is_whole = isinstance(borders.stages[0], WholeModel)
        self._offload = () if is_whole else options.offload
        moved = {stages[index].lane: None for index in sorted(stages.keys() & set(self._offload))}
        self._copiers = {lane: lanes.open(f"copy of {lane.name}") for lane in moved}
        self._agreement = Agreement(stages, world, lanes, is_whole=is_whole)
        self._inline = is_whole and lanes.device.type == "cpu"
        self._sync_lanes = sync_lanes
        self._sums_losses = sums_losses
        # The decision then stays on the device, where the optimizers read it.
        self._on_device = options.sync.guard and (lanes.device.type == "cuda" or options.capture)
        self._programs: dict[tuple[Any, ...], tuple[Program, _Part, _Part]] = {}
        self._running: list[LateOutcome] = []
        self._ends: list[Event] = []  # of the step before
        self.steps = 0
        #: The program of the last step.
        self.program: Program | None = None
        lanes_of_stages = dict.fromkeys(stage.lane for stage in stages.values())
        #: Lanes that begin behind what the host has issued, and those that end a step.
        self._first_lanes = [lane for lane in (self._agreement.lane, *lanes_of_stages) if lane is not lanes.caller]
        self._last_lanes = [] if self._inline else [*lanes_of_stages]

    # ------------------------------------------------------------------ a step

    def step(self, request: StepRequest, total: float | Callable[[], float]) -> LateOutcome:
        """Issue a step, whose losses are divided by a total. Waits only for the step before the last one."""
        self.recover()
        while len(self._running) > 1:
            self._running.pop(0).wait()
        return self._outcome(self.issue(request, total))

    def issue(self, request: StepRequest, total: float | Callable[[], float]) -> StepState:
        """Issue the work of a step, without counting it as done."""
        self._rebuild_buckets()
        inputs = [self.name_inputs(given) for given, _ in request.micro_batches]
        facts: list[BorderFacts] = []
        if not self._is_whole:
            self.borders.follow_trainable()
            for given, (_, target) in zip(inputs, request.micro_batches, strict=True):
                # An example run uses the buffers that the step before still writes to.
                facts.append(self.borders.at(given, target, wait=self.wait))
        self.program, part = self._program(len(inputs), facts[0] if facts else None)
        # What is captured runs many times, so it has no times to be recorded. None leaves it to the kind of device.
        captured = request.flags is not None
        spans = SpanRecorder(self._lanes.device, enabled=False if captured else self._options.record or None)
        rate, waited_ms = None if captured else request.rate_factor, 0.0 if self._is_whole else None
        step = StepState(self.steps + 1, request, total, rate, inputs, facts, spans, waited_ms)
        self._begin(step, part)
        for item in part.items:
            self._issue(step, item)
        self._ends = [lane.record() for lane in self._last_lanes]
        # A send whose bytes have left may still be at work when the step that it belongs to is decided.
        step.ends = self._ends + [lane.record() for _, lane in self._senders.values()]
        if self._lanes.device.type == "cuda":  # the host then waits once, and not for the decision and for every lane
            for end in step.ends:
                self._agreement.lane.wait(end)
            step.ends = [self._agreement.lane.record()]
            step.decided = step.decided and step.ends[0]
        return step

    def _begin(self, step: StepState, part: _Part) -> None:
        """Begin the step of every stage, behind what the host has issued so far."""
        for index, stage in self.stages.items():
            step.flights[index] = stage.gradients.new_step()
        if self._first_lanes:
            given = self._lanes.caller.record()
            for lane in self._first_lanes:
                lane.wait(given)
        for index, stage in self.stages.items():
            flight = step.flights[index]
            stage.lane.submit(partial(stage.start, step.number, flight))
            if stage.replicas.size > 1:
                self._note_sums(step.spans, index, flight, part.sums[index])
            stage.gradients.begin(flight)
        # Where nothing flows back, those before may be a step ahead, and what has arrived has no step in its address.
        for _, lane in self._receivers.values():
            for event in self._ends:
                lane.wait(event)

    def name_inputs(self, given: Any) -> dict[str, Tensor]:
        """The model's inputs by name."""
        values = given if isinstance(given, (tuple, list)) else (given,)
        return dict(zip(self.borders.stages[0].model_inputs, values, strict=True))

    def count_samples(self, samples: float, *, refusing: bool = False) -> Callable[[], float]:
        """Start to sum the samples of the next step over the replicas, where only each knows its own."""
        self._rebuild_buckets()  # replicas agree on the order on the same group, from this thread
        return self._agreement.count_samples(samples, refusing=refusing)

    def adopt(self, step: StepState) -> LateOutcome:
        """Count a step whose work the caller's stream does as a whole, and start to copy its values to the host."""
        assert step.values is not None
        while len(self._running) > 1:
            self._running.pop(0).wait()
        values = start_copy(step.values.clone())
        end = self._lanes.caller.record()
        return self._outcome(replace(step, number=self.steps + 1, host_values=values, decided=end, ends=[end]))

    def give_up(self) -> None:
        """Forget what a step that was captured, and never ran, has left."""
        self._mailbox.clear()
        for stage in self.stages.values():
            stage.is_open = stage.is_stepping = False

    @property
    def is_stopped(self) -> bool:
        """Whether an error that the host has met has ended what this worker does with others."""
        met = (lane.failure is not None and lane.failure.met for lane in self._lanes.others)
        return self._world.job_size > 1 and any(met)

    def recover(self) -> None:
        """Go on after a step that an error has ended, once the host has met it: that step and those issued after it are
        given up, as if their batches had not been. Where other workers take part, the lanes stay stopped.
        """
        if self._lanes.closed:
            return
        for stage in self.stages.values() if self._is_whole else ():  # on the caller's lane: nothing runs by now
            if stage.is_open:
                stage.undo()
        if self._inline or self._world.job_size > 1:
            return
        lanes = self._lanes.others
        failed = [lane.failure.error for lane in lanes if lane.failure is not None and lane.failure.met]
        if not failed:
            return
        for lane in lanes:
            with suppress(Exception):
                lane.synchronize()
        steps = {stage.steps_done for stage in self.stages.values()}
        if len(steps) > 1 or any(stage.is_stepping for stage in self.stages.values()):
            raise TrainingError(
                f"training was ended by the error of step {max(steps)}: {first_line(failed[0])}",
                "Some stages have done that step, or a part of it, and others have not.",
                "Go on from a checkpoint.",
            ) from failed[0]
        self._lanes.forgive()
        for stage in self.stages.values():
            stage.lane.submit(stage.undo)
        for stage in self.stages.values():
            stage.lane.synchronize()
        self.steps = steps.pop()
        self._mailbox.clear()
        self._running.clear()
        self._ends = []

    def _outcome(self, step: StepState) -> LateOutcome:
        self.steps = step.number
        outcome = LateOutcome(step, self._world)
        if self._inline:
            outcome.wait()  # it is over, and need not keep its batch alive
        else:
            self._running.append(outcome)
        return outcome

    def start_at(self, steps: int) -> None:
        """Number of the last step, where training goes on from a checkpoint."""
        self.wait()
        self.steps = steps

    def wait(self) -> None:
        """Wait until everything that was issued is done; with other workers an error is raised again each time."""
        self.recover()
        while self._running:
            self._running.pop(0).wait()
        for lane in self._lanes.others if self._world.job_size > 1 else ():
            if lane.failure is not None:
                lane.failure.throw()

    @property
    def reducers(self) -> list[Reducer]:
        """What sums the gradients of stages that have replicas."""
        return [stage.reducer for stage in self.stages.values() if stage.reducer is not None]

    # --------------------------------------------------------------- preparing

    def _rebuild_buckets(self) -> None:
        """Rebuild buckets if needed; the lanes must be idle for that."""
        if any(reducer.is_due() for reducer in self.reducers):
            self.wait()
            for reducer in self.reducers:
                reducer.rebuild_buckets()

    def _program(self, count: int, facts: BorderFacts | None) -> tuple[Program, _Part]:
        """The program of a step of so many micro-batches, and this worker's part of it."""
        buckets = {index: len(stage.gradients.buckets) for index, stage in self.stages.items()}
        # A replica without samples follows the program of the others, who have the usual number of micro-batches. Sums
        # of stages with groups of their own need no common order.
        idle, count = count == 0, count or self._micro_batches
        apart = idle and self._replicas is None
        key = (count, tuple(buckets.items()), self.borders.trainable, apart)
        if key not in self._programs:
            edges = () if facts is None else self.borders.edges(facts)
            if not self._is_whole and self._replicas is not None and self._replicas.size > 1:
                # Micro-batches of replicas may differ in size, and the order of their sums must not.
                self.wait()
                answers = cast("list[tuple[Edge, ...]]", self._replicas.gather(edges))
                edges = next((known for known in answers if known), ())
            program = self._make_program(count, edges, buckets)
            self._programs[key] = program, self._part(program), self._part(program, idle=True)
        program, part, without_samples = self._programs[key]
        return program, without_samples if idle else part

    def _make_program(self, count: int, edges: tuple[Edge, ...], buckets: Mapping[int, int]) -> Program:
        options = self._options
        layout = options.layout.replica(self._replica, edges)

        def program(order: Schedule) -> Program:
            return lower(
                order,
                layout,
                [buckets.get(index, 0) for index in range(layout.stages)],
                self._offload,
                commit=any(stage.measured for stage in self.stages.values()),
                costs=options.costs,
            )

        order = options.order(self._replica, count)
        try:
            return program(order)
        except ScheduleError:  # gradients flow that its plan did not know of, as of parameters that were frozen
            return program(make(order.name, ScheduleRequest(layout, count, options.costs)))

    def _part(self, program: Program, *, idle: bool = False) -> _Part:
        """This worker's part of a program."""
        last = {program.needs[Action(index, Kind.REPORT, 1)][0] for index in self.stages}
        actions = program.workers[self._position]
        if idle:
            actions = tuple(action for action in actions if action in last or action.kind in _WITHOUT_SAMPLES)
        ways = {action: self._way_of(program, action, is_last=action in last) for action in actions}
        needs: dict[Action, tuple[Action, ...]] = {}
        for action, (lane, _, prepare) in ways.items():
            behind = (lane,) if prepare is None else (lane, self.stages[action.stage].lane)
            needs[action] = tuple(
                need
                for need in program.needs[action]
                if need in ways and (need.kind is Kind.SYNC or ways[need][0] not in behind)
            )
        needed = {need for before in needs.values() for need in before}
        if not (self._inline and self._agreement.lane is self._lanes.caller):
            needed |= {action for action in actions if action.kind is Kind.DECIDE}  # the host asks for it
        items = [
            _Item(
                action,
                # Control messages have notes of their own, with their number among those of the same workers.
                nullcontext() if program.queue_of(action)[0] == "control" else noted(str(action)),
                program.queue_of(action),
                *ways[action],
                needs[action],
                action in needed,
                action in last,
            )
            for action in actions
        ]
        sums: dict[int, dict[int, _Item]] = {index: {} for index in self.stages}
        for item in items:
            if item.action.kind is Kind.SYNC:
                sums[item.action.stage][item.action.index or 0] = item
        return _Part(items, sums)

    def _way_of(self, program: Program, action: Action, *, is_last: bool) -> tuple[Lane, _Work, _Work | None]:
        """The lane of an action, what does it, and what prepares that on the lane of its stage."""
        number, stage, agreement = action.stage, self.stages[action.stage], self._agreement
        index = action.index or 0
        match action.kind:
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                other = program.queue_of(action)[2]
                return self._senders[other][1], partial(self._send, action, other), None
            case Kind.RECEIVE_FORWARD | Kind.RECEIVE_BACKWARD:
                other = program.queue_of(action)[2]
                return self._receivers[other][1], partial(self._receive, action, other), None
            case Kind.SYNC:
                return stage.lane, _nothing, None
            case Kind.REPORT:
                report = partial(agreement.report_backward if index else agreement.report_forward, number)
                if stage.replicas.size == 1:
                    return stage.lane, report, None
                return (
                    agreement.lane,
                    partial(agreement.sum_backward if index else agreement.sum_forward, number),
                    report,
                )
            case Kind.DECIDE:
                return agreement.lane, agreement.decide, None
            case Kind.PARK:
                return self._copiers[stage.lane], lambda _: stage.run.park(index), None
            case Kind.FETCH:
                run, device = stage.run, stage.lane.device
                lane = self._copiers[stage.lane]
                return lane, lambda _: run.parked(index).fetch(), lambda _: run.parked(index).make_room(device)
            case Kind.STEP:
                return stage.lane, partial(stage.apply, on_device=self._on_device), None
        frees = tuple(need for need in program.needs[action] if need.kind is Kind.PARK)
        parks = Action(number, Kind.PARK, index) in program.needs
        compute = partial(self._compute, action, frees, parks)
        return stage.lane, partial(self._compute_last, number, compute) if is_last else compute, None

    # ----------------------------------------------------------------- issuing

    def _issue(self, step: StepState, item: _Item) -> None:
        """Issue an action to its lane, behind what it needs."""
        action, lane = item.action, item.lane
        stage, flight = self.stages[action.stage], step.flights[action.stage]
        if action.kind is Kind.SYNC:
            step.events[action] = stage.gradients.issue(action.index or 0, flight)
            return
        if item.prepare is not None:
            stage.lane.submit(partial(item.prepare, step))
            lane.wait(stage.lane.record())
        if item.needs:
            began = time.perf_counter()
            for need in item.needs:
                lane.wait(step.events[need])
            if step.waited_ms is not None:
                step.waited_ms += (time.perf_counter() - began) * 1e3
        work = partial(step.spans.run, item.queue, action, item.note, partial(item.work, step))
        if self._inline and lane is self._lanes.caller:
            work()
        else:
            lane.submit(work, marks=stage.gradients.marks(flight) if item.is_last else ())
        if item.is_needed:
            event = step.events[action] = lane.record()
            if action.kind is Kind.DECIDE:
                step.decided = event
        if action.kind is Kind.REPORT and action.index == 0 and lane is not stage.lane:
            flight.reported = lane.record()

    def _note_sums(self, spans: SpanRecorder, stage: int, flight: StepGradients, items: Mapping[int, _Item]) -> None:
        """Have the sums of a stage's gradients timed, and their failures named. Must not hold the step, which holds the
        flight.
        """
        doing, replicas = f"adding gradients of stage {stage} over its replicas", self.stages[stage].replicas

        def run_sum(bucket: int, work: Callable[[], None]) -> None:
            def named() -> None:
                with replicas.named_errors(doing):
                    work()

            queue = "sync", self._position, bucket % self._sync_lanes
            spans.run(queue, items[bucket].action, items[bucket].note, named)

        flight.run_sum = run_sum
        flight.on_ready = lambda bucket: spans.ready(items[bucket].action)

    # ---------------------------------------------------------------- on lanes

    def _compute(self, action: Action, frees: Sequence[Action], parks: bool, step: StepState) -> None:
        """A forward or backward pass, once the memory of what has left the device is freed; `parks` lets it leave."""
        stage, index = self.stages[action.stage], action.index or 0
        for parked in frees:
            self.stages[parked.stage].run.parked(parked.index or 0).release()
        try:
            if action.kind is Kind.BACKWARD:
                stage.run.backward(index, stage.lane.keep)
                return
            inputs, (_, target) = step.inputs[index], step.request.micro_batches[index]
            counted = target if isinstance(target, Tensor) else next(iter(inputs.values()))
            share = partial(step.share, 1 if self._sums_losses else counted.shape[0])
            stage.run.forward(index, inputs, target, share, stage.lane.keep, parks=parks)
        except RuntimeError as error:
            no_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if self._is_whole or not no_memory:
                raise
            raise TrainingError(
                f"stage {action.stage} ran out of memory on {stage.lane.device} in {action}",
                f"{len(stage.run.flights)} micro-batch(es) in flight keep activations for their backward passes.",
                f"Use more --micro-batches, --schedule 1f1b, or --recompute {action.stage}"
                + (f" or --offload {action.stage}." if stage.lane.device.type == "cuda" else "."),
            ) from error

    def _compute_last(self, index: int, compute: _Work, step: StepState) -> None:
        """The last backward pass of a stage; without samples its gradients are zero, and added to those of others."""
        gradients = self.stages[index].gradients
        gradients.begin_last(step.flights[index])
        if step.inputs:
            compute(step)
        step.used[index] = gradients.flush()

    def _crossing(self, action: Action, step: StepState) -> _Crossing:
        """What an action brings over a border."""
        assert action.index is not None
        assert action.peer is not None
        facts = step.facts[action.index]
        forward = action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
        producer, user = sorted((action.stage, action.peer))
        names = [name for name in self.borders.names(producer, user) if forward or name in facts.gradients]
        return _Crossing(
            {(name, action.index, user): facts.parts[name] for name in names},
            self._mailbox.values if forward else self._mailbox.gradients,
            f"{'activations' if forward else 'gradients'} of micro-batch {action.index}",
        )

    def _send(self, action: Action, other: int, step: StepState) -> None:
        crossing, (channel, lane) = self._crossing(action, step), self._senders[other]
        forward, box = action.kind is Kind.SEND_FORWARD, crossing.box
        # A gradient that autograd found to be zero everywhere is not there; an activation always is.
        tensors = [
            box.pop(address) if forward or address in box else part.empty(self._lanes.device).zero_()
            for address, part in crossing.parts.items()
        ]
        lane.keep(*tensors)
        doing = f"sending {crossing.what} from stage {action.stage} to stage {action.peer}"
        with self._world.named_errors(doing, transfer=(self._world.job_rank, self._ranks[other])):
            channel.send(tensors, list(crossing.parts.values()))
        step.sent.append(sum(tensor.nbytes for tensor in tensors))

    def _receive(self, action: Action, other: int, step: StepState) -> None:
        crossing = self._crossing(action, step)
        doing = f"waiting in stage {action.stage} for {crossing.what} from stage {action.peer}"
        with self._world.named_errors(doing, transfer=(self._ranks[other], self._world.job_rank)):
            tensors = self._receivers[other][0].receive(list(crossing.parts.values()))
        crossing.box.update(zip(crossing.parts, tensors, strict=True))


class _Crossing(NamedTuple):
    """What crosses a border: its parts by their addresses in a side of the mailbox, and what messages call it."""

    parts: dict[tuple[str, int, int], MessagePart]
    box: dict[tuple[str, int, int], Tensor]
    what: str


def _nothing(step: StepState) -> None:
    """The reducer does the work."""
