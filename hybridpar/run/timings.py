"""Times and bytes of the steps of a run, and their combination over workers for the summary.

In a pipeline the next step is issued while one still runs, so the host cannot see how long a step had to wait for its
data: that is the time in which this worker's lanes had nothing to do between two steps.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hybridpar.observe.records import STEP_FIGURES, STEP_PARTS, StepRecord
from hybridpar.observe.running import WARM_UP_STEPS
from hybridpar.observe.summary import divided_step, reduced, step_shares
from hybridpar.schedule.spans import Computed, StepSpans, joint_bubble
from hybridpar.sync.figures import SyncFigures
from hybridpar.train.results import StepResult

_Values = TypeVar("_Values", list[Computed], "array[float]")


def _steady(values: _Values) -> _Values:
    return values[WARM_UP_STEPS:] or values


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
        #: How far this worker's clock is ahead of rank 0's, in seconds; known where there are stages.
        self.ahead = 0.0

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


@dataclass(frozen=True)
class Step:
    """A step of this worker that is over.

    Attributes:
        result: What the trainer returned.
        record: Its figures.
        spans: What ran in it; with stages without the waiting that lies before it.
    """

    result: StepResult
    record: StepRecord
    spans: StepSpans


def measured_step(result: StepResult, data_ms: float, epoch: int, clock: StepClock) -> Step:
    """A step in figures; reading them waits for the step. `data_ms` is how long the host waited for its batch."""
    outcome = result.outcome
    spans, exposed = outcome.spans, outcome.exposed_sync_ms
    if result.staged and spans.spans:
        times, spans = clock.divide(spans, data_ms, max(0.0, exposed - spans.exposed_sync_ms))
    else:
        times = StepTimes(result.host_ms - exposed, exposed, data_ms)
    record = StepRecord(
        step=result.step,
        epoch=epoch,
        loss=result.loss,
        lr=result.lr,
        samples=outcome.samples,
        step_ms=times.step_ms,
        compute_ms=times.compute_ms,
        exposed_sync_ms=times.exposed_sync_ms,
        data_ms=times.data_ms,
        bytes_sent=outcome.bytes_sent,
        skipped=result.skipped,
        grad_norm=result.grad_norm,
        staleness=result.staleness,
        bytes_pulled=outcome.bytes_pulled,
        **_sync_fields(outcome.sync, exposed),
    )
    return Step(result, record, spans)


def _sync_fields(sync: SyncFigures, exposed_ms: float) -> dict[str, Any]:
    """What the sync of gradients took; nothing where none were sent."""
    if not sync.bytes_before:
        return {}
    return {
        "bytes_before": sync.bytes_before,
        "bytes_after": sync.bytes_after,
        "encode_ms": sync.encode_ms,
        "wire_ms": sync.wire_ms,
        "decode_ms": sync.decode_ms,
        "sync_ms": sync.sync_ms,
        "residual_norm": sync.residual_norm,
        "residual_norms": sync.residual_norms,
        "hidden_share": sync.hidden_share(exposed_ms),
    }


#: Figures of a step that the summary takes over the workers.
_OF_WORKERS = tuple(row for row in STEP_FIGURES if row.workers)


class Timings:
    """This worker's own share of the figures that the summary takes over the workers."""

    def __init__(self) -> None:
        columns = (*STEP_PARTS, *(row.name for row in _OF_WORKERS), "bytes_before", "bytes_after")
        self._columns = {name: array("d") for name in columns}  # of each figure where it was measured
        self._sync_ms = array("d")  # of a step's sums of gradients, added over the lanes
        self._computed: list[Computed] = []

    def add(self, record: StepRecord, spans: StepSpans | None = None) -> None:
        """Take a step into account, with what ran in it where the model is cut into stages."""
        for name, column in self._columns.items():
            if (value := getattr(record, name)) is not None:
                column.append(value)
        if spans is not None and spans.spans:
            self._sync_ms.append(spans.sync_ms)
            self._computed.append(spans.computed)

    @property
    def _parts(self) -> list[tuple[float, ...]]:
        """The parts of each step."""
        return list(zip(*(_steady(self._columns[key]) for key in STEP_PARTS), strict=True))

    def steps_per_second(self) -> float | None:
        """Steps over the time that they took; of steps that are not alike, as a median would not tell it."""
        total = sum(map(sum, self._parts))
        return 1e3 * len(self._parts) / total if total > 0 else None

    def mean_step(self) -> dict[str, float]:
        """What the summary says of steps that are not alike: means of their time and its parts."""
        if not self._parts:
            return {}
        means = dict(zip(STEP_PARTS, map(statistics.fmean, zip(*self._parts, strict=True)), strict=True))
        return {key: round(value, 3) for key, value in {**means, "step_ms_mean": sum(means.values())}.items()}

    def share(self, ahead: float = 0.0) -> Share:
        """What this worker tells the others; without the first steps where there are others."""
        figures = {row.summary: reduced(row, _steady(self._columns[row.name])) for row in _OF_WORKERS}
        return Share(
            figures,
            parts=step_shares(self._parts),
            sync_ms=sum(_steady(self._sync_ms)),
            exposed_ms=sum(_steady(self._columns["exposed_sync_ms"])) if self._sync_ms else 0.0,
            computed=[
                computed._replace(begin=computed.begin - ahead, end=computed.end - ahead)
                for computed in _steady(self._computed)
            ],
            bytes_before=sum(self._columns["bytes_before"]),
            bytes_after=sum(self._columns["bytes_after"]),
        )


@dataclass(frozen=True)
class Share:
    """One worker's figures.

    Attributes:
        figures: By their keys in the summary; None where they were not measured.
        parts: Where the time of its steps went, see `hybridpar.observe.summary.step_shares`.
        sync_ms: Time of all its sums of gradients.
        exposed_ms: What of it outlasted computation.
        computed: Per step, on one clock for all workers.
        bytes_before: What all-reduces of its gradients in float32 would have sent in all steps.
        bytes_after: What was sent of them.
        peak_saved_bytes: The most that its stages kept for backward passes; None without stages.
        memory_bytes: The most memory that training needed; None where the system does not tell.
    """

    figures: dict[str, float | None]
    parts: tuple[float, ...] | None
    sync_ms: float
    exposed_ms: float
    computed: list[Computed]
    bytes_before: float = 0.0
    bytes_after: float = 0.0
    peak_saved_bytes: int | None = None
    memory_bytes: int | None = None


def combine(shares: Sequence[Share], replicas: Sequence[Sequence[int]], step_ms: float | None = None) -> dict[str, Any]:
    """The figures of a run from those of its workers."""
    parts = divided_step(step_ms, [share.parts for share in shares])
    result: dict[str, Any] = {key: value for key, value in parts.items() if value is not None}
    for row in _OF_WORKERS:
        known = [value for share in shares if (value := share.figures[row.summary]) is not None]
        if known:
            result[row.summary] = reduced(replace(row, reduce="mean"), known)
    if sent := sum(share.bytes_after for share in shares):
        result["compression_ratio"] = round(sum(share.bytes_before for share in shares) / sent, 3)
    bubbles = [
        joint_bubble(step)
        for ranks in replicas
        for step in zip(*(shares[rank].computed for rank in ranks), strict=False)
    ]
    if bubbles:
        result["bubble"] = round(statistics.mean(bubbles), 4)
    total = sum(share.sync_ms for share in shares)
    if total > 0:
        result["overlap"] = round(max(0.0, 1 - sum(share.exposed_ms for share in shares) / total), 4)
    return result
