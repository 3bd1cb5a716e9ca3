"""Sends the records of a run to the tools in which people watch runs: the interface, and how it is kept apart.

A logger is a class in a file of `loggers/`. It runs in a thread of its own, which takes what the training thread leaves
for it, once a second. What a tool does not take, because it hangs or fails, is lost to it after one warning;
`metrics.jsonl` has every record.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar, Literal

from hybridpar.errors import UsageError, not_installed, shortened
from hybridpar.observe.files import replace_file
from hybridpar.observe.records import EPOCH_FIGURES, STEP_FIGURES, EpochRecord, RunInfo, StepRecord
from hybridpar.registry import Registry

#: Records that wait for a tool at most.
MOST_WAITING = 20_000

#: Seconds that all tools together have at the end of a run to take what is left.
CLOSE_SECONDS = 15.0

#: Seconds between two looks for new records.
_PAUSE = 1.0

Ending = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told of a run before its first record.

    Attributes:
        directory: Directory of the run.
        info: The run.
        options: Its options by name, as plain values.
        resumed_from: Step that it goes on from; None for a new one.
    """

    directory: Path
    info: RunInfo
    options: Mapping[str, Any]
    resumed_from: int | None = None

    def recall(self, name: str) -> str | None:
        """The id that a tool gave the run when it began; None for a new run."""
        try:
            return None if self.resumed_from is None else (self.directory / f"{name}.id").read_text("utf-8").strip()
        except OSError:
            return None

    def remember(self, name: str, given: str) -> None:
        """Keep the id that a tool gave the run, by which a resumed run goes on there."""
        replace_file(self.directory / f"{name}.id", [given.encode()])


@dataclass(frozen=True)
class Line:
    """Figures of a step, or of the end of an epoch.

    Attributes:
        step: Global step.
        seconds: When, in seconds of `time.time`.
        figures: By name.
    """

    step: int
    seconds: float
    figures: dict[str, float]


class Logger(ABC):
    """A tool that figures of a run are sent to. Any method may raise, or take its time: training does not wait for it.

    A file of `loggers/` registers it with `LOGGERS.register(name, description)`. It is created in the training thread,
    where it imports its tool, and used in a thread of its own.
    """

    #: What is imported of the tool, and the extra of hybridpar that installs it.
    package: ClassVar[str]
    extra: ClassVar[str]

    @abstractmethod
    def start(self, run: LoggedRun) -> str | None:
        """Begin, or go on with, a run.

        Args:
            run: The run.

        Returns:
            Where the run can be seen, for the user; None where there is nothing to say.
        """

    @abstractmethod
    def write(self, lines: Sequence[Line]) -> None:
        """Take some lines.

        Args:
            lines: In order.
        """

    @abstractmethod
    def close(self, ending: Ending) -> None:
        """End the run.

        Args:
            ending: How it ended.
        """


LOGGERS: Registry[type[Logger]] = Registry("logger")


def logger_names(log: Iterable[str]) -> tuple[str, ...]:
    """The loggers that `--log` names.

    Args:
        log: Its values: names, several joined by commas, `none`; empty for the default.

    Returns:
        Names, each once; by default `tensorboard`, where that is installed.

    Raises:
        UsageError: There is no such logger, its package is not installed, or `none` is not alone.
    """
    _load()
    names = tuple(dict.fromkeys(name.strip() for text in log for name in text.split(",") if name.strip()))
    if not names:
        return ("tensorboard",) if _is_installed("tensorboard") else ()
    if names == ("none",):
        return ()
    if "none" in names:
        raise UsageError(f"--log {','.join(names)}", "`none` stands for no logger.", "Leave it out, or the others.")
    for name in names:
        kind = LOGGERS.get(name)
        if not _is_installed(kind.package):
            raise not_installed(f"--log {name} needs {kind.package}", kind.extra)
    return names


