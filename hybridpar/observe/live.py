"""The display of a run on a terminal: two lines that stay in place, with messages above them.

The display is repainted by the training thread itself, inside `step` and at most four times a second. A thread of its
own would compete with the step for the interpreter, and could hold the console's lock while a data loader forks.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from collections.abc import Callable

from rich.console import Console
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from hybridpar.observe.progress import PlainProgress, Progress
from hybridpar.observe.records import EpochRecord, RunInfo, StepRecord
from hybridpar.observe.running import RunningFigures
from hybridpar.observe.text import (
    describe_run,
    epoch_line,
    format_accuracy,
    format_bytes,
    format_duration,
    format_rate,
)

#: Wider lines are harder to read, not more useful.
MOST_COLUMNS = 100

_REPAINT_SECONDS = 0.25
_NARROWEST_BAR = 5
#: Columns that labels at the start have, and the least that a note is broken into.
_LABEL, _NARROWEST_NOTE = 9, 40


class LiveProgress(Progress):
    """A bar with its figures at the bottom of the terminal; messages scroll above it."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console
        self._painted = float("-inf")
        self._epochs = 0
        self._live: Live | None = None
        self._preparing = False

    def prepare(self, text: str) -> None:
        """Show a line that the next one takes the place of.

        Nothing repaints it meanwhile: a thread that does would take part in what is being measured.
        """
        self._clear()
        self._preparing = True
        line = Text(f"{text} ...", style="dim", no_wrap=True, overflow="ellipsis", end="")
        line.truncate(max(1, self._console.width - 1), overflow="ellipsis")
        with contextlib.suppress(OSError):
            self._console.print(line, end="")

    def _clear(self) -> None:
        if self._preparing:
            self._preparing = False
            with contextlib.suppress(OSError):
                self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))

    def start(self, info: RunInfo, done: int = 0) -> None:
        """Print the run, and put the bar below it."""
        self._clear()
        self._epochs = info.epochs
        self.figures = RunningFigures(info.steps_total, done)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, text in describe_run(info):
            grid.add_row(label, Text(text, style="bold" if label == "model" else ""))
        self._console.print(grid, width=min(self._console.width, MOST_COLUMNS))
        for note in info.notes:
            self.message(_under_label(note, min(self._console.width, MOST_COLUMNS)))
        if done:
            self.message(f"resumed after step {done:,}")
        self._live = Live(self._frame(), console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start(refresh=True)

    def step(self, record: StepRecord) -> None:
        """Take note of a step, and repaint where the picture is old."""
        now = self._clock()
        self.figures.add_step(record, now)
        if now - self._painted >= _REPAINT_SECONDS:
            self._paint(now)

    def epoch(self, record: EpochRecord) -> None:
        """Print a line about the epoch above the bar."""
        self.figures.add_epoch(record)
        self.message(epoch_line(record, self._epochs))
        self._paint(self._clock())

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._clear()
        # As Text: a message may hold brackets, as in `hybridpar[plots]`, that rich would take for markup.
        with contextlib.suppress(OSError):  # a terminal that went away must not end the run
            self._console.print(Text(text, style="yellow" if text.startswith("warning") else ""), soft_wrap=True)

    def close(self) -> None:
        """Paint the last state and give the terminal back."""
        self._clear()
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.update(self._frame())
                live.stop()

    def _paint(self, now: float) -> None:
        self._painted = now
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.update(self._frame(), refresh=True)

    def _frame(self) -> Text:
        # One Text, put together by hand: several times cheaper to paint than a table with a progress bar in it.
        figures = self.figures
        width = min(self._console.width, MOST_COLUMNS)
        left = f"epoch {figures.epoch + 1}/{self._epochs}  step {figures.step:,}/{figures.steps_total:,} "
        seconds = figures.seconds_left
        eta = "-:--" if seconds is None else format_duration(seconds)
        # Padded, so that the bar does not change its length while the estimate shrinks.
        right = f" {100 * figures.fraction:3.0f}%  ETA {eta:<7}"
        frame = Text(left, no_wrap=True, overflow="ellipsis", end="")
        self._append_bar(frame, width - len(left) - len(right))
        frame.append(f"{right}\n")
        for text, style in self._numbers():
            frame.append(text, style=style)
        return frame

    def _append_bar(self, frame: Text, width: int) -> None:
        if width < _NARROWEST_BAR:
            return
        full, rest = ("#", "-") if self._console.options.ascii_only else ("━", "─")
        filled = int(width * self.figures.fraction)
        frame.append(full * filled, style="green")
        frame.append(rest * (width - filled), style="dim")

    def _numbers(self) -> list[tuple[str, str]]:
        figures = self.figures
        if not figures.started:
            return [("waiting for the first step", "dim")]
        parts = [("loss ", "dim"), (f"{figures.loss:.4f}", "bold")]
        if figures.test_accuracy is not None:
            parts += [("  accuracy ", "dim"), (format_accuracy(figures.test_accuracy), "bold")]
        parts += [("  ", ""), (format_rate(figures.images_per_second), "")]
        if figures.bytes_sent:
            parts.append((f"  {format_bytes(figures.bytes_sent)} sent", ""))
        if figures.skipped:
            parts.append((f"  {figures.skipped:,} skipped", "yellow"))
        return parts


def _under_label(note: str, width: int) -> str:
    """A note broken into lines whose further ones begin below its text, as its label has a column of its own."""
    indent = " " * (_LABEL if not note.startswith(" ") else _LABEL + 2)
    lines = textwrap.wrap(
        note, max(width, _NARROWEST_NOTE), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)


def open_progress(console: Console | None = None) -> Progress:
    """The display that suits the output: live on a terminal, plain lines elsewhere."""
    if console is None:
        # Said outright: FORCE_COLOR, common on build servers, would have rich take a log file for a terminal.
        console = Console(force_terminal=sys.stdout.isatty())
    if not console.is_terminal or console.is_dumb_terminal or console.is_jupyter:
        return PlainProgress(console.file)
    return LiveProgress(console)
