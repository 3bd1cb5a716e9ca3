"""How concurrent work on shared cores or a shared link slows down, for the simulator.

An event loop over jobs whose speed changes while they run. A job is a row of phases; a phase says how long it takes
when nothing disturbs it, and which part of which resources it uses meanwhile. Where more is used than there is,
all users of the resource slow down in the same proportion (processor sharing), or, of one that is *fair*, only those
that want more than an equal part; and a job runs as fast as the most crowded of its resources lets it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

#: Loads are sums and differences of floats; so much above the capacity is still not above it.
_TOLERANCE = 1e-9


class Resource:
    """Something of which there is a limited amount at any time.

    Args:
        capacity: The amount, in the unit that phases use.
        fair: Who wants little gets it whole, and the others divide the rest evenly (max-min fairness), as an operating
            system shares its cores: a thread that moves bytes now and then is not slowed by one that always computes.
            Else all users slow down in the same proportion, as those of a wire do.
    """

    __slots__ = ("_fair", "capacity", "jobs", "load", "share")

    def __init__(self, capacity: float, fair: bool = False) -> None:
        self.capacity = capacity
        self.load = 0.0
        #: What a user gets of its full speed; of a fair resource the amount that nobody gets more of.
        self.share = math.inf if fair else 1.0
        self._fair = fair
        self.jobs: dict[Job, float] = {}  # with what each uses, in order of arrival, so that runs repeat exactly

    def add(self, job: Job, amount: float) -> bool:
        """A job comes; true if the share of the users changed with it.

        Args:
            job: The job.
            amount: What it uses at full speed.
        """
        self.jobs[job] = amount
        self.load += amount
        return self._divide()

    def remove(self, job: Job) -> bool:
        """A job goes; true if the share of the users changed with it.

        Args:
            job: The job.
        """
        self.load -= self.jobs.pop(job)
        return self._divide()

    def speed(self, amount: float) -> float:
        """What a user of so much gets of its full speed.

        Args:
            amount: What it uses at full speed.

        Returns:
            A factor from 0 to 1.
        """
        return min(1.0, self.share / amount) if self._fair else self.share

    def _divide(self) -> bool:
        before = self.share
        crowded = self.load > self.capacity * (1 + _TOLERANCE)
        if self._fair:
            self.share = self._level() if crowded else math.inf
        else:
            self.share = self.capacity / self.load if crowded else 1.0
        return self.share != before

    def _level(self) -> float:
        """The amount that nobody gets more of: where all of the capacity is given out."""
        left, level = self.capacity, 0.0
        amounts = sorted(self.jobs.values())
        for place, amount in enumerate(amounts):
            level = left / (len(amounts) - place)
            if amount >= level:
                break
            left -= amount
        return level


class Phase(NamedTuple):
    """A part of a job.

    Attributes:
        ms: How long it takes undisturbed.
        uses: Resources with the amount that it uses at full speed.
    """

    ms: float
    uses: tuple[tuple[Resource, float], ...] = ()


class Job:
    """Phases that run one after the other.

    Args:
        phases: The phases; those of 0 ms end as they begin.
        on_phase: Called with the number of each phase when it ends.
    """

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
        """Begin a job now.

        Args:
            job: The job.
        """
        phase = job.phases[job.number]
        if phase.ms <= 0:
            self._over.append(job)
            return
        job.left, job.since, job.rate = phase.ms, self.now, 0.0
        for resource, amount in phase.uses:
            if resource.add(job, amount):
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
        for resource, _ in job.phases[job.number].uses:
            if resource.remove(job):
                self._adjust(resource)

    def _adjust(self, resource: Resource) -> None:
        for job in resource.jobs:
            self._set_rate(job)

    def _set_rate(self, job: Job) -> None:
        rate = 1.0
        for resource, amount in job.phases[job.number].uses:
            rate = min(rate, resource.speed(amount))
        if rate == job.rate:
            return
        job.left = max(0.0, job.left - (self.now - job.since) * job.rate)
        job.since, job.rate = self.now, rate
        job.version += 1
        self._pushed += 1
        heapq.heappush(self._heap, (self.now + job.left / rate, self._pushed, job.version, job))
