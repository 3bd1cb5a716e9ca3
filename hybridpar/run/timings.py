"""Times and bytes of the steps of a run, and their combination over workers for the summary.

In a pipeline the next step is issued while one still runs, so the host cannot see how long a step had to wait for its
data: that is the time in which this worker's lanes had nothing to do between two steps.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hybridpar.observe.records import STEP_FIGURES, STEP_PARTS, StepRecord
from hybridpar.observe.summary import WARM_UP_STEPS, divided_step, step_shares
from hybridpar.schedule.spans import Computed, StepSpans, joint_bubble
from hybridpar.train.results import StepResult

#: Steps that timelines and profiles have, where the run has so many.
_SHOWN_STEPS = 3

#: Figures of a step that the summary takes over the workers.
_OF_WORKERS = tuple(row for row in STEP_FIGURES if row.workers)


def steps_to_show(done: int, total: int) -> range:
    """The steps of a run that timelines and profiles have: some after the first ones, which meet cold caches; at least
    the last one.
    """
    first = max(done + 1, min(done + WARM_UP_STEPS + 1, total))
    return range(first, max(first, min(first + _SHOWN_STEPS - 1, total)) + 1)


class StepTimes(NamedTuple):
    """One step of a worker, from the end of the step before: its time is the sum of these.

    Attributes:
        compute_ms: All but the next two.
        exposed_sync_ms: Waiting for gradients that computation did not hide.
        data_ms: Waiting for data.
    """

    compute_ms: float
    exposed_sync_ms: float
    data_ms: float


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
    sync = outcome.sync
    figures: dict[str, Any] = dict(vars(sync)) if sync.bytes_before else {}  # else none were sent
    if summing := sync.sync_ms or (spans.sync_ms if result.staged else 0.0):
        figures["hidden_share"] = max(0.0, 1 - exposed / summing)
    record = StepRecord(
        step=result.step,
        epoch=epoch,
        loss=result.loss,
        lr=result.lr,
        samples=outcome.samples,
        step_ms=sum(times),
        **times._asdict(),
        bytes_sent=outcome.bytes_sent,
        skipped=result.skipped,
        grad_norm=result.grad_norm,
        staleness=result.staleness,
        bytes_pulled=outcome.bytes_pulled,
        **figures,
    )
    return Step(result, record, spans)


class Share(NamedTuple):
    """One worker's figures.

    Attributes:
        means: Figures of which the summary has the mean over workers, by its keys; None where they were not measured.
        peaks: Figures of which the summary has the largest, by its keys.
        parts: Where the time of its steps went, see `hybridpar.observe.summary.step_shares`.
        computed: Per step, on one clock for all workers.
        bytes_before: What all-reduces of its gradients in float32 would have sent in all steps.
        bytes_after: What was sent of them.
    """

    means: dict[str, float | None]
    peaks: dict[str, int | None]
    parts: tuple[float, ...] | None
    computed: list[Computed]
    bytes_before: float
    bytes_after: float


class Timings:
    """This worker's own share of the figures that the summary takes over the workers."""

    def __init__(self) -> None:
        # Of each figure where it was measured.
        names = *STEP_PARTS, *(row.name for row in _OF_WORKERS), "bytes_before", "bytes_after"
        self._columns = {name: array("d") for name in names}
        self._computed: list[Computed] = []

    def add(self, record: StepRecord, spans: StepSpans | None = None) -> None:
        """Take a step into account, with what ran in it where the model is cut into stages."""
        for name, column in self._columns.items():
            if (value := getattr(record, name)) is not None:
                column.append(value)
        if spans is not None and spans.spans:
            self._computed.append(spans.computed)

    def _steady(self, name: str) -> array[float]:
        """A column without the first steps, where there are others."""
        return self._columns[name][WARM_UP_STEPS:] or self._columns[name]

    def mean_step(self, samples: int) -> dict[str, float]:
        """What the summary says of steps that are not alike: means of their time and its parts, and the speed."""
        means = {name: statistics.fmean(values) for name in STEP_PARTS if (values := self._steady(name))}
        if (step_ms := sum(means.values())) > 0:
            means |= {"step_ms_mean": step_ms, "images_per_second": 1e3 * samples / step_ms}
        return {key: round(value, 3) for key, value in means.items()}

    def share(self, ahead: float = 0.0, peaks: Mapping[str, int | None] | None = None) -> Share:
        """What the other workers are sent of it; `ahead` is how far this worker's clock is ahead of rank 0's."""
        computed = self._computed[WARM_UP_STEPS:] or self._computed
        return Share(
            {row.key: row.reduced(self._steady(row.name)) for row in _OF_WORKERS},
            dict(peaks or {}),
            step_shares([*zip(*map(self._steady, STEP_PARTS), strict=True)]),
            [step._replace(begin=step.begin - ahead, end=step.end - ahead) for step in computed],
            sum(self._columns["bytes_before"]),
            sum(self._columns["bytes_after"]),
        )


def combine(
    shares: Mapping[int, Share], replicas: Sequence[Sequence[int]], step_ms: float | None = None
) -> dict[str, Any]:
    """The figures of a run from those of its workers, by rank; of a resumed run since it was."""
    known = list(shares.values())
    result: dict[str, Any] = divided_step(step_ms, [share.parts for share in known])
    for row in _OF_WORKERS:
        values = [share.means[row.key] for share in known]
        measured = [value for value in values if value is not None]
        result[row.key] = replace(row, reduce="mean").reduced(measured)
    if (sent := sum(share.bytes_after for share in known)) > 0:
        result["compression_ratio"] = round(sum(share.bytes_before for share in known) / sent, 3)
    for name in known[0].peaks:
        peaks = [peak for share in known if (peak := share.peaks[name]) is not None]
        result[name] = max(peaks, default=None) if len(peaks) == len(known) else None
    there = [[shares[rank].computed for rank in ranks] for ranks in replicas if shares.keys() >= {*ranks}]
    if bubbles := [joint_bubble(step) for workers in there for step in zip(*workers, strict=False)]:
        result["bubble"] = round(statistics.mean(bubbles), 4)
    return {key: value for key, value in result.items() if value is not None or key in known[0].peaks}
