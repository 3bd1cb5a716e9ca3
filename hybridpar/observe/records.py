"""Records of steps, epochs and runs, as plain data.

No record holds a tensor, a file or a function, so the trainer does not know who listens, and a display can be tested
without training anything. Times are milliseconds of one worker, averaged over the workers where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, done or skipped."""

    step: int
    """Global step, counted from 1 over all epochs and resumed parts of the run."""
    epoch: int
    """Epoch the step belongs to, from 0."""
    loss: float
    """Training loss, mean over the global batch; not finite where the step went wrong."""
    lr: float
    """Learning rate of the step."""
    samples: int
    """Samples of all workers together."""
    step_ms: float
    """Wall time of the whole step, waiting for data included."""
    compute_ms: float
    """The part spent in forward, backward and optimizer."""
    exposed_sync_ms: float
    """The part spent waiting for gradients that computation did not hide."""
    data_ms: float
    """The part spent waiting for the data loader."""
    bytes_sent: int
    """Bytes that one worker sent."""
    skipped: bool
    """Whether the step was rolled back because of non-finite gradients."""
    grad_norm: float | None
    """Global L2 norm of the gradients before clipping, where it was computed."""
    bytes_before: int | None = None
    """Bytes that one worker would have sent of its gradients in an all-reduce of float32."""
    bytes_after: int | None = None
    """Bytes that it sent of them."""
    encode_ms: float | None = None
    """Time in which messages of gradients were written, over all sync lanes."""
    wire_ms: float | None = None
    """Time in which they travelled, or waited for other workers."""
    decode_ms: float | None = None
    """Time in which they were read."""
    sync_ms: float | None = None
    """Time in which any sync lane was at it."""
    hidden_share: float | None = None
    """Part of `sync_ms` that computation hid, 0 to 1."""
    residual_norm: float | None = None
    """Global L2 norm of what this worker has not sent yet; only in some steps."""
    residual_norms: Mapping[str, float] | None = None
    """The same of each parameter, by name."""
    staleness: float | None = None
    """Updates made since the weights that the step's gradients were computed on, their mean; None where that is always
    none."""
    most_stale: int | None = None
    """Largest of them."""
    queued: float | None = None
    """Mean number of gradients that waited at shard 0 when one arrived, that one included."""
    bytes_pulled: int | None = None
    """Bytes of weights that one worker received."""


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """The end of an epoch."""

    epoch: int
    """Which epoch ended, from 0."""
    step: int
    """The last global step of the epoch."""
    test_accuracy: float | None
    """Fraction of the test set classified correctly, 0 to 1; None where nothing was evaluated."""
    test_loss: float | None
    """Mean loss over the test set; None where nothing was evaluated."""
    train_loss: float
    """Mean training loss over the epoch."""
    seconds: float
    """Wall time of the epoch, evaluation included."""
    ema_test_accuracy: float | None = None
    """`test_accuracy` of the moving average of the weights; None without one."""
    ema_test_loss: float | None = None
    """`test_loss` of it."""


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
