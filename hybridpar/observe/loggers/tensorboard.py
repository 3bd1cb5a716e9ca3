"""TensorBoard event files, which `tensorboard --logdir` shows.

They are written with the tensorboard package itself: one event for all scalars of a step costs a quarter of what
torch's `SummaryWriter` takes for one event each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from hybridpar.observe.logger import LOGGERS, Ending, Line, LoggedRun, Logger

#: Subdirectory of the run directory that `tensorboard --logdir` is pointed at.
EVENTS_DIR = "tensorboard"

_FLUSH_SECONDS = 10
_QUEUED_EVENTS = 1000


@LOGGERS.register("tensorboard", "event files in the run directory, for TensorBoard")
class TensorBoardLogger(Logger):
    """A scalar for each figure, by global step."""

    package: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "tensorboard"

    def __init__(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._open, self._event, self._session = EventFileWriter, event_pb2.Event, event_pb2.SessionLog
        self._summary = summary_pb2.Summary
        self._writer: Any = None

    def start(self, run: LoggedRun) -> str | None:
        """Open a file. TensorBoard hides older events of the directory from here on: these steps are run again."""
        self._writer = self._open(str(run.directory / EVENTS_DIR), _QUEUED_EVENTS, _FLUSH_SECONDS)
        began = self._session(status=self._session.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=(run.resumed_from or 0) + 1, session_log=began))
        return None

    def write(self, lines: Sequence[Line]) -> None:
        """Write an event for each line."""
        for line in lines:
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in line.figures.items()]
            self._writer.add_event(
                self._event(wall_time=line.seconds, step=line.step, summary=self._summary(value=values))
            )

    def close(self, ending: Ending) -> None:
        """Flush and close the file."""
        self._writer.close()
