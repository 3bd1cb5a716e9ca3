"""Predicts the step time and the memory of candidate plans, by simulating the list of actions that would be run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from hybridpar.planner.codecs import PLAIN
from hybridpar.planner.costs import CandidateCosts
from hybridpar.planner.memory import device_bytes
from hybridpar.planner.space import Candidate, Space, stage_speeds
from hybridpar.schedule.actions import Schedule
from hybridpar.schedule.costs import Costs, Link
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import ScheduleRequest, make, order_of_replica
from hybridpar.schedule.simulate import Simulation, simulate


@dataclass(frozen=True)
class Parts:
    """What a step is predicted to take, in milliseconds, and where it goes; the parts add up to the step.

    Attributes:
        step: The whole step.
        compute: Of the lane that computes longest.
        bubble: What that lane waits until the last lane has computed.
        sync: By which exchanging gradients outlasts computing, were codecs free.
        codec: What writing and reading the messages of codecs adds.
        update: The agreement of the workers, and the optimizer.
    """

    step: float
    compute: float
    bubble: float
    sync: float
    codec: float
    update: float


@dataclass(frozen=True)
class Outcome:
    """A candidate with what it is predicted to take.

    Attributes:
        candidate: The candidate.
        step_ms: One step.
        score: What candidates are ranked by: `step_ms` times the steps to the target over those of float32.
        memory_bytes: The most that a device needs, with the margin.
        bubble: Part of the time of computing in which lanes wait.
        exposed_sync_ms: By how much the exchange of gradients outlasts computing.
        bytes_sent: Mean over the workers.
        peak_saved_bytes: The most that a worker keeps for backward passes.
        limit_bytes: Memory of the device that needs `memory_bytes`: of unequal replicas the one with the least left.
    """

    candidate: Candidate
    step_ms: float
    score: float
    memory_bytes: float
    bubble: float
    exposed_sync_ms: float
    bytes_sent: float
    peak_saved_bytes: int
    limit_bytes: float = math.inf

    @property
    def fits(self) -> bool:
        """Whether all devices have the memory that they need."""
        return self.memory_bytes <= self.limit_bytes


class Evaluator(CandidateCosts):
    """Predicts the candidates of a space."""

    def __init__(self, space: Space) -> None:
        super().__init__(space)
        self._schedule = cache(self._make_schedule)

    def simulation(self, candidate: Candidate, costs: Costs, replica: int = 0) -> Simulation:
        """One step, simulated over the actions of all workers of a replica; other replicas do the same."""
        counts = [len(buckets) for buckets in costs.buckets] if candidate.layout.replicas > 1 else ()
        schedule, layout = self.schedule(candidate, replica), self.layout(candidate, replica)
        program = lower(schedule, layout, counts, costs=costs)
        return simulate(program, costs)

    def _simulations(self, candidate: Candidate) -> dict[int, Simulation]:
        """A step of every kind of replica, by the first one of it."""
        replicas = sorted(set(self.kinds(candidate.layout)))
        return {
            replica: self.simulation(candidate, self.costs(candidate, replica=replica), replica) for replica in replicas
        }

    def outcome(self, candidate: Candidate) -> Outcome:
        """What a candidate is predicted to take."""
        steps = self._simulations(candidate)
        slowest = max(steps.values(), key=lambda step: step.step_ms)
        codec_ms, link_ms, outer_bytes = self.outer(candidate)
        step_ms = slowest.step_ms + codec_ms + link_ms
        layout = candidate.layout
        sent = sum(sum(steps[kind].bytes_sent) for kind in self.kinds(layout))
        if candidate.sharded:
            sent += layout.replicas * (layout.replicas - 1) * sum(self.stepped_bytes(candidate))
        devices = [
            device
            for replica, step in steps.items()
            for device in device_bytes(self, candidate, step.peak_saved_bytes, replica)
        ]
        needed, limit = max(devices, key=lambda device: (device[0] / device[1], device[0]))
        return Outcome(
            candidate,
            step_ms,
            step_ms * candidate.codec.steps,
            needed,
            min(1.0, max(0.0, slowest.bubble)),
            max(0.0, *slowest.exposed_sync_ms) + codec_ms + link_ms,
            sent / layout.workers + outer_bytes,
            max(max(step.peak_saved_bytes) for step in steps.values()),
            limit,
        )

    def parts(self, candidate: Candidate) -> Parts:
        """Where the time of a candidate's step goes."""
        steps = {replica: step.step_ms for replica, step in self._simulations(candidate).items()}
        replica = max(steps, key=steps.__getitem__)
        whole_ms = steps[replica]
        costs = self.costs(candidate, replica=replica)
        buckets = tuple(
            tuple(replace(bucket, encode_ms=0.0, decode_ms=0.0) for bucket in stage) for stage in costs.buckets
        )
        free = self.simulation(candidate, replace(costs, buckets=buckets), replica)
        codec_ms, link_ms, _ = self.outer(candidate)
        busy, after = max(free.busy_ms), free.step_ms - free.compute_ms
        layout, updates = self.layout(candidate, replica), costs.step_ms or (0.0,) * candidate.layout.stages
        # A lane updates its stages one after the other.
        updating = max(sum(updates[stage] for stage in layout.stages_on(lane)) for lane in range(layout.lanes))
        update = min(after, costs.control_ms + updating)
        return Parts(
            whole_ms + codec_ms + link_ms,
            busy,
            free.compute_ms - busy,
            after - update + link_ms,
            whole_ms - free.step_ms + codec_ms,
            update,
        )

    def schedule(self, candidate: Candidate, replica: int = 0) -> Schedule:
        """The order of computation of a replica; replicas that place their stages alike have one."""
        replica = 0 if candidate.layout.is_equal else replica
        return self._schedule(replace(candidate, codec=PLAIN, sharded=False), replica)

    def _make_schedule(self, candidate: Candidate, replica: int) -> Schedule:
        """A schedule; `greedy` is made for the link that the cut is for, as it will be by who follows the plan."""
        figures, layout = self.figures(candidate, replica), self.layout(candidate, replica)
        speeds = stage_speeds(self.inputs, candidate.layout)
        # As the plan will say them.
        forward, backward = (
            tuple(round(time / speed, 4) for time, speed in zip(times, speeds, strict=True))
            for times in (figures.forward_ms, figures.backward_ms)
        )
        link = Link(bytes_per_second=candidate.cut.link_speed)
        costs = Costs(forward, backward, saved_bytes=figures.saved_bytes, link=link)
        request = ScheduleRequest(layout, candidate.micro_batches, costs)
        name = candidate.schedule
        return make(name if candidate.layout.is_equal else order_of_replica(name, layout), request)
