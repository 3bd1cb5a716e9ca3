"""The table of figures: what a step, an epoch and a whole run come to, with unit, reduction and where each is shown.

`metrics.jsonl`, loggers, `summary.json`, the closing table, `hybridpar runs` and the report page follow from it. A new
figure of a step is a field of `StepRecord`, and a value in `hybridpar.run.timings.measured_step`.

No record holds a tensor, a file or a function, so the trainer does not know who listens, and a display can be tested
without training anything. Times are milliseconds of one worker, averaged over the workers where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.filesize import decimal


def format_duration(seconds: float) -> str:
    """Seconds as `3.2 s`, `0:12:03` or `1 day, 2:00:05`."""
    return f"{seconds:.1f} s" if seconds < 59.95 else str(timedelta(seconds=round(seconds)))


def format_bytes(count: float) -> str:
    """Bytes in decimal units: `640 bytes`, `12.3 MB`."""
    return decimal(round(count))


def format_rate(per_second: float) -> str:
    """Images per second, with a decimal only where it says something."""
    return f"{per_second:.1f} images/s" if per_second < 99.95 else f"{per_second:,.0f} images/s"


def format_accuracy(fraction: float) -> str:
    """A fraction as a percentage with two decimals, as papers give it."""
    return f"{100 * fraction:.2f}%"


def _format_ages(ages: Mapping[str, Any]) -> str:
    """How late gradients were."""
    return f"mean {ages['mean']:.2f}, largest {ages['most']}"


def _format_kernels(kernels: Mapping[str, Any]) -> str:
    """Operations on kernels, and the time that they save."""
    text = f"{kernels['tuned']} of {kernels['tuned'] + kernels['stock']} operations"
    return text if kernels["saved_ms"] is None else f"{text}, {kernels['saved_ms']:.2f} ms a step less than torch"


#: How figures are shown, by their unit; figures of other units are not shown alone.
UNITS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": "{:,}".format,
    "bytes": format_bytes,
    "ms": "{:.2f} ms".format,
    "s": format_duration,
    "images/s": format_rate,
    "accuracy": format_accuracy,
    "part": "{:.0%}".format,
    "loss": "{:.4f}".format,
    "ratio": "{:.1f}x".format,
    "gradients": "{:.1f} gradients".format,
    "ages": _format_ages,
    "kernels": _format_kernels,
    "checkpoint": "{0[checkpoint]}, by {0[metric]}".format,
}


@dataclass(frozen=True)
class Figure:
    """A row of the table.

    Attributes:
        name: Field of a record and column of `metrics.jsonl`, or key of `summary.json`.
        unit: What it is measured in, one of `UNITS`.
        reduce: How the steps of a run make one figure of the summary: `median`, `mean`, `sum`, or `part`: the part of a
            step's time that it takes; empty for none.
        key: Its key there; by default its name.
        workers: Whether each worker reduces its steps, and the summary has the mean of that.
        log: Whether loggers get it.
        chart: Title of its chart on the report page.
        curve: What its curve is called there, beside others.
        title: What it is called at the end of an epoch, at the end of a run, and where runs are compared.
        usual: The value with which nothing is said of it there.
        predicted: Whether plans predict it, so that the prediction stands beside it.
    """

    name: str
    unit: str
    reduce: str = ""
    key: str = ""
    workers: bool = False
    log: bool = False
    chart: str = ""
    curve: str = ""
    title: str = ""
    usual: Any = None
    predicted: bool = False

    def text(self, value: Any) -> str:
        """A value as it is shown."""
        return UNITS[self.unit](value)

    def reduced(self, values: ArrayLike) -> float | None:
        """One figure from the finite ones of several steps."""
        known = np.asarray(values, dtype=np.float64)
        known = known[np.isfinite(known)]
        if self.reduce == "sum":
            return round(float(known.sum()))
        if not len(known):
            return None
        value = float(np.mean(known) if self.reduce == "mean" else np.median(known))
        return round(value) if self.unit == "bytes" else round(value, 3)


def _figure(unit: str, default: Any = MISSING, *, init: bool = True, **row: Any) -> Any:
    """A field of a record that is a row of the table."""
    return field(default=default, init=init, metadata={"unit": unit, **row})


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, done or skipped.

    Attributes:
        step: Global step, counted from 1 over all epochs and resumed parts of the run.
        epoch: Epoch the step belongs to, from 0.
        loss: Training loss, mean over the global batch; not finite where the step went wrong.
        lr: Learning rate of the step.
        samples: Samples of all workers together.
        images_per_second: Samples per second of the step; NaN where its time is not a positive number.
        step_ms: Wall time of the whole step, waiting for data included.
        compute_ms: The part spent in forward, backward and optimizer.
        exposed_sync_ms: The part spent waiting for gradients that computation did not hide.
        data_ms: The part spent waiting for the data loader.
        bytes_sent: Bytes that one worker sent. Most steps of an outer loop send nothing.
        skipped: Whether the step was rolled back because of non-finite gradients.
        grad_norm: Global L2 norm of the gradients before clipping, where it was computed.
        bytes_before: Bytes that one worker would have sent of its gradients in an all-reduce of float32.
        bytes_after: Bytes that it sent of them.
        encode_ms: Time in which messages of gradients were written, over all sync lanes.
        wire_ms: Time in which they travelled, or waited for other workers.
        decode_ms: Time in which they were read.
        sync_ms: Time in which any sync lane was at it.
        hidden_share: Part of the sums of gradients that computation hid, 0 to 1.
        residual_norm: Global L2 norm of what this worker has not sent yet; only in some steps.
        residual_norms: The same of each parameter, by name.
        staleness: Updates made since the weights that the step's gradients were computed on, their mean; None where
            that is always none.
        most_stale: Largest of them.
        queued: Mean number of gradients that waited at shard 0 when one arrived, that one included.
        bytes_pulled: Bytes of weights that one worker received.
    """

    step: int = _figure("count")
    epoch: int = _figure("count", log=True)
    loss: float = _figure("loss", log=True, chart="Loss")
    lr: float = _figure("rate", log=True, chart="Learning rate")
    samples: int = _figure("count")
    images_per_second: float = _figure("images/s", init=False, log=True, reduce="median", title="speed")
    step_ms: float = _figure(
        "ms", log=True, chart="Time of a step (ms)", reduce="median", key="step_ms_median", title="step"
    )
    compute_ms: float = _figure("ms", log=True, reduce="part", title="compute", predicted=True)
    exposed_sync_ms: float = _figure("ms", log=True, reduce="part", title="exposed sync", predicted=True)
    data_ms: float = _figure("ms", log=True, reduce="part", title="waiting for data")
    bytes_sent: int = _figure(
        "bytes", log=True, workers=True, reduce="mean", key="bytes_sent_per_step", title="sent per step", predicted=True
    )
    skipped: bool = _figure("flag", reduce="sum", key="skipped_steps", title="skipped steps")
    grad_norm: float | None = _figure("norm", log=True, chart="Gradient norm")
    bytes_before: int | None = _figure("bytes", None)
    bytes_after: int | None = _figure("bytes", None)
    encode_ms: float | None = _figure("ms", None, workers=True, reduce="median", title="encoding")
    wire_ms: float | None = _figure("ms", None, workers=True, reduce="median", title="sending")
    decode_ms: float | None = _figure("ms", None, workers=True, reduce="median", title="decoding")
    sync_ms: float | None = _figure("ms", None, workers=True, reduce="median")
    hidden_share: float | None = _figure("part", None, workers=True, reduce="mean", key="overlap", title="sync hidden")
    residual_norm: float | None = _figure("norm", None, log=True, chart="Residual norm: not sent yet")
    residual_norms: Mapping[str, float] | None = None
    staleness: float | None = _figure("updates", None, log=True, chart="Staleness (updates)")
    most_stale: int | None = _figure("updates", None)
    queued: float | None = _figure("gradients", None, reduce="median", title="queued")
    bytes_pulled: int | None = _figure(
        "bytes", None, workers=True, reduce="median", key="bytes_pulled_per_step", title="pulled per step"
    )

    def __post_init__(self) -> None:
        rate = 1000 * self.samples / self.step_ms if 0 < self.step_ms < math.inf else math.nan
        object.__setattr__(self, "images_per_second", rate)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """The end of an epoch.

    Attributes:
        epoch: Which epoch ended, from 0.
        step: The last global step of the epoch.
        test_accuracy: Fraction of the test set classified correctly, 0 to 1; None where nothing was evaluated.
        test_loss: Mean loss over the test set; None where nothing was evaluated.
        train_loss: Mean training loss over the epoch.
        seconds: Wall time of the epoch, evaluation included.
        ema_test_accuracy: `test_accuracy` of the moving average of the weights; None without one.
        ema_test_loss: `test_loss` of it.
    """

    epoch: int
    step: int
    test_accuracy: float | None = _figure("accuracy", None, log=True, chart="Test accuracy (%)", title="test accuracy")
    test_loss: float | None = _figure("loss", None, log=True, chart="Loss", curve="test", title="test loss")
    train_loss: float = _figure("loss", math.nan, log=True, title="train loss")
    seconds: float = _figure("s", math.nan)
    ema_test_accuracy: float | None = _figure(
        "accuracy", None, log=True, chart="Test accuracy (%)", curve="EMA", title="of the average"
    )
    ema_test_loss: float | None = _figure("loss", None, log=True, chart="Loss", curve="test, EMA")


