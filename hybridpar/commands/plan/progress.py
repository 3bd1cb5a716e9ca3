"""What `hybridpar plan` shows in a terminal while it works, and printing that fails in plain words."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hybridpar.errors import UsageError


@contextmanager
def printing(what: str) -> Iterator[None]:
    """Write all that is printed inside of the block before it ends."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail once more when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UsageError(
            f"cannot print the {what}: {error.strerror}", fix="Send standard output somewhere else."
        ) from error


class ProgressBar:
    """A progress bar that names the step it is in, on standard error: what is printed is the table alone."""

    def __init__(self, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take it away. Safe to call twice."""
        self._progress.stop()

    def announce(self, line: str) -> None:
        """Say what is being done."""
        self._progress.update(self._task, description=line)

    def advance(self, done: int, total: int) -> None:
        """Say how far it is."""
        self._progress.update(self._task, completed=done, total=total)
