"""`hybridpar runs`: lists runs, compares them, and deletes checkpoints that are neither the last nor the best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from hybridpar.commands import register_command
from hybridpar.errors import check

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
    match command.what:
        case CompareRuns() as what:
            _compare(what)
        case PruneRuns() as what:
            _prune(what)
        case ListRuns() as what:
            _list(what)
    return 0


def _list(what: ListRuns) -> None:
    from hybridpar.observe.text import format_accuracy, format_bytes
    from hybridpar.run.runs import find_runs, size_of

    runs = find_runs(what.folders)
    if what.json:
        print(json.dumps([_plain(run) for run in runs], indent=2))
        return
    for run in runs:  # the path in a line of its own, to be copied from a narrow terminal, too
        figures, checkpoints = run.figures, run.checkpoints
        last, best = (figures[key] for key in ("test_accuracy", "best_test_accuracy"))
        accuracy = "" if last is None else f", accuracy {format_accuracy(last)}, best {format_accuracy(best)}"
        size = f", {format_bytes(sum(map(size_of, checkpoints)))}" if checkpoints else ""
        print(f"{run.directory}\n  {run.options['model']} on {run.options.get('data', '-')}, {figures['exit']}", end="")
        print(f" after {figures['steps']:,} steps{accuracy}; {len(checkpoints)} checkpoint(s){size}")
    if not runs:
        print(f"there is no run below {', '.join(map(str, what.folders))}")


def _plain(run: PastRun) -> dict[str, Any]:
    checkpoints = [str(path) for path in run.checkpoints]
    return {"run": str(run.directory), "options": run.options, "figures": run.figures, "checkpoints": checkpoints}


def _compare(what: CompareRuns) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hybridpar.run.runs import comparison_rows, differing_options, names_of, read_run

    check(len(what.runs) > 1, "one run cannot be compared", fix="Name another one: hybridpar runs compare RUN RUN.")
    runs = [read_run(path) for path in what.runs]
    differing = differing_options([run.options for run in runs])
    if what.json:
        print(json.dumps({"runs": [_plain(run) for run in runs], "differing": differing}, indent=2))
        return
    table = Table.grid(padding=(0, 2))
    for _ in range(len(runs) + 1):
        table.add_column(overflow="fold")  # lines too long for a terminal are broken within their cells
    for row in (["", *names_of([run.directory for run in runs])], *comparison_rows(runs)):
        table.add_row(*map(Text, row))
    Console().print(table)


def _prune(what: PruneRuns) -> None:
    from hybridpar.observe.text import counted, format_bytes
    from hybridpar.run.runs import find_runs, prunable, size_of
    from hybridpar.train.checkpoint_files import delete_checkpoint

    paths = [path for run in find_runs(what.runs) for path in prunable(run, what.keep)]
    sizes = [size_of(path) for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        print(f"{format_bytes(size):>8}  {path}")
    total = f"{counted(len(paths), 'checkpoint')}, {format_bytes(sum(sizes))}"
    if not paths:
        print("nothing to delete: the last and the best checkpoints are kept")
    elif what.delete:
        for path in paths:
            delete_checkpoint(path)
        print(f"deleted  {total}")
    else:
        print(f"{total} would be deleted; nothing was. --delete deletes them")
