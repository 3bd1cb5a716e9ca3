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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hybridpar.observe.records import EPOCH_FIGURES, UNITS, EpochRecord, StepRecord

#: Seconds between two paints of the bar, and between two lines within an epoch.
_PAINT_SECONDS, _LINE_SECONDS = 0.25, 10.0

#: Columns of the bar.
_BAR = 10

#: Decay of the running means: a single step is too noisy to read.
_DECAY = 0.95


class Progress:
    """What a run shows while it trains: a bar with messages above it where the console is a terminal, else lines.

    It must be closed, so that a terminal gets its cursor back. Without a console it shows nothing.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._live: Live | None = None
        if console is not None and console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)
        self.steps_total = self._epochs = self._sent = self._skipped = 0
        self._loss = self._rate = self._accuracy = math.nan
        # The step that the time left is counted from and when it ended: the first one allocates and compiles.
        self._first: tuple[int, float] | None = None
        self._shown = 0.0

    def prepare(self, text: str) -> None:
        """Show what is being done before training starts; on a terminal until something else is shown."""
        if self._live is None:
            self.message(f"{text} ...")
        else:
            self._paint(self._live, Text(f"{text} ...", style="dim"))

    def start(self, lines: Iterable[str], *, epochs: int, steps: int) -> None:
        """Show what is about to be trained, for so many epochs and steps."""
        self._epochs, self.steps_total = epochs, steps
        for line in lines:
            self.message(line)
        self._shown = self._clock()

    def step(self, record: StepRecord) -> None:
        """Take note of a step, and show it where what is shown is old."""
        now = self._clock()
        self._first = self._first or (record.step, now)
        self._sent += record.bytes_sent
        self._skipped += record.skipped
        self._loss = _running_mean(self._loss, record.loss)
        self._rate = _running_mean(self._rate, record.images_per_second)
        if now - self._shown >= (_LINE_SECONDS if self._live is None else _PAINT_SECONDS):
            self._shown = now
            self._show(record, now)

    @contextmanager
    def pause(self, text: str = "") -> Iterator[None]:
        """What happens inside does not come again: the time left is counted anew after it."""
        if text:
            self.message(f"{text} ...")
        yield
        self._first = None

    def epoch(self, record: EpochRecord) -> None:
        """Show the end of an epoch."""
        if record.test_accuracy is not None:
            self._accuracy = record.test_accuracy
        parts = [f"epoch {record.epoch + 1}/{self._epochs} done"]
        for row in EPOCH_FIGURES:
            value = getattr(record, row.name)
            if row.title and value is not None and not math.isnan(value):  # NaN: only its test was left to do
                parts.append(f"{row.title} {row.text(value)}")
        self.message("  ".join([*parts, UNITS["s"](record.seconds)]))
        self._shown = self._clock()

    def message(self, text: str) -> None:
        """Show a line that stays, for instance "checkpoint saved at step 120"."""
        if self._console is None:
            return
        with contextlib.suppress(OSError):
            if self._live is not None:
                style = "yellow" if text.startswith("warning") else ""
                # As Text: brackets, as in `hybridpar[report]`, are no markup.
                self._console.print(Text(text, style=style), soft_wrap=True)
            else:  # without rich, which ends the process when a pipe breaks, and with what the stream cannot encode
                encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
                print(text.encode(encoding, "replace").decode(encoding), flush=True)

    def warn(self, text: str) -> None:
        """Show a warning that stays."""
        self.message(f"warning: {text}")

    def close(self) -> None:
        """End the display; what it showed last stays. May be called twice."""
        with contextlib.suppress(OSError):
            if self._live is not None:
                self._live.stop()

    def _show(self, record: StepRecord, now: float) -> None:
        """Show how far the run is: epoch and step, the figures of the latest steps, and the time left.

        That is from the wall time between steps, so that tests and checkpoints, which come again, count.
        """
        first, began = self._first or (record.step, now)
        left = (now - began) / max(record.step - first, 1) * max(self.steps_total - record.step, 0)
        parts = [
            f"epoch {record.epoch + 1}/{self._epochs}  step {record.step:,}/{self.steps_total:,}",
            f"ETA {UNITS['s'](left)}" if record.step > first else "",
            f"loss {self._loss:.4f}",
            "" if math.isnan(self._accuracy) else f"accuracy {UNITS['accuracy'](self._accuracy)}",
            UNITS["images/s"](self._rate),
            f"{UNITS['bytes'](self._sent)} sent" if self._sent else "",
            f"{self._skipped:,} skipped" if self._skipped else "",
        ]
        line = "  ".join(filter(None, parts))
        if self._live is None:
            self.message(line)
            return
        done = int(_BAR * min(1.0, record.step / max(1, self.steps_total)))
        # By hand: a progress bar of rich takes several times as long to paint, and training waits for it.
        self._paint(self._live, Text.assemble(("#" * done, "green"), ("." * (_BAR - done), "dim"), f" {line}"))

    @staticmethod
    def _paint(live: Live, text: Text) -> None:
        text.no_wrap, text.overflow = True, "ellipsis"
        with contextlib.suppress(OSError):
            live.start()
            live.update(text, refresh=True)


def _running_mean(mean: float, value: float) -> float:
    if math.isnan(mean) or not math.isfinite(value):
        return value if math.isfinite(value) else mean
    return _DECAY * mean + (1 - _DECAY) * value


def open_progress(*, shown: bool = True) -> Progress:
    """The display of a worker on standard output, if it shows anything."""
    # Said outright: FORCE_COLOR, common on build servers, would have rich take a log file for a terminal.
    return Progress(Console(force_terminal=sys.stdout.isatty(), force_jupyter=False) if shown else None)


@contextmanager
def progress_bar(text: str = "", total: int | None = None, *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """A bar for some work that is no training, on a terminal alone, beside what is printed as the result.

    Yields the function that changes it, by the arguments of rich's `Progress.update`: `advance=`, `completed=`,
    `total=`, `description=`.
    """
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True, disable=not (shown and sys.stderr.isatty())) as bar:
        yield partial(bar.update, bar.add_task(text, total=total))
