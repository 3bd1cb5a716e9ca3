"""The display of a run: nothing on all workers but one, plain lines in pipes and log files.

The display of terminals is in `live.py`. An output that cannot be written any more is ignored, so that it does not end
the run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Self

from hybridpar.observe.records import EpochRecord, RunInfo, StepRecord
from hybridpar.observe.running import RunningFigures
from hybridpar.observe.text import describe_run, epoch_line, format_bytes, format_duration, format_rate


class Progress:
    """What a run shows while it trains. This base class shows nothing.

    Used as a context manager, or closed, so that a terminal gets its cursor back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.figures = RunningFigures(0)

    def prepare(self, text: str) -> None:
        """Show what is being done before training starts, until something else is shown."""

    def start(self, info: RunInfo, done: int = 0) -> None:
        """Show what is about to be trained."""

    def step(self, record: StepRecord) -> None:
        """Take note of a step."""

    @contextmanager
    def pause(self, text: str = "") -> Iterator[None]:
        """Leave out of the time left what happens inside, where no step is run and which does not come again."""
        if text:
            self.message(f"{text} ...")
        began = self._clock()
        yield
        self.figures.leave_out(self._clock() - began)

    def epoch(self, record: EpochRecord) -> None:
        """Show the end of an epoch."""

    def message(self, text: str) -> None:
        """Show a line that stays, for instance "checkpoint saved at step 120"."""

    def warn(self, text: str) -> None:
        """Show a warning that stays."""
        self.message(f"warning: {text}")

    def close(self) -> None:
        """End the display; what it showed last stays. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: Seconds between lines within an epoch.
_LINE_SECONDS = 10.0


class PlainProgress(Progress):
    """Plain lines: one per epoch, and one whenever nothing was printed for a while."""

    def __init__(self, stream: IO[str] | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stdout if stream is None else stream
        super().__init__(clock)
        self._printed = clock()
        self._epochs = 0

    def prepare(self, text: str) -> None:
        """Print a line."""
        self.message(f"{text} ...")

    def start(self, info: RunInfo, done: int = 0) -> None:
        """Print the run, a line per fact."""
        self._epochs = info.epochs
        self.figures = RunningFigures(info.steps_total, done)
        for label, text in describe_run(info):
            self.message(f"{label:8} {text}")
        for note in info.notes:
            self.message(note)
        if done:
            self.message(f"resumed after step {done:,}")
        self._printed = self._clock()

    def step(self, record: StepRecord) -> None:
        """Print a line where the last one is old."""
        now = self._clock()
        self.figures.add_step(record, now)
        if now - self._printed >= _LINE_SECONDS:
            self._printed = now
            self.message(self._line())

    def epoch(self, record: EpochRecord) -> None:
        """Print a line about the epoch."""
        self.figures.add_epoch(record)
        self.message(epoch_line(record, self._epochs))
        self._printed = self._clock()

    def message(self, text: str) -> None:
        """Print a line."""
        # A character that the stream cannot encode, or a reader that went away, must not end hours of training.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
        except OSError:
            return

    def _line(self) -> str:
        figures = self.figures
        left = figures.seconds_left
        parts = [
            f"epoch {figures.epoch + 1}/{self._epochs}",
            f"step {figures.step:,}/{figures.steps_total:,}",
            f"loss {figures.loss:.4f}",
            f"lr {figures.lr:.3g}",
            format_rate(figures.images_per_second),
        ]
        if figures.bytes_sent:
            parts.append(f"{format_bytes(figures.bytes_sent)} sent")
        if figures.skipped:
            parts.append(f"{figures.skipped:,} skipped")
        if left is not None:
            parts.append(f"ETA {format_duration(left)}")
        return "  ".join(parts)
