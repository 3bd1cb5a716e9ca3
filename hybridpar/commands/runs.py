"""`hybridpar runs`: lists runs, compares them, and deletes checkpoints that are neither the last nor the best."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hybridpar.commands import register_command
from hybridpar.errors import check, counted
from hybridpar.spec import AT_LEAST_1, Options, check_rules


class Runs(Options):
    """List runs, compare them, or delete checkpoints that are neither the last nor the best of a run.

    Attributes:
        what: What to do with runs.
        paths: Run directories, and but for compare folders of some; default: runs.
        keep: With prune: how many of the last checkpoints of a run stay.
        delete: With prune: delete the others, instead of saying which they are.
    """

    what: Annotated[Literal["list", "compare", "prune"], tyro.conf.Positional] = "list"
    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN|FOLDER ...]")] = ()
    keep: Annotated[int, AT_LEAST_1] = 1
    delete: bool = False


@register_command("runs", "List runs, compare them, or delete some of their checkpoints.", Runs)
def run_runs(command: Runs, _: Sequence[str]) -> int:
    """List, compare or prune."""
    check_rules(command)
    others = command.what != "prune" and (command.delete or command.keep != 1)
    check(not others, f"--keep or --delete with {command.what}", fix="They are for hybridpar runs prune.")
    folders = command.paths or (Path("runs"),)
    if command.what == "compare":
        _compare(command.paths)
    elif command.what == "prune":
        _prune(folders, command.keep, delete=command.delete)
    else:
        _list(folders)
    return 0


def _list(folders: Sequence[Path]) -> None:
    from hybridpar.observe.text import format_accuracy, format_bytes
    from hybridpar.run.runs import find_runs, size_of

    runs = find_runs(folders)
    for run in runs:  # the path in a line of its own, to be copied from a narrow terminal, too
        figures, checkpoints = run.figures, run.checkpoints
        last, best = (figures[key] for key in ("test_accuracy", "best_test_accuracy"))
        accuracy = "" if last is None else f", accuracy {format_accuracy(last)}, best {format_accuracy(best)}"
        size = f", {format_bytes(sum(map(size_of, checkpoints)))}" if checkpoints else ""
        done = f"{figures['exit']} after {counted(figures['steps'], 'step')}{accuracy}"
        print(run.directory)
        print(f"  {run.options['model']} on {run.options.get('data', '-')}, {done}", end="")
        print(f"; {counted(len(checkpoints), 'checkpoint')}{size}")
    if not runs:
        print(f"there is no run below {', '.join(map(str, folders))}")


def _compare(directories: Sequence[Path]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hybridpar.run.runs import comparison_rows, names_of, read_run

    check(len(directories) > 1, "one run cannot be compared", fix="Name another one: hybridpar runs compare RUN RUN.")
    runs = [read_run(path) for path in directories]
    table = Table.grid(padding=(0, 2))
    for _ in range(len(runs) + 1):
        table.add_column(overflow="fold")  # lines too long for a terminal are broken within their cells
    for row in (["", *names_of(directories)], *comparison_rows(runs)):
        table.add_row(*map(Text, row))
    Console().print(table)


def _prune(folders: Sequence[Path], keep: int, *, delete: bool) -> None:
    from hybridpar.formats.checkpoint_files import delete_checkpoint
    from hybridpar.observe.text import format_bytes
    from hybridpar.run.runs import find_runs, prunable, size_of

    sizes = {path: size_of(path) for run in find_runs(folders) for path in prunable(run, keep)}
    for path, size in sizes.items():
        print(f"{format_bytes(size):>8}  {path}")
        if delete:
            delete_checkpoint(path)
    total = f"{counted(len(sizes), 'checkpoint')}, {format_bytes(sum(sizes.values()))}"
    if not sizes:
        print("nothing to delete: the last and the best checkpoints are kept")
    else:
        print(f"deleted  {total}" if delete else f"{total} would be deleted; nothing was. --delete deletes them")
