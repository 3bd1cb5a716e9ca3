"""Turns costs of actions into phases on shared resources.

Every worker has a processor, a way out to the network and a way in. An event loop runs jobs whose speed changes while
they run. A job is a row of phases; a phase says how long it takes when nothing disturbs it, and which resources it uses
meanwhile. Where more jobs use a resource than it has room for, all of them slow down in the same proportion (processor
sharing), and a job runs as fast as the most crowded of its resources lets it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hybridpar.schedule.actions import Action, Kind
from hybridpar.schedule.costs import Costs
from hybridpar.schedule.layout import Layout


class Resource:
    """Something that a limited number of jobs can use at full speed."""

    __slots__ = ("capacity", "jobs", "share")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        #: What a user gets of its full speed.
        self.share = 1.0
        self.jobs: dict[Job, None] = {}  # in order of arrival, so that runs repeat exactly

    def add(self, job: Job) -> bool:
        """A job comes; true if the share of the users changed with it."""
        self.jobs[job] = None
        return self._divide()

    def remove(self, job: Job) -> bool:
        """A job goes; true if the share of the users changed with it."""
        del self.jobs[job]
        return self._divide()

    def _divide(self) -> bool:
        before, self.share = self.share, min(1.0, self.capacity / max(1, len(self.jobs)))
        return self.share != before


class Phase(NamedTuple):
    """A part of a job.

    Attributes:
        ms: How long it takes undisturbed.
        uses: Resources that it uses.
    """

    ms: float
    uses: tuple[Resource, ...] = ()


class Job:
    """Phases that run one after the other."""

    __slots__ = ("left", "number", "on_phase", "phases", "rate", "since", "version")

    def __init__(self, phases: Sequence[Phase], on_phase: Callable[[int], None]) -> None:
        self.phases = phases
        self.on_phase = on_phase
        self.number = 0
        self.left = 0.0
        self.rate = 0.0
        self.since = 0.0
        self.version = 0


class EventLoop:
    """Runs jobs in simulated time."""

    def __init__(self) -> None:
        #: The time, in milliseconds.
        self.now = 0.0
        self._pushed = 0
        self._heap: list[tuple[float, int, int, Job]] = []
        # Jobs whose current phase takes no time. They do not end inside `start`: a long row of them would nest calls.
        self._over: deque[Job] = deque()

    def start(self, job: Job) -> None:
        """Begin a job now."""
        phase = job.phases[job.number]
        if phase.ms <= 0:
            self._over.append(job)
            return
        job.left, job.since, job.rate = phase.ms, self.now, 0.0
        for resource in phase.uses:
            if resource.add(job):
                self._adjust(resource)
        self._set_rate(job)

    def run(self) -> None:
        """Go on until no job is left; what `on_phase` starts is run too."""
        while True:
            if self._over:
                job = self._over.popleft()
            elif self._heap:
                time, _, version, job = heapq.heappop(self._heap)
                if version != job.version:
                    continue  # its speed has changed since, and it is in the heap again
                self.now = time
                self._leave(job)
            else:
                return
            ended = job.number
            job.number += 1
            job.on_phase(ended)
            if job.number < len(job.phases):
                self.start(job)

    def _leave(self, job: Job) -> None:
        for resource in job.phases[job.number].uses:
            if resource.remove(job):
                self._adjust(resource)

    def _adjust(self, resource: Resource) -> None:
        for job in resource.jobs:
            self._set_rate(job)

    def _set_rate(self, job: Job) -> None:
        rate = 1.0
        for resource in job.phases[job.number].uses:
            rate = min(rate, resource.share)
        if rate == job.rate:
            return
        job.left = max(0.0, job.left - (self.now - job.since) * job.rate)
        job.since, job.rate = self.now, rate
        job.version += 1
        self._pushed += 1
        heapq.heappush(self._heap, (self.now + job.left / rate, self._pushed, job.version, job))


class _Worker:
    """The resources of a worker."""

    def __init__(self, lanes: int, costs: Costs) -> None:
        self.out, self.into = Resource(1), Resource(1)
        #: What all-reduces share, out of the worker and into it.
        self.sync = (Resource(1), Resource(1)) if costs.sync_own_link else (self.out, self.into)
        #: What lanes compute with, and codecs work on.
        self.processor = (Resource(max(1, lanes)),)


class Machine:
    """The workers of one replica."""

    def __init__(self, layout: Layout, costs: Costs) -> None:
        self._layout, self._costs = layout, costs
        self._workers = [_Worker(layout.worker_of.count(worker), costs) for worker in range(layout.workers)]
        self._edges = {(edge.source, edge.target): edge for edge in layout.edges}

    def compute(self, action: Action, marks: Sequence[float] = ()) -> list[Phase]:
        """Phases of a forward or backward pass or an optimizer step."""
        time = self._costs.compute_ms(action.stage, action.kind)
        uses = self._workers[self._layout.home(action.stage)].processor
        starts = (0.0, *marks)
        return [Phase(time * (end - start), uses) for start, end in zip(starts, (*marks, 1.0), strict=True)]

    def transfer_bytes(self, send: Action) -> int:
        """What a send sends."""
        assert send.peer is not None
        if send.kind is Kind.SEND_FORWARD:
            return self._edges[send.stage, send.peer].bytes
        return self._edges[send.peer, send.stage].gradient_bytes

    def transfer(self, send: Action) -> list[Phase]:
        """Phases of a send together with its receive: the latency, then the bytes."""
        assert send.peer is not None
        layout, costs = self._layout, self._costs
        pair = (layout.home(send.stage), layout.home(send.peer))
        source, target = (self._workers[worker] for worker in pair)
        link = costs.links.get(pair, costs.link)
        time = link.wire_ms(self.transfer_bytes(send))
        shared = () if pair in costs.links else (source.out, target.into)
        return [Phase(link.latency_ms), Phase(time, shared)]

    def sync_bytes(self, action: Action) -> float:
        """What a worker sends, and receives, in an all-reduce."""
        return self._costs.sync_factor * self._costs.buckets[action.stage][action.index or 0].bytes

    def sync(self, action: Action) -> list[Phase]:
        """Phases of an all-reduce: encode, latency, bytes, decode. With one replica there is nothing to do."""
        costs = self._costs
        if costs.replicas == 1:
            return [Phase(0.0)]
        worker = self._workers[self._layout.home(action.stage)]
        bucket = costs.buckets[action.stage][action.index or 0]
        return [
            Phase(bucket.encode_ms, worker.processor),
            Phase(bucket.latency_ms),
            Phase(bucket.wire_ms, worker.sync),
            Phase(bucket.decode_ms, worker.processor),
        ]
