"""Times and bytes of the steps of a run, and their combination over workers for the summary.

In a pipeline the next step is issued while one still runs, so the host cannot see how long a step had to wait for its
data: that is the time in which this worker's lanes had nothing to do between two steps.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hybridpar.observe.summary import STEP_PARTS, divided_step, step_shares
from hybridpar.schedule.spans import Computed, StepSpans, joint_bubble
from hybridpar.sync.figures import SyncFigures

#: First steps of a run, which count only where there are no others.
_WARM_UP = 3

_T = TypeVar("_T")


def _steady(values: list[_T]) -> list[_T]:
    return values[_WARM_UP:] or values


@dataclass(frozen=True)
class StepTimes:
    """One step of a worker: `step_ms` is the sum of the other three.

    Attributes:
        compute_ms: All but the next two.
        exposed_sync_ms: Waiting for gradients that computation did not hide.
        data_ms: Waiting for data.
    """

    compute_ms: float
    exposed_sync_ms: float
    data_ms: float

    @property
    def step_ms(self) -> float:
        """Time from the end of the step before to the end of this one."""
        return self.compute_ms + self.exposed_sync_ms + self.data_ms


class StepClock:
    """Divides the time between the ends of steps, for steps that are issued ahead."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._end: float | None = None
        self._away: list[tuple[float, float]] = []

    @contextmanager
    def away(self) -> Iterator[None]:
        """Inside, the host does something else than to train; lanes that run dry meanwhile do not wait for data."""
        start = self._clock()
        try:
            yield
        finally:
            self._away.append((start, self._clock()))

    def divide(self, spans: StepSpans, host_data_ms: float, exchange_ms: float = 0.0) -> tuple[StepTimes, StepSpans]:
        """The times of the next step."""
        if self._end is None:
            begun, data = spans.origin, host_data_ms / 1e3
        else:
            spans = spans.waiting_since(self._end)
            begun = max(spans.origin, self._end)  # on other lanes it may have begun before the last one ended
            away = sum(max(0.0, min(back, begun) - max(left, self._end)) for left, back in self._away)
            data = max(0.0, begun - self._end - away)
        self._end = max(spans.origin + spans.step_ms / 1e3, begun)
        self._away = [(left, back) for left, back in self._away if back > self._end]
        busy = 1e3 * (self._end - begun)
        exposed = min(spans.exposed_sync_ms, busy)
        self._end += exchange_ms / 1e3
        return StepTimes(busy - exposed, exposed + exchange_ms, 1e3 * data), spans


#: Figures that are told as medians over the steps, but bytes that were sent: most steps may send nothing.
MEDIANS = ("bytes_sent", "bytes_pulled", "encode_ms", "wire_ms", "decode_ms", "covered_ms")

#: Names in the summary, where they differ: `sync_ms` here is added over the lanes, in the summary it is not.
_TOLD_AS = {"covered_ms": "sync_ms"}


