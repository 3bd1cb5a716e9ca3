"""Counts work that is done on standard error: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Self

from hybridpar.observe.text import format_duration

#: Seconds between two counts on a terminal, and in a file.
_PAINT_SECONDS, _LINE_SECONDS = 0.2, 30.0


class Counter:
    """Shows how much is done. Used as a context manager, or closed, so that the line of a terminal ends."""

    def __init__(self, what: str, total: int, *, shown: bool = True) -> None:
        self._what, self._total, self._shown = what, total, shown
        self._stream = sys.stderr
        self._terminal = self._stream.isatty()
        self._began = self._last = time.monotonic()
        self._done = 0
        self._open = False

    def add(self, count: int) -> None:
        """Note that more is done."""
        self._done += count
        now = time.monotonic()
        if now - self._last < (_PAINT_SECONDS if self._terminal else _LINE_SECONDS):
            return
        self._last = now
        left = (now - self._began) / max(1, self._done) * (self._total - self._done)
        text = f"{self._done:,} of {self._total:,} {self._what}, {format_duration(left)} left"
        self._write(f"\r{text}\x1b[K" if self._terminal else f"{text}\n")
        self._open = self._terminal

    def close(self) -> None:
        """Take the line off the terminal. May be called twice."""
        if self._open:
            self._write("\r\x1b[K")
        self._open = False

    def _write(self, text: str) -> None:
        if self._shown:
            with contextlib.suppress(OSError):  # a closed pipe does not end the work
                self._stream.write(text)
                self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
