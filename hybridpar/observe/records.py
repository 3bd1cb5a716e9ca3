"""The table of figures: what a step, an epoch and a whole run come to, with unit, reduction and where each is shown.

`metrics.jsonl`, loggers, `summary.json`, the closing table, `hybridpar runs` and the report page follow from it. A new
figure is a row here, and a value where it is measured.

No record holds a tensor, a file or a function, so the trainer does not know who listens, and a display can be tested
without training anything. Times are milliseconds of one worker, averaged over the workers where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A row of the table.

    Attributes:
        name: Field of a record and column of `metrics.jsonl`, or key of `summary.json`.
        unit: What it is measured in, one of `hybridpar.observe.text.UNITS`.
        summary: The key under which the steps of a run make one figure of the summary.
        reduce: How they do: `median`, `mean` or `sum`.
        workers: Whether each worker reduces its steps, and the summary has the mean of that.
        part: What it is called as a part of the time of a step.
        log: Whether loggers get it.
        chart: Title of its chart on the report page.
        curve: What its curve is called there, beside others.
        title: What it is called where runs are listed or compared.
        predicted: What it is called where a prediction stands beside it.
        needed: Whether every summary has it; others may be null.
        stored: Whether it is a key of the summary.
        choices: All values that it can have.
        entries: Rows of its entries, where it is an object.
        each: The unit of all entries, where their names are not known.
    """

    name: str
    unit: str
    summary: str = ""
    reduce: str = ""
    workers: bool = False
    part: str = ""
    log: bool = False
    chart: str = ""
    curve: str = ""
    title: str = ""
    predicted: str = ""
    needed: bool = False
    stored: bool = True
    choices: tuple[str, ...] = ()
    entries: tuple[Figure, ...] = ()
    each: str = ""