def _rows_of(record: Any) -> tuple[Figure, ...]:
    columns = (column for column in fields(record) if column.metadata)
    return tuple(Figure(column.name, **{"key": column.name, **column.metadata}) for column in columns)


STEP_FIGURES, EPOCH_FIGURES = _rows_of(StepRecord), _rows_of(EpochRecord)

#: What a run and its tests came to; docs/figures.md says what each means.
_RESULTS = (
    *(Figure(name, "text") for name in ("model", "data", "device", "prediction_warning")),
    *(Figure(name, "count") for name in ("workers", "replicas", "servers", "batch_size", "final_batch_size")),
    *(Figure(name, "count") for name in ("epochs", "seed")),
    *(Figure(name, "object") for name in ("versions",)),
    Figure("exit", "text", title="state"),
    Figure("steps", "count", title="steps"),
    Figure("resumed_from", "count", title="resumed from step"),
    Figure("train_seconds", "s", title="trained for"),
    Figure("test_accuracy", "accuracy", title="test accuracy"),
    Figure("best_test_accuracy", "accuracy", title="best test accuracy"),
    Figure("ema_test_accuracy", "accuracy", title="of the average"),
    Figure("test_loss", "loss", title="test loss"),
    Figure("train_loss", "loss", title="train loss"),
    Figure("best", "checkpoint", title="best checkpoint"),
)
_OF_STEPS = tuple(
    replace(row, name=row.key, unit="count" if row.reduce == "sum" else row.unit, usual=0)
    for row in STEP_FIGURES
    if row.reduce
)
#: How it was laid out, and what that took.
_LAYOUT = (
    Figure("step_ms_mean", "ms"),
    Figure("memory_bytes", "bytes", title="memory", predicted=True),
    Figure("stages", "count", title="stages", usual=1),
    Figure("micro_batches", "count", title="micro-batches", usual=1),
    Figure("schedule", "text", title="schedule", usual="accumulate"),
    Figure("bubble", "part", title="bubble", predicted=True),
    Figure("peak_saved_bytes", "bytes", title="kept for backward", predicted=True),
    Figure("shares", "text", title="shares", usual="equal"),
    Figure("sync", "text", title="sync", usual="allreduce"),
    Figure("staleness", "ages", title="staleness"),
    Figure("codec", "text", title="gradients sent as", usual="none"),
    Figure("compression_ratio", "ratio", title="bytes saved", usual=1),
    Figure("kernels", "kernels", title="kernels"),
)
#: A step without waiting for data, as it is predicted; the summary has its measured parts.
STEP_ALONE = Figure("step_ms", "ms", title="step, without data", predicted=True)
#: What is predicted of a step, and measured.
PREDICTED_FIGURES = (STEP_ALONE, *(row for row in (*_OF_STEPS, *_LAYOUT) if row.predicted))
#: The keys of `summary.json`.
SUMMARY_FIGURES = (
    *(*_RESULTS, *_OF_STEPS, *_LAYOUT),
    *(Figure(f"predicted_{row.name}", row.unit) for row in PREDICTED_FIGURES),
)
#: What is shown at the end of a run, and of runs that are compared.
LISTED_FIGURES = tuple(row for row in (*_RESULTS, STEP_ALONE, *_OF_STEPS, *_LAYOUT) if row.title)
#: The parts of the time of a step.
STEP_PARTS = tuple(row.name for row in STEP_FIGURES if row.reduce == "part")
