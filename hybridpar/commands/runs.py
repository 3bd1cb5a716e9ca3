"""`hybridpar runs`: lists runs, compares them, and deletes checkpoints that are neither the last nor the best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from hybridpar.commands import register_command
from hybridpar.errors import UsageError

if TYPE_CHECKING:
    from hybridpar.run.runs import PastRun

_Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER ...]")]
_RunNames = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]


@dataclass(frozen=True, kw_only=True)
class ListRuns:
    """List runs: how far they are, their accuracy, their checkpoints."""

    folders: _Folders = (Path("runs"),)
    """Folders of runs, or run directories."""
    json: bool = False
    """Print everything as JSON."""


@dataclass(frozen=True, kw_only=True)
class CompareRuns:
    """Show the options in which runs differ, and their figures side by side."""

    runs: _RunNames
    """Run directories."""
    json: bool = False
    """Print everything as JSON."""


@dataclass(frozen=True, kw_only=True)
class PruneRuns:
    """Delete checkpoints, but for the last and the best of each run. Without --delete it only says which."""

    runs: _Folders = (Path("runs"),)
    """Folders of runs, or run directories."""
    keep: int = 1
    """How many of the last checkpoints of a run to keep."""
    delete: bool = False
    """Delete them."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """List runs, compare them, or delete some of their checkpoints.

    Attributes:
        what: Which of these.
    """

    what: Annotated[
        Annotated[ListRuns, tyro.conf.subcommand("list")]
        | Annotated[CompareRuns, tyro.conf.subcommand("compare")]
        | Annotated[PruneRuns, tyro.conf.subcommand("prune")],
        tyro.conf.arg(name=""),
    ] = field(default_factory=ListRuns)


@register_command("runs", "List runs, compare them, or delete some of their checkpoints.", Runs)
def run_runs(command: Runs, _: Sequence[str]) -> int:
    """List, compare or prune."""
    what = command.what
    if isinstance(what, CompareRuns):
        return _compare(what)
    if isinstance(what, PruneRuns):
        return _prune(what)
    from hybridpar.observe.text import format_accuracy, format_bytes
    from hybridpar.run.runs import find_runs, size_of

    runs = find_runs(what.folders)
    if what.json:
        print(json.dumps([_plain(run) for run in runs], indent=2))
        return 0
    rows = [("model", "data", "state", "steps", "accuracy", "best", "checkpoints")]
    for run in runs:
        found, checkpoints = run.figures, run.checkpoints
        accuracies = ["-" if (one := found[key]) is None else format_accuracy(one) for key in _ACCURACIES]
        size = sum(map(size_of, checkpoints))
        kept = f"{len(checkpoints)}, {format_bytes(size)}" if checkpoints else "none"
        model, data = str(run.options["model"]), str(run.options.get("data", "-"))
        rows.append((model, data, found["state"], f"{found['steps']:,}", *accuracies, kept))
    _print_runs(["run", *(str(run.directory) for run in runs)], rows)
    if not runs:
        print(f"there is no run below {', '.join(map(str, what.folders))}")
    return 0


_ACCURACIES = ("test_accuracy", "best_test_accuracy")


def _plain(run: PastRun) -> dict[str, Any]:
    checkpoints = [str(path) for path in run.checkpoints]
    return {"run": str(run.directory), "options": run.options, "figures": run.figures, "checkpoints": checkpoints}


def _compare(what: CompareRuns) -> int:
    from hybridpar.run.runs import comparison_rows, differing_options, names_of, read_run

    if len(what.runs) < 2:
        raise UsageError("one run cannot be compared", fix="Name another one: hybridpar runs compare RUN RUN.")
    runs = [read_run(path) for path in what.runs]
    differing = differing_options([run.options for run in runs])
    if what.json:
        print(json.dumps({"runs": [_plain(run) for run in runs], "differing": differing}, indent=2))
        return 0
    if not differing:
        print("all options are the same")
    _print_table([["", *names_of([run.directory for run in runs])], *comparison_rows(runs)])
    return 0


def _prune(what: PruneRuns) -> int:
    from hybridpar.observe.text import format_bytes
    from hybridpar.run.runs import find_runs, prunable, size_of
    from hybridpar.train.checkpoint_files import delete_checkpoint

    sizes = {path: size_of(path) for run in find_runs(what.runs) for path in prunable(run, what.keep)}
    for path, size in sizes.items():
        print(f"{format_bytes(size):>8}  {path}")
    counted = f"{len(sizes):,} checkpoint{'' if len(sizes) == 1 else 's'}, {format_bytes(sum(sizes.values()))}"
    if not sizes:
        print("nothing to delete: the last and the best checkpoints are kept")
    elif what.delete:
        for path in sizes:
            delete_checkpoint(path)
        print(f"deleted  {counted}")
    else:
        print(f"{counted} would be deleted; nothing was. --delete deletes them")
    return 0


def _print_runs(paths: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a line for each path, which can be copied from a narrow terminal, too, and its row below it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for path, row in zip(paths, rows, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print(f"{path}\n  {'  '.join(cells).rstrip()}")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns; lines that are too long for a terminal are broken within their cells."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for _ in rows[0]:
        table.add_column(overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*(Text(cell, style="" if number else "bold") for cell in row))
    Console().print(table)