def _figure(unit: str, default: Any = MISSING, *, init: bool = True, **row: Any) -> Any:
    """A field of a record that is a row of the table."""
    return field(default=default, init=init, metadata={"unit": unit, **row})


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, done or skipped."""

    step: int = _figure("count")
    """Global step, counted from 1 over all epochs and resumed parts of the run."""
    epoch: int = _figure("count", log=True)
    """Epoch the step belongs to, from 0."""
    loss: float = _figure("loss", log=True, chart="Loss")
    """Training loss, mean over the global batch; not finite where the step went wrong."""
    lr: float = _figure("rate", log=True, chart="Learning rate")
    """Learning rate of the step."""
    samples: int = _figure("count")
    """Samples of all workers together."""
    images_per_second: float = _figure(
        "images/s", init=False, log=True, summary="images_per_second", reduce="median", title="speed"
    )
    """Samples per second of the step; NaN where its time is not a positive number."""
    step_ms: float = _figure(
        "ms", log=True, chart="Time of a step (ms)", summary="step_ms_median", reduce="median", title="step"
    )
    """Wall time of the whole step, waiting for data included."""
    compute_ms: float = _figure("ms", log=True, part="compute")
    """The part spent in forward, backward and optimizer."""
    exposed_sync_ms: float = _figure("ms", log=True, part="exposed sync")
    """The part spent waiting for gradients that computation did not hide."""
    data_ms: float = _figure("ms", log=True, part="waiting for data")
    """The part spent waiting for the data loader."""
    bytes_sent: int = _figure(
        "bytes",
        log=True,
        workers=True,
        summary="bytes_sent_per_step",
        reduce="mean",  # most steps of an outer loop send nothing
        title="sent per step",
        predicted="sent",
    )
    """Bytes that one worker sent."""
    skipped: bool = _figure("flag", summary="skipped_steps", reduce="sum", needed=True)
    """Whether the step was rolled back because of non-finite gradients."""
    grad_norm: float | None = _figure("norm", log=True, chart="Gradient norm")
    """Global L2 norm of the gradients before clipping, where it was computed."""
    bytes_before: int | None = _figure("bytes", None)
    """Bytes that one worker would have sent of its gradients in an all-reduce of float32."""
    bytes_after: int | None = _figure("bytes", None)
    """Bytes that it sent of them."""
    encode_ms: float | None = _figure("ms", None, workers=True, summary="encode_ms", reduce="median")
    """Time in which messages of gradients were written, over all sync lanes."""
    wire_ms: float | None = _figure("ms", None, workers=True, summary="wire_ms", reduce="median")
    """Time in which they travelled, or waited for other workers."""
    decode_ms: float | None = _figure("ms", None, workers=True, summary="decode_ms", reduce="median")
    """Time in which they were read."""
    sync_ms: float | None = _figure("ms", None, workers=True, summary="sync_ms", reduce="median")
    """Time in which any sync lane was at it."""
    hidden_share: float | None = _figure("part", None)
    """Part of `sync_ms` that computation hid, 0 to 1."""
    residual_norm: float | None = _figure("norm", None, log=True, chart="Residual norm: not sent yet")
    """Global L2 norm of what this worker has not sent yet; only in some steps."""
    residual_norms: Mapping[str, float] | None = None
    """The same of each parameter, by name."""
    staleness: float | None = _figure("updates", None, log=True, chart="Staleness (updates)")
    """Updates made since the weights that the step's gradients were computed on, their mean; None where that is always
    none."""
    most_stale: int | None = _figure("updates", None)
    """Largest of them."""
    queued: float | None = _figure("gradients", None, summary="queued", reduce="median")
    """Mean number of gradients that waited at shard 0 when one arrived, that one included."""
    bytes_pulled: int | None = _figure("bytes", None, workers=True, summary="bytes_pulled_per_step", reduce="median")
    """Bytes of weights that one worker received."""

    def __post_init__(self) -> None:
        rate = 1000 * self.samples / self.step_ms if 0 < self.step_ms < math.inf else math.nan
        object.__setattr__(self, "images_per_second", rate)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """The end of an epoch."""

    epoch: int
    """Which epoch ended, from 0."""
    step: int
    """The last global step of the epoch."""
    test_accuracy: float | None = _figure("accuracy", log=True, chart="Test accuracy (%)")
    """Fraction of the test set classified correctly, 0 to 1; None where nothing was evaluated."""
    test_loss: float | None = _figure("loss", log=True, chart="Loss", curve="test")
    """Mean loss over the test set; None where nothing was evaluated."""
    train_loss: float = _figure("loss", log=True)
    """Mean training loss over the epoch."""
    seconds: float = _figure("s")
    """Wall time of the epoch, evaluation included."""
    ema_test_accuracy: float | None = _figure("accuracy", None, log=True, chart="Test accuracy (%)", curve="EMA")
    """`test_accuracy` of the moving average of the weights; None without one."""
    ema_test_loss: float | None = _figure("loss", None, log=True, chart="Loss", curve="test, EMA")
    """`test_loss` of it."""


def _rows_of(record: Any) -> tuple[Figure, ...]:
    return tuple(Figure(column.name, **column.metadata) for column in fields(record) if column.metadata)


STEP_FIGURES, EPOCH_FIGURES = _rows_of(StepRecord), _rows_of(EpochRecord)

#: What is known of a run as a whole, beside what its steps come to; docs/contracts.md says what each means.
_RUN_FIGURES = (
    Figure("state", "text", title="state", stored=False),
    Figure("model", "text", needed=True),
    Figure("data", "text", needed=True),
    Figure("workers", "count", needed=True),
    Figure("device", "text", needed=True),
    Figure("seed", "number", needed=True),
    Figure("batch_size", "count", needed=True),
    Figure("final_batch_size", "count", needed=True),
    Figure("exit", "text", needed=True, choices=("finished", "interrupted")),
    Figure("epochs", "count", needed=True),
    Figure("steps", "count", needed=True, title="steps"),
    Figure("resumed_from", "count"),
    Figure("test_accuracy", "accuracy", title="test accuracy"),
    Figure("best_test_accuracy", "accuracy", title="best test accuracy"),
    Figure("ema_test_accuracy", "accuracy", title="of the average"),
    Figure("test_loss", "loss", title="test loss", stored=False),
    Figure("train_loss", "loss", title="train loss", stored=False),
    Figure(
        "best",
        "object",
        entries=(
            Figure("step", "count", needed=True),
            Figure("test_accuracy", "accuracy"),  # of an epoch that is the best by another figure, and was not tested
            Figure("metric", "text", needed=True),
            Figure("checkpoint", "text", needed=True),
        ),
    ),
    Figure("train_seconds", "s", needed=True, title="trained for"),
    Figure("step_ms", "ms", stored=False, predicted="step, without data"),
    Figure("step_ms_mean", "ms"),
    Figure("compute_ms", "ms", predicted="compute"),
    Figure("exposed_sync_ms", "ms", predicted="exposed sync"),
    Figure("data_ms", "ms"),
    Figure("bubble", "part", predicted="bubble"),
    Figure("overlap", "part"),
    Figure("peak_saved_bytes", "bytes", predicted="kept for backward"),
    Figure("memory_bytes", "bytes", title="memory", predicted="memory"),
    Figure("prediction_warning", "text"),
    Figure("stages", "count", needed=True),
    Figure("replicas", "count", needed=True),
    Figure("micro_batches", "count", needed=True),
    Figure("schedule", "text", needed=True),
    Figure("sync", "text", needed=True),
    Figure("servers", "count", needed=True),
    Figure("codec", "text", needed=True),
    Figure("compression_ratio", "ratio"),
    Figure("shares", "text"),
    Figure(
        "staleness",
        "object",
        entries=(Figure("mean", "updates"), Figure("most", "updates"), Figure("histogram", "object", each="count")),
    ),
    Figure(
        "kernels",
        "object",
        entries=(
            Figure("tuned", "count", needed=True),
            Figure("stock", "count", needed=True),
            Figure("saved_ms", "number"),
        ),
    ),
    Figure("versions", "object", needed=True, each="text"),
)

_OF_STEPS = tuple(
    replace(row, name=row.summary, unit="count" if row.reduce == "sum" else row.unit)
    for row in STEP_FIGURES
    if row.summary
)
_MEASURED = (*_RUN_FIGURES, *_OF_STEPS)
#: What is predicted of a step, and measured.
PREDICTED_FIGURES = tuple(row for row in _MEASURED if row.predicted)
#: The keys of `summary.json`.
SUMMARY_FIGURES = (
    *(row for row in _MEASURED if row.stored),
    *(Figure(f"predicted_{row.name}", row.unit) for row in PREDICTED_FIGURES),
)
#: What is told of runs that are listed or compared.
LISTED_FIGURES = tuple(row for row in _MEASURED if row.title)
#: Parts of the time of a step: their names, and what they are called.
STEP_PARTS = {row.name: row.part for row in STEP_FIGURES if row.part}


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What is known about a run before its first step."""

    model: str
    """Name of the model."""
    data: str
    """Name of the data set."""
    workers: int
    """Number of worker processes."""
    device: str
    """What the workers run on, for instance `cpu`."""
    epochs: int
    """Epochs the run is meant to last."""
    steps_total: int
    """Steps the run is meant to last."""
    steps_per_epoch: int
    """Steps of a whole epoch."""
    parameters: int
    """Number of parameter elements of the model."""
    batch_size: int
    """Samples per step over all workers."""
    run_dir: Path
    """Directory that holds what the run leaves behind."""
    notes: tuple[str, ...] = ()
    """Lines to show at the start as they are."""
    stages: int = 1
    """Stages that the model is cut into."""
    replicas: int = 1
    """Copies of the model, or of the whole pipeline."""
    micro_batches: int = 1
    """Micro-batches per replica and step."""
    codec: str = "none"
    """Codec of the gradients, or the rules of a policy."""
    schedule: str = "accumulate"
    """Name of the pipeline schedule; `accumulate` without stages."""
    sync: str = "allreduce"
    """How gradients are exchanged, as `--sync` has it."""
    servers: int = 0
    """Server processes."""
    batch_line: str = ""
    """Why `--batch-size auto` chose this batch; empty where it was given."""
    data_line: str = ""
    """What to say of the data at the start; by default their name."""
