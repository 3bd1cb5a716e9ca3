"""The display of a run: a bar on a terminal, plain lines in pipes and log files, nothing on the other workers.

The bar is repainted by the training thread itself, inside `step` and at most four times a second: a thread of its own
would compete with the step for the interpreter, and could hold the console's lock while a data loader forks. An output
that cannot be written any more is ignored, so that it does not end the run.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hybridpar.errors import counted
from hybridpar.observe.records import EPOCH_FIGURES, EpochRecord, RunInfo, StepRecord
from hybridpar.observe.text import format_accuracy, format_bytes, format_duration, format_rate

#: Seconds between two paints of the bar, and between two lines within an epoch.
_PAINT_SECONDS, _LINE_SECONDS = 0.25, 10.0

#: Columns of the bar.
_BAR = 10

#: Decay of the running means: a single step is too noisy to read.
_DECAY = 0.95


class Progress:
    """What a run shows while it trains. This base class keeps the figures, and shows nothing.

    Used as a context manager, or closed, so that a terminal gets its cursor back.
    """

    #: Seconds between two looks at the steps.
    every = math.inf

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.steps_total = self._epochs = self._sent = self._skipped = 0
        self._loss = self._rate = self._accuracy = math.nan
        self._latest: StepRecord | None = None
        # The first step of this process, which allocates and compiles, and when it ended; and when the latest one did.
        self._first: tuple[int, float] | None = None
        self._ended = self._paused = self._shown = 0.0

    def prepare(self, text: str) -> None:
        """Show what is being done before training starts, until something else is shown."""
        self.message(f"{text} ...")

    def start(self, info: RunInfo, done: int = 0) -> None:
        """Show what is about to be trained."""
        self._epochs, self.steps_total = info.epochs, info.steps_total
        resumed = [f"resumed after step {done:,}"] if done else []
        for line in (*start_lines(info), *info.notes, *resumed):
            self.message(line)
        self._shown = self._clock()

    def step(self, record: StepRecord) -> None:
        """Take note of a step, and show it where what is shown is old."""
        now = self._clock()
        self._latest, self._ended = record, now - self._paused
        self._first = self._first or (record.step, self._ended)
        self._sent += record.bytes_sent
        self._skipped += record.skipped
        self._loss = _running_mean(self._loss, record.loss)
        self._rate = _running_mean(self._rate, record.images_per_second)
        if now - self._shown >= self.every:
            self._shown = now
            self.show()

    @contextmanager
    def pause(self, text: str = "") -> Iterator[None]:
        """Leave out of the time left what happens inside, where no step is run and which does not come again."""
        if text:
            self.message(f"{text} ...")
        began = self._clock()
        yield
        self._paused += self._clock() - began

    def epoch(self, record: EpochRecord) -> None:
        """Show the end of an epoch."""
        if record.test_accuracy is not None:
            self._accuracy = record.test_accuracy
        parts = [f"epoch {record.epoch + 1}/{self._epochs} done"]
        for row in EPOCH_FIGURES:
            value = getattr(record, row.name)
            if row.title and value is not None and not math.isnan(value):  # NaN: only its test was left to do
                parts.append(f"{row.title} {row.text(value)}")
        self.message("  ".join([*parts, format_duration(record.seconds)]))
        self._shown = self._clock()

    def message(self, text: str) -> None:
        """Show a line that stays, for instance "checkpoint saved at step 120"."""

    def warn(self, text: str) -> None:
        """Show a warning that stays."""
        self.message(f"warning: {text}")

    def show(self) -> None:
        """Show how far the run is."""

    def close(self) -> None:
        """End the display; what it showed last stays. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the last step; None before the second step of this process.

        From the wall time between steps, so that tests and checkpoints, which come again, count.
        """
        if self._latest is None or self._first is None or self._latest.step <= self._first[0]:
            return None
        step, began = self._first
        each = (self._ended - began) / (self._latest.step - step)
        return each * max(self.steps_total - self._latest.step, 0)

    def line(self) -> str:
        """Epoch and step, the figures of the latest steps, and the time left."""
        record, left = self._latest, self.seconds_left
        if record is None:
            return "waiting for the first step"
        parts = [
            f"epoch {record.epoch + 1}/{self._epochs}  step {record.step:,}/{self.steps_total:,}",
            "" if left is None else f"ETA {format_duration(left)}",
            f"loss {self._loss:.4f}",
            "" if math.isnan(self._accuracy) else f"accuracy {format_accuracy(self._accuracy)}",
            format_rate(self._rate),
            f"{format_bytes(self._sent)} sent" if self._sent else "",
            f"{self._skipped:,} skipped" if self._skipped else "",
        ]
        return "  ".join(filter(None, parts))


def _running_mean(mean: float, value: float) -> float:
    if math.isnan(mean) or not math.isfinite(value):
        return value if math.isfinite(value) else mean
    return _DECAY * mean + (1 - _DECAY) * value


class PlainProgress(Progress):
    """Plain lines: one per epoch, and one whenever nothing was printed for a while."""

    every = _LINE_SECONDS

    def message(self, text: str) -> None:
        """Print a line."""
        # A character that the stream cannot encode, or a reader that went away, must not end hours of training.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        with contextlib.suppress(OSError):
            print(text.encode(encoding, "replace").decode(encoding), flush=True)

    def show(self) -> None:
        """Print a line."""
        self.message(self.line())


class LiveProgress(Progress):
    """A bar at the bottom of the terminal; messages scroll above it."""

    every = _PAINT_SECONDS

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def prepare(self, text: str) -> None:
        """Show a line that the next one takes the place of."""
        self._paint(Text(f"{text} ...", style="dim"))

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        style = "yellow" if text.startswith("warning") else ""
        with contextlib.suppress(OSError):  # as Text: brackets, as in `hybridpar[report]`, are no markup
            self._live.console.print(Text(text, style=style), soft_wrap=True)

    def show(self) -> None:
        """Repaint the bar."""
        step = 0 if self._latest is None else self._latest.step
        done = int(_BAR * min(1.0, step / max(1, self.steps_total)))
        # By hand: a progress bar of rich takes several times as long to paint, and training waits for it.
        self._paint(Text.assemble(("#" * done, "green"), ("." * (_BAR - done), "dim"), f" {self.line()}"))

    def close(self) -> None:
        """Give the terminal back."""
        with contextlib.suppress(OSError):
            self._live.stop()

    def _paint(self, text: Text) -> None:
        text.no_wrap, text.overflow = True, "ellipsis"
        with contextlib.suppress(OSError):
            self._live.start()
            self._live.update(text, refresh=True)


def open_progress(console: Console | None = None) -> Progress:
    """The display that suits the output: live on a terminal, plain lines elsewhere."""
    if console is None:
        # Said outright: FORCE_COLOR, common on build servers, would have rich take a log file for a terminal.
        console = Console(force_terminal=sys.stdout.isatty())
    if not console.is_terminal or console.is_dumb_terminal or console.is_jupyter:
        return PlainProgress()
    return LiveProgress(console)


@contextmanager
def progress_bar(text: str = "", total: int | None = None, *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """A bar for some work that is no training, on a terminal alone, beside what is printed as the result.

    Yields the function that changes it, by the arguments of rich's `Progress.update`: `advance=`, `completed=`,
    `total=`, `description=`.
    """
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True, disable=not (shown and sys.stderr.isatty())) as bar:
        yield partial(bar.update, bar.add_task(text, total=total))


def start_lines(info: RunInfo) -> list[str]:
    """What is about to be trained, without the notes."""
    epochs = f"{counted(info.epochs, 'epoch')} of {info.steps_per_epoch:,}"
    if info.steps_total != info.epochs * info.steps_per_epoch:
        epochs = f"{info.steps_per_epoch:,} per epoch"
    each = f", on {info.replicas} replicas" if info.replicas > 1 else ""
    chosen = f" (auto: {info.batch_line})" if info.batch_line else ""
    return [
        f"model    {info.model}, {info.parameters:,} parameters",
        f"data     {info.data_line or info.data}",
        f"workers  {info.workers} on {info.device}",
        f"batch    {info.batch_size:,} samples per step{each}{chosen}",
        f"steps    {info.steps_total:,} ({epochs})",
        f"run dir  {info.run_dir}",
    ]
