"""The runs below a folder: a list of them, in what they differ, and which of their checkpoints may be deleted.

Everything is read from the files that runs leave, also from runs that still train; torch is not imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridpar.config import TrainConfig
from hybridpar.errors import CheckpointError, UsageError, check
from hybridpar.formats.checkpoint_files import list_checkpoints
from hybridpar.observe.metrics import METRICS_FILE, MetricsTable, read_metrics
from hybridpar.observe.records import LISTED_FIGURES
from hybridpar.observe.summary import read_summary, tests_of
from hybridpar.run.directory import (
    OPTIONS_OF_THE_COMMAND,
    RUN_FILE,
    option_text,
    plain_options,
    read_facts,
    recorded_config,
    run_facts,
)
from hybridpar.run.state import best_checkpoints


@dataclass(frozen=True)
class PastRun:
    """A run, as its directory has it.

    Attributes:
        directory: The directory.
        facts: Its `run.json`.
        table: Its metrics.
        summary: Its summary, if it has one of all of its steps.
    """

    directory: Path
    facts: dict[str, Any]
    table: MetricsTable
    summary: dict[str, Any] | None

    @property
    def options(self) -> dict[str, Any]:
        """Model and options by name."""
        began = self.facts.get("options")
        return {"model": self.facts["model"], **(began if isinstance(began, dict) else {})}

    @property
    def figures(self) -> dict[str, Any]:
        """What it came to, by the names of `LISTED_FIGURES`; without a summary, as far as the metrics say it."""
        summary = self.summary or {"exit": "no report"}
        known = {row.name: summary.get(row.name) for row in LISTED_FIGURES}
        return known | {"steps": self.table.last_step, **tests_of(self.table)}

    @property
    def checkpoints(self) -> list[Path]:
        """Its whole checkpoints, oldest first."""
        return list_checkpoints(self.directory / "checkpoints")


def read_run(directory: Path) -> PastRun:
    """Read a run."""
    facts = run_facts(directory)
    table, summary = read_metrics(directory), read_summary(directory)
    covers_all = summary is not None and summary["steps"] >= table.last_step
    return PastRun(directory, facts, table, summary if covers_all else None)


def find_runs(folders: Iterable[Path]) -> list[PastRun]:
    """The runs in some folders, or below them, by the time of their last step."""
    directories: dict[Path, Path] = {}
    for folder in folders:
        check(folder.is_dir(), f"there is no folder {folder}", fix="Name a folder of runs, or run directories.")
        inside = [folder] if (folder / RUN_FILE).is_file() else [file.parent for file in folder.rglob(RUN_FILE)]
        directories |= {path.resolve(): path for path in inside}
    runs = [read_run(path) for path in directories.values() if isinstance(read_facts(path).get("model"), str)]
    return sorted(runs, key=_last_change)


def _last_change(run: PastRun) -> float:
    files = [path for name in (METRICS_FILE, RUN_FILE) if (path := run.directory / name).exists()]
    return files[0].stat().st_mtime if files else 0.0


def names_of(directories: Sequence[Path]) -> list[str]:
    """What runs are called beside each other: their directories, without the way to them where that
    tells them apart.
    """
    names = [directory.resolve().name for directory in directories]
    return names if len(set(names)) == len(names) else list(map(str, directories))


def differing_options(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The options in which runs differ."""
    usual = plain_options(TrainConfig())
    names = dict.fromkeys(name for run in runs for name in run if name not in OPTIONS_OF_THE_COMMAND)
    values = {name: [run.get(name, usual.get(name)) for run in runs] for name in names}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


def comparison_rows(runs: Sequence[PastRun]) -> list[list[str]]:
    """A table of runs side by side: their figures, then the options in which they differ."""
    rows, figures = [], [run.figures for run in runs]
    for row in LISTED_FIGURES:
        values = [known[row.name] for known in figures]
        if any(value is not None and value != row.usual for value in values):
            rows.append([row.title, *("-" if value is None else row.text(value) for value in values)])
    return rows + option_rows(differing_options([run.options for run in runs]))


def option_rows(options: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    """Options as they are given, each with the values of all runs."""
    return [
        [name if name == "model" else f"--{name.replace('_', '-')}", *(option_text(value) or "-" for value in values)]
        for name, values in options.items()
    ]


def prunable(run: PastRun, keep: int = 1) -> list[Path]:
    """The checkpoints of a run that are neither among the last nor among the best.

    The best are those of the epochs that `--checkpoints` of the run ranks first, and the one that its summary names.
    """
    checkpoints = run.checkpoints
    try:
        rule = recorded_config(run.facts, run.directory).saving
    except (CheckpointError, UsageError):  # options of another version
        rule = TrainConfig().saving
    best = best_checkpoints(rule, run.table.epochs, checkpoints)[: rule.best]
    stays = {*checkpoints[-keep:], *(path for _, path in best)}
    if run.summary is not None and run.summary["best"] is not None:
        stays.add(run.directory / run.summary["best"]["checkpoint"])
    return [path for path in checkpoints if path not in stays]


def size_of(path: Path) -> int:
    """Bytes of a checkpoint's files, as far as a run that still trains has not deleted them meanwhile."""
    size = 0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size if file.is_file() else 0
    return size