@dataclass
class Timings:
    """This worker's own share of the figures that the summary takes over the workers, one value per step.

    Attributes:
        times: What steps took.
        bytes_sent: Bytes that this worker sent.
        bytes_pulled: Bytes of weights that it received from servers.
        encode_ms: Milliseconds of encoding, over all lanes.
        wire_ms: Of transfers.
        decode_ms: Of decoding.
        covered_ms: Of syncing, whatever ran beside it.
        sync_ms: Of syncing, added over the lanes.
        computed: What passes and transfers of a pipeline took.
        bytes_before: Bytes of the gradients that were compressed.
        bytes_after: Bytes of their messages.
    """

    times: list[StepTimes] = field(default_factory=list)
    bytes_sent: list[float] = field(default_factory=list)
    bytes_pulled: list[float] = field(default_factory=list)
    encode_ms: list[float] = field(default_factory=list)
    wire_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    covered_ms: list[float] = field(default_factory=list)
    sync_ms: list[float] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0

    def add(
        self,
        times: StepTimes,
        bytes_sent: int,
        spans: StepSpans | None = None,
        sync: SyncFigures | None = None,
        bytes_pulled: int | None = None,
    ) -> None:
        """Take a step into account."""
        self.times.append(times)
        self.bytes_sent.append(bytes_sent)
        if bytes_pulled is not None:
            self.bytes_pulled.append(bytes_pulled)
        if sync is not None:
            self.bytes_before += sync.bytes_before
            self.bytes_after += sync.bytes_after
            parts = ("encode_ms", sync.encode_ms), ("wire_ms", sync.wire_ms), ("decode_ms", sync.decode_ms)
            for key, value in (*parts, ("covered_ms", sync.sync_ms)):
                if value is not None:
                    getattr(self, key).append(value)
        if spans is not None and spans.spans:
            self.sync_ms.append(spans.sync_ms)
            self.computed.append(spans.computed)

    def steps_per_second(self) -> float | None:
        """Steps over the time that they took; of steps that are not alike, as a median would not tell it."""
        times = _steady(self.times)
        total = sum(one.step_ms for one in times)
        return 1e3 * len(times) / total if total > 0 else None

    def mean_step(self) -> dict[str, float]:
        """What the summary says of steps that are not alike: means of their time and its parts."""
        times = _steady(self.times)
        if not times:
            return {}
        parts = {key: statistics.fmean(getattr(one, key) for one in times) for key in STEP_PARTS}
        return {key: round(value, 3) for key, value in {**parts, "step_ms_mean": sum(parts.values())}.items()}

    def share(self, ahead: float = 0.0) -> Share:
        """What this worker tells the others; without the first steps where there are others."""
        medians = {
            key: (statistics.fmean if key == "bytes_sent" else statistics.median)(_steady(values))
            for key in MEDIANS
            if (values := getattr(self, key))
        }
        times = _steady(self.times)
        sync = _steady(self.sync_ms)
        exposed = [one.exposed_sync_ms for one in times] if sync else []
        moved = [one._replace(begin=one.begin - ahead, end=one.end - ahead) for one in _steady(self.computed)]
        parts = step_shares([(one.compute_ms, one.exposed_sync_ms, one.data_ms) for one in times])
        return Share(medians, parts, sum(sync), sum(exposed), moved, self.bytes_before, self.bytes_after)


@dataclass(frozen=True)
class Share:
    """One worker's figures.

    Attributes:
        medians: By the names of `MEDIANS`; empty where it did no step.
        parts: Where the time of its steps went, see `hybridpar.observe.summary.step_shares`.
        sync_ms: Time of all its sums of gradients.
        exposed_ms: What of it outlasted computation.
        computed: Per step, on one clock for all workers.
        bytes_before: What all-reduces of its gradients in float32 would have sent in all steps.
        bytes_after: What was sent of them.
    """

    medians: dict[str, float]
    parts: tuple[float, ...] | None
    sync_ms: float
    exposed_ms: float
    computed: list[Computed]
    bytes_before: int = 0
    bytes_after: int = 0


def combine(shares: Sequence[Share], replicas: Sequence[Sequence[int]], step_ms: float | None = None) -> dict[str, Any]:
    """The figures of a run from those of its workers."""
    parts = divided_step(step_ms, [one.parts for one in shares])
    result: dict[str, Any] = {key: value for key, value in parts.items() if value is not None}
    for key in MEDIANS:
        known = [one.medians[key] for one in shares if key in one.medians]
        if known:
            result[_TOLD_AS.get(key, key)] = round(statistics.mean(known), 3)
    if sent := sum(one.bytes_after for one in shares):
        result["compression_ratio"] = round(sum(one.bytes_before for one in shares) / sent, 3)
    bubbles = [
        joint_bubble(step)
        for ranks in replicas
        for step in zip(*(shares[rank].computed for rank in ranks), strict=False)
    ]
    if bubbles:
        result["bubble"] = round(statistics.mean(bubbles), 4)
    total = sum(one.sync_ms for one in shares)
    if total > 0:
        result["overlap"] = round(max(0.0, 1 - sum(one.exposed_ms for one in shares) / total), 4)
    return result


@dataclass
class RunningMean:
    """Mean of a value over samples; non-finite values are left out."""

    sum: float = 0.0
    weight: int = 0

    def add(self, value: float, weight: int) -> None:
        """Take a value for `weight` samples into account."""
        if math.isfinite(value):
            self.sum += value * weight
            self.weight += weight

    @property
    def value(self) -> float:
        """The mean so far; NaN before the first finite value."""
        return self.sum / self.weight if self.weight else math.nan