def _load() -> None:
    importlib.import_module("hybridpar.observe.loggers")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def figures_of(record: StepRecord | EpochRecord) -> dict[str, float]:
    """What is logged of a record, without what was not measured."""
    rows = EPOCH_FIGURES if isinstance(record, EpochRecord) else STEP_FIGURES
    values = {row.name: getattr(record, row.name) for row in rows if row.log}
    return {name: float(value) for name, value in values.items() if value is not None}


class _Lane:
    """A logger and its thread."""

    def __init__(self, name: str, run: LoggedRun) -> None:
        self.name = name
        self.ending: Ending | None = None
        self._run = run
        self._waiting: deque[tuple[float, StepRecord | EpochRecord]] = deque()
        self._lost = 0
        self._news: deque[str] = deque()
        self._ended = Event()
        self._failed = False
        self._thread = Thread(target=self._work, name=f"log {name}", daemon=True)
        try:
            # Here, and not in the thread: a loader that is forked during an import would have its locks held for good.
            self._logger = LOGGERS.get(name)()
            self._thread.start()
        except Exception as error:
            self._fail(error)

    def put(self, record: StepRecord | EpochRecord) -> None:
        """Leave a record for the logger; never waits."""
        if self._failed:
            return
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append((time.time(), record))
            return
        self._lost += 1
        if self._lost == 1:
            self._warn(f"is {MOST_WAITING:,} records behind; it will lack some")

    def news(self) -> Iterator[str]:
        """What there is to tell the user."""
        while self._news:
            yield self._news.popleft()

    def end(self, ending: Ending) -> None:
        """Have the logger take what is left, and end."""
        self.ending = ending
        self._ended.set()

    def join(self, deadline: float) -> None:
        """Wait for that, until a time of `time.monotonic`."""
        if self._thread.ident is None:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self.is_stuck and not self._lost:
            self._warn("did not end in time; it may lack the last records")

    @property
    def is_stuck(self) -> bool:
        """Whether the logger still works at something."""
        return self._thread.is_alive()

    def _work(self) -> None:
        try:
            if (where := self._logger.start(self._run)) is not None:
                self._news.append(f"{self.name:8} {where}")
            while True:
                last = self._ended.is_set()  # nothing is left for it afterwards
                lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
                if lines:
                    self._logger.write([Line(record.step, seconds, figures_of(record)) for seconds, record in lines])
                if last:
                    break
                self._ended.wait(_PAUSE)
            assert self.ending is not None
            self._logger.close(self.ending)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        self._waiting.clear()
        told = str(error).strip().partition("\n")[0]
        self._warn(f"failed: {type(error).__name__} {shortened(told)}".rstrip() + "; it gets no more records")

    def _warn(self, text: str) -> None:
        self._news.append(f"warning: the logger {self.name} {text}. metrics.jsonl has them all")


class Loggers:
    """All loggers of a run, on the worker that writes files. Nothing here waits for one, but for `close`."""

    def __init__(self, names: Sequence[str], run: LoggedRun) -> None:
        self._lanes = [_Lane(name, run) for name in names]

    def put(self, record: StepRecord | EpochRecord) -> None:
        """Send a record to all of them."""
        for lane in self._lanes:
            lane.put(record)

    def news(self) -> list[str]:
        """What there is to tell the user since the last call: where a run can be seen, and warnings."""
        return [text for lane in self._lanes for text in lane.news()]

    def close(self, ending: Ending, seconds: float = CLOSE_SECONDS) -> None:
        """Have them take what is left and end, for a limited time. May be called twice."""
        open_ones = [lane for lane in self._lanes if lane.ending is None]
        for lane in open_ones:
            lane.end(ending)
        deadline = time.monotonic() + seconds
        for lane in open_ones:
            lane.join(deadline)

    @property
    def are_stuck(self) -> bool:
        """Whether one of them still works at something, though it was closed."""
        return any(lane.ending is not None and lane.is_stuck for lane in self._lanes)
