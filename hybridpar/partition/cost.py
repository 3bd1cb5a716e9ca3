"""What a stage costs: compute, transfers, and activations kept for the schedule.

Over one topological order a stage is an interval [i, j). Every part of its cost is a matrix over all intervals, made
in one go by two-dimensional prefix sums, so that the algorithms only look numbers up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybridpar.errors import PartitionError, UsageError
from hybridpar.partition.graph import UnitGraph

Matrix = NDArray[np.float64]
PlacementKind = Literal["linear", "loop", "v"]


@dataclass(frozen=True)
class Worker:
    """A process with one device.

    Attributes:
        device: Name of the device.
        lanes: Compute lanes on it; each runs one stage at a time, all of them beside each other.
        speed: Speed relative to the device that was profiled.
        memory: Bytes that all its lanes may use together; None for no cap.
        co_run: How much slower each lane runs while all lanes of the device are busy, as measured; a device that one
            lane fills is `lanes` times slower.

    Raises:
        UsageError: A value is out of its range; the message says which.
    """

    device: str = "cpu"
    lanes: int = 1
    speed: float = 1.0
    memory: int | None = None
    co_run: float | None = None

    def __post_init__(self) -> None:
        rules: list[tuple[str, float | None, bool, str]] = [
            ("lanes", self.lanes, self.lanes >= 1, "1 or more"),
            ("speed", self.speed, 0 < self.speed < math.inf, "above 0 and finite"),
            ("memory", self.memory, self.memory is None or self.memory >= 1, "1 byte or more, or None for no cap"),
            ("co_run", self.co_run, self.co_run is None or 0 < self.co_run < math.inf, "above 0 and finite, or None"),
        ]
        for name, value, holds, rule in rules:
            if not holds:
                raise UsageError(
                    f"a worker with {name} {value}", f"It must be {rule}.", "Correct --devices, --memory or --co-run."
                )

    @property
    def lane_speed(self) -> float:
        """Speed of one lane while all are busy."""
        if self.lanes == 1:
            return self.speed
        return self.speed / (self.lanes if self.co_run is None else self.co_run)


@dataclass(frozen=True)
class Link:
    """The wire between workers. Time of a transfer is latency plus bytes over bandwidth.

    Attributes:
        bytes_per_second: Bandwidth in one direction; None for a link that costs nothing.
        latency_ms: Time of an empty message.

    Raises:
        UsageError: A value is out of its range; the message says which.
    """

    bytes_per_second: float | None = None
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise UsageError(
                f"a link of {self.bytes_per_second} bytes per second",
                "Bandwidth is above 0; None is a link that costs nothing.",
                "Use Link(1.25e9) for 10 Gbit/s.",
            )
        if not 0 <= self.latency_ms < math.inf:
            raise UsageError(f"a latency of {self.latency_ms} ms", "It is 0 or more.", "Use Link(1.25e9, 0.1).")

    @property
    def is_free(self) -> bool:
        """Whether sending costs nothing."""
        return self.bytes_per_second is None and self.latency_ms == 0


@dataclass(frozen=True)
class Problem:
    """What a partition is asked for.

    Attributes:
        stages: Number of stages.
        workers: Who runs them; empty for one worker per stage, all alike.
        placement: `linear` gives each lane one stage, in order; `loop` deals stages out to lanes round and round;
            `v` goes up the lanes and down again.
        link: The wire between workers.
        in_flight: How many micro-batches a stage keeps activations of: `1f1b` (stages after it, and itself), `gpipe`
            (all of them), or a number.
        micro_batches: Micro-batches per step; `gpipe` keeps so many, `1f1b` no more than that.
        optimizer_copies: Tensors per parameter that the optimizer keeps (momentum 1, Adam 2), beside the parameter
            and its gradient.
        noise: Relative noise of the times; partitions closer than this (at most 1 %) count as equal.

    Raises:
        UsageError: A value is out of its range, or stages, lanes and placement do not fit each other.
    """

    stages: int
    workers: tuple[Worker, ...] = ()
    placement: PlacementKind = "linear"
    link: Link = field(default_factory=Link)
    in_flight: str | int = "1f1b"
    micro_batches: int | None = None
    optimizer_copies: int = 1
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise UsageError(f"{self.stages} stages", "A model has at least one stage.", "Ask for --stages 1 or more.")
        if self.in_flight not in ("1f1b", "gpipe") and (not isinstance(self.in_flight, int) or self.in_flight < 1):
            raise UsageError(
                f"in-flight {self.in_flight!r}", "It is 1f1b, gpipe, or a number of micro-batches from 1.", "Use 1f1b."
            )
        lanes, stages = len(self.lanes), self.stages
        fits = {"linear": lanes == stages, "loop": stages % lanes == 0, "v": stages == 2 * lanes}[self.placement]
        if not fits:
            rule = {
                "linear": "A linear placement has one lane per stage.",
                "loop": "A looped placement has the same number of stages on every lane.",
                "v": "A V placement has two stages on every lane.",
            }[self.placement]
            want = 2 * lanes if self.placement == "v" else lanes
            raise UsageError(f"{stages} stages on {lanes} lanes", rule, f"Ask for --stages {want}, or other devices.")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise UsageError(
                f"{self.micro_batches} micro-batches", "A step has at least one.", "Use --micro-batches 8."
            )
        if self.optimizer_copies < 0:
            raise UsageError(
                f"{self.optimizer_copies} optimizer copies",
                "An optimizer keeps no tensor per parameter, or some.",
                "Use --optimizer-copies 1 for momentum, 2 for Adam.",
            )

    @cached_property
    def lanes(self) -> tuple[tuple[int, int], ...]:
        """All lanes in order, each as worker and lane on that worker."""
        return tuple((index, lane) for index, worker in enumerate(self.everyone) for lane in range(worker.lanes))

    @property
    def everyone(self) -> tuple[Worker, ...]:
        """The workers; where none are given, as many as the placement needs, all alike."""
        return self.workers or (Worker(),) * (self.stages // 2 if self.placement == "v" else self.stages)

    def lane_of(self, stage: int) -> int:
        """Index into `lanes` of the lane that runs a stage.

        Args:
            stage: Number of the stage.
        """
        count = len(self.lanes)
        if self.placement == "v" and stage >= count:
            return 2 * count - 1 - stage
        return stage % count

    def worker_of(self, stage: int) -> int:
        """Index of the worker that runs a stage.

        Args:
            stage: Number of the stage.
        """
        return self.lanes[self.lane_of(stage)][0]

    def worker(self, stage: int) -> Worker:
        """The worker that runs a stage.

        Args:
            stage: Number of the stage.
        """
        return self.everyone[self.worker_of(stage)]

    def flights(self, stage: int) -> int:
        """Micro-batches whose activations a stage keeps at its peak.

        Args:
            stage: Number of the stage.
        """
        most = self.micro_batches or 4 * len(self.lanes)
        if isinstance(self.in_flight, int):
            return min(self.in_flight, most)
        return most if self.in_flight == "gpipe" else min(most, self.stages - stage)

    def memory_of(self, stage: int) -> float:
        """Bytes that a stage may use: an equal part of its worker's, or infinite without a cap.

        Args:
            stage: Number of the stage.
        """
        home = self.worker_of(stage)
        memory = self.everyone[home].memory
        if memory is None:
            return math.inf
        return memory / sum(self.worker_of(other) == home for other in range(self.stages))


class IntervalCosts:
    """Costs of all intervals of a topological order."""

    def __init__(self, graph: UnitGraph) -> None:
        count = len(graph)
        last = count - 1
        self.count = count
        self.empty = np.tri(count + 1, dtype=bool)
        self.compute = np.where(self.empty, np.inf, _sums([unit.ms for unit in graph.units]))
        self.parameters = _sums([unit.parameter_bytes for unit in graph.units])
        uses = [
            (value, sorted({*value.consumers, last}) if value.is_output else value.consumers) for value in graph.values
        ]
        self.incoming = _distinct(count, ((value.bytes, value.producer, users) for value, users in uses), inputs=True)
        self.returning = _distinct(
            count, ((value.gradient_bytes, value.producer, users) for value, users in uses), inputs=True
        )
        self.saved = _distinct(count, ((item.bytes, -1, item.units) for item in graph.saved), inputs=False)

    def stage_ms(self, problem: Problem, stage: int) -> Matrix:
        """Time of every interval as a given stage: compute at its lane's speed, and its transfers."""
        time = self.compute / problem.worker(stage).lane_speed
        if stage and not problem.link.is_free and problem.worker_of(stage) != problem.worker_of(stage - 1):
            rate = problem.link.bytes_per_second or np.inf
            transfers = (self.incoming > 0).astype(float) + (self.returning > 0)
            time = time + (self.incoming + self.returning) / rate * 1e3 + problem.link.latency_ms * transfers
        return time

    def stage_bytes(self, problem: Problem, stage: int) -> Matrix:
        """Memory of every interval as a given stage: parameters, gradients, optimizer state, activations in flight."""
        copies = 2 + problem.optimizer_copies
        return problem.flights(stage) * self.saved + copies * self.parameters


