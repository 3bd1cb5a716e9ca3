"""Runs a program: issues a step's actions, in order, to lanes.

One host thread goes through this worker's actions. Computation goes to the lane of its stage, transfers to one lane
per peer and direction, sums of gradients to sync lanes, and each waits for the events of what it needs and nothing
else. No wait names an event that was not issued before, so nothing can deadlock, and the host never waits within a
step: it issues the next one while this one runs, one step ahead at most.

The lane of a model that is not cut is the host thread itself. There, a pass runs while it is issued, and hooks of the
backward pass issue the sums of gradients.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from hybridpar.comm.grid import Grid
from hybridpar.comm.rendezvous import first_line
from hybridpar.comm.transport import Channel
from hybridpar.comm.world import World
from hybridpar.errors import TrainingError
from hybridpar.lanes import Event, Lane, Lanes
from hybridpar.lanes.base import start_copy
from hybridpar.pipeline.borders import BorderFacts, BorderTable
from hybridpar.pipeline.local_stage import HEAD, Agreement, LocalStage
from hybridpar.pipeline.offload import moves
from hybridpar.pipeline.stage_run import Mailbox
from hybridpar.pipeline.step import LateOutcome, PipelineOptions, Queue, SpanRecorder, StepRequest, StepState
from hybridpar.schedule.actions import COMPUTE, SENDS, Action, Kind
from hybridpar.schedule.layout import Edge
from hybridpar.schedule.program import Program
from hybridpar.sync.reducer import StepGradients


@dataclass(frozen=True)
class _Issue:
    """What is known of an action of this worker before a step.

    Attributes:
        action: The action.
        name: What notes call it.
        queue: Where it runs.
        needs: What must be done before it, of this worker and in other queues.
        is_needed: Another queue of this worker needs it.
        is_last: It is the last backward pass of its stage.
        is_last_forward: It is the last forward pass of its stage.
        parks: What it saves moves to the host's memory.
        release: A forward pass that has left the device by then: its memory is freed before this.
        fetch: A forward pass whose backward pass is the next one of this lane: what it saved comes back beside this.
    """

    action: Action
    name: str
    queue: Queue
    needs: tuple[Action, ...]
    is_needed: bool
    is_last: bool
    is_last_forward: bool
    parks: bool = False
    release: Action | None = None
    fetch: Action | None = None


class Executor:
    """Runs this worker's part of a pipeline."""

    def __init__(
        self,
        stages: Mapping[int, LocalStage],
        borders: BorderTable,
        make_program: Callable[[int, tuple[Edge, ...], Mapping[int, int]], Program],
        grid: Grid | None,
        world: World,
        replicas: World | None,
        lanes: Lanes,
        mailbox: Mailbox,
        micro_batches: int,
        options: PipelineOptions,
        *,
        sync_lanes: int,
        whole: bool,
    ) -> None:
        self.stages = stages
        self.borders = borders
        self._make_program = make_program
        self._position, self._ranks = (0, (0,)) if grid is None else (grid.position, grid.ranks)
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
        self._offload = () if whole else options.offload
        moved = {stages[index].lane: None for index in sorted(stages.keys() & set(self._offload))}
        self._copiers = {lane: lanes.open(f"copy of {lane.name}", device=lane.device) for lane in moved}
        self._copied: dict[Action, Event] = {}  # by the forward pass: when it left, or came back
        self._agreement = Agreement(stages, world, lanes, whole=whole)
        self._whole = whole
        self._inline = whole and lanes.device.type == "cpu"
        self._sync_lanes = sync_lanes
        # The decision then stays on the device, where the optimizers read it.
        self._on_device = options.sync.guard and (lanes.device.type == "cuda" or options.capture)
        self._record = (options.record and not options.devices) or None  # None leaves it to the kind of device
        self._programs: dict[tuple[Any, ...], tuple[Program, list[_Issue], dict[int, dict[int, _Issue]]]] = {}
        self._sums: dict[int, dict[int, _Issue]] = {}  # of gradients in the step under way, by stage and bucket
        self._running: list[LateOutcome] = []
        self._ends: list[Event] = []  # of the step before
        self.steps = 0
        #: The program of the last step.
        self.program: Program | None = None

    def step(self, request: StepRequest) -> LateOutcome:
        """Issue a step. Waits only for the step before the last one."""
        self.recover()
        while len(self._running) > 1:
            self._running.pop(0).wait()
        return self._outcome(self.issue(request))

    def issue(self, request: StepRequest) -> StepState:
        """Issue the work of a step, without counting it as done."""
        self._rebuild_buckets()
        idle, facts = not request.micro_batches, [] if self._whole else self._facts(request)
        self.program, issues, self._sums = self._program(request, facts[0] if facts else None)
        # What is captured runs many times, so it has no times of its own.
        spans = SpanRecorder(self._lanes.device, enabled=self._record if request.flags is None else False)
        step = StepState(self.steps + 1, request, facts, spans)
        for index, stage in self.stages.items():
            step.flights[index] = stage.gradients.new_step()
        given = self._lanes.caller.record()
        for index, stage in self.stages.items():
            flight = step.flights[index]
            stage.lane.wait(given)
            stage.lane.submit(partial(stage.start, step.number, flight))
            if stage.replicas.size > 1:
                self._note_sums(spans, index, flight)
            stage.gradients.begin(flight)
        self._agreement.lane.wait(given)
        # Where nothing flows back, those before may be a step ahead, and what has arrived has no step in its address.
        for _, lane in self._receivers.values():
            for event in self._ends:
                lane.wait(event)
        for one in issues:
            if one.action.kind is Kind.STEP:
                began = time.perf_counter()
                if step.decided is None:
                    self._agreement.reach(step)
                self._apply(step, one, began)
                continue
            if not idle:
                self._issue(step, one)
            elif one.action.kind is Kind.SYNC or one.is_last:
                self._issue_idle(step, one)
            if one.is_last_forward:
                self._agreement.share_forward(step, one.action.stage)
        self._ends = list(step.ends)
        # A send whose bytes have left may still be at work when the step that it belongs to is decided.
        for _, lane in self._senders.values():
            step.ends.append(lane.record())
        return step

    def _facts(self, request: StepRequest) -> list[BorderFacts]:
        """What crosses the borders between stages in each micro-batch."""
        self.borders.follow_trainable()
        if not all(self.borders.knows(batch.inputs) for batch in request.micro_batches):
            self.wait()  # the example run uses the buffers that the step before still writes to
        return [self.borders.at(batch.inputs, batch.target) for batch in request.micro_batches]

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
        self._copied.clear()
        for stage in self.stages.values():
            stage.is_open = False

    def recover(self) -> None:
        """Go on after a step that an error has ended, once the host has met it: that step and those issued after it are
        given up, as if their batches had not been. Where other workers take part, the lanes stay stopped.
        """
        if self._inline or self._world.job_size > 1 or self._lanes.closed:
            return
        lanes = self._lanes.others
        failed = [lane for lane in lanes if lane.failure is not None and lane.failure.met]
        if not failed:
            return
        for lane in lanes:
            with suppress(Exception):
                lane.synchronize()
        assert failed[0].failure is not None
        error = failed[0].failure.error
        steps = {stage.steps_done for stage in self.stages.values()}
        if len(steps) > 1:
            raise TrainingError(
                f"training was ended by the error of step {max(steps)}: {first_line(error)}",
                "Some stages have done that step and others have not, as they may without guard and clipping.",
                "Go on from a checkpoint.",
            ) from error
        self._lanes.forgive()
        self.steps = steps.pop()
        self._mailbox.clear()
        self._copied.clear()
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
        """Wait until everything that was issued is done."""
        self.recover()
        while self._running:
            self._running.pop(0).wait()

    # --------------------------------------------------------------- preparing

    def _rebuild_buckets(self) -> None:
        """Rebuild buckets if needed; the lanes must be idle for that."""
        for stage in self.stages.values():
            if stage.replicas.size > 1 and stage.gradients.is_due():
                self.wait()
                for each in self.stages.values():
                    each.gradients.rebuild_buckets()
                return

    def _program(
        self, request: StepRequest, facts: BorderFacts | None
    ) -> tuple[Program, list[_Issue], dict[int, dict[int, _Issue]]]:
        buckets = {index: len(stage.gradients.buckets) for index, stage in self.stages.items()}
        # A replica without samples follows the program of the others, who have the usual number of micro-batches.
        count = len(request.micro_batches) or self._micro_batches
        # Sums of stages with groups of their own need no common order.
        apart = not request.micro_batches and self._replicas is None
        key = (count, tuple(buckets.items()), self.borders.trainable, apart)
        if key not in self._programs:
            edges = () if facts is None else self.borders.edges(facts)
            if not self._whole and self._replicas is not None and self._replicas.size > 1:
                # Micro-batches of replicas may differ in size, and the order of their sums must not.
                self.wait()
                answers = cast("list[tuple[Edge, ...]]", self._replicas.gather(edges))
                edges = next((one for one in answers if one), ())
            program = self._make_program(count, edges, buckets)
            part, sums = self._own_part(program), defaultdict[int, dict[int, _Issue]](dict)
            for one in part:
                if one.action.kind is Kind.SYNC and one.action.index is not None:
                    sums[one.action.stage][one.action.index] = one
            self._programs[key] = program, part, sums
        return self._programs[key]

    def _own_part(self, program: Program) -> list[_Issue]:
        """This worker's actions, in the order in which they are issued."""
        actions = program.workers[self._position]
        last = {program.needs[Action(index, Kind.STEP)][0] for index in self.stages}
        last_forward = {action.stage: action for action in actions if action.kind is Kind.FORWARD}
        part, needed = [], set[Action]()
        for action in actions:
            queue = program.queue_of(action)
            needs = tuple(
                need
                for need in program.needs[action]
                if program.layout.home(need.stage) == self._position and program.queue_of(need) != queue
            )
            needed.update(needs)
            is_last_forward = last_forward.get(action.stage) is action
            part.append(_Issue(action, str(action), queue, needs, False, action in last, is_last_forward))
        part = [replace(one, is_needed=one.action in needed) for one in part]
        if not self._copiers:
            return part
        orders: dict[Queue, list[Action]] = {}
        for one in part:
            if one.action.kind in COMPUTE:
                orders.setdefault(one.queue, []).append(one.action)
        release, fetch = moves(orders.values(), self._offload)
        parked = set(release.values())
        return [
            replace(one, parks=one.action in parked, release=release.get(one.action), fetch=fetch.get(one.action))
            for one in part
        ]

    # ----------------------------------------------------------------- issuing

    def _issue(self, step: StepState, one: _Issue) -> None:
        action = one.action
        if action.kind is Kind.SYNC:
            self._issue_sum(step, action)
            return
        assert action.index is not None
        stage = self.stages[action.stage]
        lane, keep = stage.lane, stage.lane.keep
        if action.peer is not None:
            lane, work = self._transfer(step, action, action.index, action.peer)
        elif action.kind is Kind.FORWARD:
            batch = step.request.micro_batches[action.index]
            share, inputs = partial(step.request.share, batch.weight), dict(batch.inputs)
            work = partial(stage.run.forward, action.index, inputs, batch.target, share, keep, parks=one.parks)
        else:
            work = partial(stage.run.backward, action.index, keep)
        if one.release is not None:
            self._release(one.release)
        if one.fetch is not None:
            self._fetch(one.fetch)
        for need in one.needs:
            lane.wait(step.events[need])
        if self._copied and action.kind in COMPUTE:
            back = self._copied.pop(_forward(action), None)
            if back is not None:
                lane.wait(back)
        if action.kind in COMPUTE and not self._whole:
            work = self._with_memory_named(step, action, work)
        if one.is_last:
            self._issue_last(step, one, work)
        else:
            lane.submit(partial(step.spans.run, one.queue, action, one.name, work))
        if one.is_needed or one.parks:
            step.events[action] = lane.record()
        if one.parks:
            self._copy(action, step.events[action], stage.run.park)

    def _release(self, forward: Action) -> None:
        index, stage = forward.index, self.stages[forward.stage]
        assert index is not None
        stage.lane.wait(self._copied.pop(forward))
        stage.lane.submit(lambda: stage.run.parked(index).release())

    def _fetch(self, forward: Action) -> None:
        index, stage = forward.index, self.stages[forward.stage]
        assert index is not None
        stage.lane.submit(lambda: stage.run.parked(index).make_room(stage.lane.device))
        self._copy(forward, stage.lane.record(), lambda index: stage.run.parked(index).fetch())

    def _copy(self, forward: Action, after: Event, work: Callable[[int], None]) -> None:
        """Copy what a forward pass has saved, to the host or back, once its lane has come to an event."""
        assert forward.index is not None
        lane = self._copiers[self.stages[forward.stage].lane]
        lane.wait(after)
        lane.submit(partial(work, forward.index))
        self._copied[forward] = lane.record()

    def _issue_sum(self, step: StepState, action: Action) -> None:
        assert action.index is not None
        step.events[action] = self.stages[action.stage].gradients.issue(action.index, step.flights[action.stage])

    def _issue_idle(self, step: StepState, one: _Issue) -> None:
        """Of a replica that has no sample in the step: its gradients are zero, and added to those of the others."""
        if one.action.kind is Kind.SYNC:
            self._issue_sum(step, one.action)
        else:
            self._issue_last(step, one, lambda: None)

    def _with_memory_named(self, step: StepState, action: Action, work: Callable[[], None]) -> Callable[[], None]:
        """Work whose lack of memory is told as what the user can change."""

        def whole() -> None:
            try:
                work()
            except RuntimeError as error:
                if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
                    raise
                stage = self.stages[action.stage]
                run = stage.run
                assert action.index is not None
                expected = step.facts[action.index].saved_bytes[action.stage]
                raise TrainingError(
                    f"stage {action.stage} ran out of memory on {stage.lane.device} in {action}, with "
                    f"{run.in_flight} micro-batch(es) in flight",
                    f"Each was expected to keep {expected / 1e6:.1f} MB of activations for its backward pass.",
                    f"Use more --micro-batches, --schedule 1f1b, or --recompute {action.stage}"
                    + (f" or --offload {action.stage}." if stage.lane.device.type == "cuda" else "."),
                ) from error

        return whole

    def _issue_last(self, step: StepState, one: _Issue, work: Callable[[], None]) -> None:
        """The last backward pass of a stage: its gradients are sent while it runs, and measured after it."""
        index = one.action.stage
        stage, flight = self.stages[index], step.flights[index]
        gradients, lane = stage.gradients, stage.lane

        def whole() -> None:
            gradients.begin_last(flight, step.request.rate_factor)
            work()
            step.used[index] = gradients.flush()

        lane.submit(partial(step.spans.run, one.queue, one.action, one.name, whole), marks=gradients.marks(flight))
        if stage.replicas.size == 1:
            lane.submit(partial(gradients.measure, flight))
        step.backward_done[index] = lane.record()

    def _note_sums(self, spans: SpanRecorder, stage: int, flight: StepGradients) -> None:
        """Have the sums of a stage's gradients timed, and their failures named. Must not hold the step, which holds the
        flight.
        """
        doing, replicas = f"adding gradients of stage {stage} over its replicas", self.stages[stage].replicas
        actions = self._sums[stage]

        def run_sum(bucket: int, work: Callable[[], None]) -> None:
            def named() -> None:
                with replicas.named_errors(doing):
                    work()

            issue = actions[bucket]
            spans.run(("sync", self._position, bucket % self._sync_lanes), issue.action, issue.name, named)

        flight.run_sum = run_sum
        flight.on_ready = lambda bucket: spans.ready(actions[bucket].action)

    def _transfer(self, step: StepState, action: Action, index: int, peer: int) -> tuple[Lane, Callable[[], None]]:
        assert self.program is not None
        other = self.program.layout.home(peer)
        other_rank = self._ranks[other]
        forward = action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
        producer = min(action.stage, peer)
        user = max(action.stage, peer)
        facts = step.facts[index]
        names = [name for name in self.borders.names(producer, user) if forward or name in facts.gradients]
        parts = [facts.parts[name] for name in names]
        what = f"{'activations' if forward else 'gradients'} of micro-batch {index}"
        box = self._mailbox.values if forward else self._mailbox.gradients
        if action.kind in SENDS:
            sender, lane = self._senders[other]
            place = f"sending {what} from stage {action.stage} to stage {peer}"

            def send() -> None:
                # A gradient that autograd found to be zero everywhere is not there; an activation always is.
                whole = [
                    box.pop((name, index, user))
                    if forward or (name, index, user) in box
                    else part.empty(self._lanes.device).zero_()
                    for name, part in zip(names, parts, strict=True)
                ]
                lane.keep(*whole)
                with self._world.named_errors(place, transfer=(self._world.job_rank, other_rank)):
                    sender.send(whole, parts)

            step.bytes_sent += sum(facts.bytes_of(name) for name in names)
            return lane, send
        receiver, lane = self._receivers[other]
        place = f"waiting in stage {action.stage} for {what} from stage {peer}"

        def receive() -> None:
            with self._world.named_errors(place, transfer=(other_rank, self._world.job_rank)):
                tensors = receiver.receive(parts)
            for name, tensor in zip(names, tensors, strict=True):
                box[name, index, user] = tensor

        return lane, receive

    # ---------------------------------------------------------------- applying

    def _apply(self, step: StepState, one: _Issue, began: float) -> None:
        """Step the optimizer of a stage, or roll it back: after its sums, and after the decision where that counts."""
        index, factor = one.action.stage, step.request.rate_factor
        stage, flight = self.stages[index], step.flights[index]
        for action, event in step.events.items():
            if action.kind is Kind.SYNC and action.stage == index:
                stage.lane.wait(event)
        if index in step.shared:
            stage.lane.wait(step.shared[index])
        if stage.measured:
            assert step.decided is not None
            stage.lane.wait(step.decided)
        if self._whole:
            step.waited_ms = (time.perf_counter() - began) * 1e3 if self._world.size > 1 else 0.0

        def apply() -> None:
            users = step.users.get(index)
            sums = step.reports[index][HEAD:] if users is not None and stage.batch_norm is not None else None
            values = step.values if stage.measured else None
            if values is not None:
                stage.lane.keep(values)
                values = values.to(stage.lane.device, non_blocking=True)
            for report in (sums, users):
                if report is not None:
                    stage.lane.keep(report)
            used, costs = step.used[index], flight.costs
            bad = stage.apply(values, sums, users, used, factor, costs, on_device=self._on_device)
            if bad is not None:
                step.bad.append(bad)

        stage.lane.submit(partial(step.spans.run, one.queue, one.action, one.name, apply))
        step.ends.append(stage.lane.record())


def _forward(action: Action) -> Action:
    """The forward pass of an action's stage and micro-batch."""
    return Action(action.stage, Kind.FORWARD, action.index)
