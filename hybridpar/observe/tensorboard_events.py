"""Writes TensorBoard event files where the tensorboard package is installed.

The events repeat a few columns of `metrics.jsonl`, which stays the record of the run. They are written with the
tensorboard package itself: one event for all scalars of a step costs a quarter of what torch's `SummaryWriter` takes
for one event each.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from hybridpar.observe.records import EpochRecord, StepRecord

#: Subdirectory of the run directory that `tensorboard --logdir` is pointed at.
EVENTS_DIR = "tensorboard"

_FLUSH_SECONDS = 10
_QUEUED_EVENTS = 1000


class TensorBoardEvents:
    """Scalars `loss`, `lr`, `images_per_second` and `test_accuracy`, by global step.

    Without the `tensorboard` package it does nothing. A failure to write stops the events, not the run: the same disk
    takes `metrics.jsonl`, whose writer reports it.

    Args:
        run_dir: Directory of the run.
        after_step: TensorBoard hides older events of this directory past this step: they belong to a run that was
            replaced, or to steps that are run again.
    """

    def __init__(self, run_dir: Path, after_step: int) -> None:
        self._writer: Any = None
        with contextlib.suppress(ImportError, OSError):
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._event, self._summary = event_pb2.Event, summary_pb2.Summary
            self._writer = EventFileWriter(str(run_dir / EVENTS_DIR), _QUEUED_EVENTS, _FLUSH_SECONDS)
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=after_step + 1, session_log=start))

    def add_step(self, record: StepRecord, images_per_second: float) -> None:
        """Store a step.

        Args:
            record: The step.
            images_per_second: Of the step.
        """
        self._add(record.step, loss=record.loss, lr=record.lr, images_per_second=images_per_second)

    def add_epoch(self, record: EpochRecord) -> None:
        """Store the test accuracy at the end of an epoch, and that of the moving average.

        Args:
            record: The record.
        """
        if record.test_accuracy is not None:
            self._add(record.step, test_accuracy=record.test_accuracy)
        if record.ema_test_accuracy is not None:
            self._add(record.step, ema_test_accuracy=record.ema_test_accuracy)

    def _add(self, step: int, **scalars: float) -> None:
        if self._writer is None:
            return
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        try:
            self._writer.add_event(event)
        except OSError:
            self._writer = None

    def close(self) -> None:
        """Flush and close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()