def _sums(values: list[float] | list[int]) -> Matrix:
    before = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
    sums: Matrix = np.maximum(before[None, :] - before[:, None], 0.0)
    return sums


def _distinct(count: int, items: Iterable[tuple[int, int, tuple[int, ...] | list[int]]], *, inputs: bool) -> Matrix:
    """Bytes of the distinct items that an interval uses but does not make.

    An item made at p and used at c1 < c2 < ... counts for [i, j) where some use is inside and p < i. For i between one
    use and the next, that is every j beyond the next use: a rectangle, added by its corners.
    """
    corners = np.zeros((count + 2, count + 2))
    for size, producer, users in items:
        start = max(producer + 1, 1) if inputs else 0
        for user in users:
            if user >= start:
                corners[start, user + 1] += size
                corners[user + 1, user + 1] -= size
                start = user + 1
    sums: Matrix = corners.cumsum(axis=0).cumsum(axis=1)
    return sums[: count + 1, : count + 1]


def require_units(graph: UnitGraph, stages: int) -> None:
    """Refuse more stages than units."""
    if stages > len(graph):
        raise PartitionError(
            f"{stages} stages are asked for, the model has {len(graph)} unit(s)",
            "Every stage holds at least one unit; what must stay together is one unit.",
            f"Ask for --stages {len(graph)} or fewer.",
        )
