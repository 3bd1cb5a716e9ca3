"""One step of this worker, in figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridpar.observe.records import StepRecord
from hybridpar.run.timings import StepClock, StepTimes
from hybridpar.schedule.spans import StepSpans
from hybridpar.sync.figures import SyncFigures
from hybridpar.train.step_result import StepResult


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
