"""`hybridpar runs` and `report`: lists and compares runs, prunes their checkpoints, and writes a page about them.

Of damaged files, and of runs that still train, what there is is shown.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hybridpar.commands import register_command
from hybridpar.errors import check, counted, not_installed
from hybridpar.formats.output_files import check_writable
from hybridpar.spec import AT_LEAST_1, Options, check_rules

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from hybridpar.run.runs import PastRun


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


@register_command("runs", Runs)
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
    from hybridpar.observe.records import format_accuracy, format_bytes
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
    from hybridpar.observe.records import format_bytes
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


# --------------------------------------------------------------------------------------------------------------- report


class Report(Options):
    """Write one HTML page about a run, or several of them side by side. The page needs no network and no other file.

    Attributes:
        runs: Run directories.
        output: The file to write; an earlier page is replaced.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")] = ()
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")


@register_command("report", Report)
def run_report(command: Report, _: Sequence[str]) -> int:
    """Write the page."""
    check_page("--output", command.output)
    runs = read_runs(command.runs)
    from hybridpar.observe.page import write_page

    write_page(command.output, next(iter(runs)) if len(runs) == 1 else f"{len(runs)} runs", page_parts(runs))
    print(f"report written to {command.output}")
    return 0


def check_page(option: str, path: Path) -> None:
    """Refuse a page that could not be written, or would replace anything but an earlier page."""
    if importlib.util.find_spec("plotly") is None:
        raise not_installed(f"{option} {path} needs plotly", "report")
    check(path.suffix == ".html", f"{option} {path}", "A page is an .html file.", f"Use {path.with_suffix('.html')}.")
    check_writable(option, path)
    from hybridpar.observe.page import is_page

    check(
        not path.is_file() or is_page(path),
        f"{option} {path} is there already, and is no page of hybridpar",
        "A page replaces an earlier page and no other file.",
        "Name another file, or delete this one.",
    )


def read_runs(directories: Sequence[Path]) -> dict[str, PastRun]:
    """The runs by their names on the page."""
    from hybridpar.run.runs import names_of, read_run

    check(bool(directories), "no run is named", fix="Name a run directory, for instance runs/resnet18-digits.")
    runs = {name: read_run(directory) for name, directory in zip(names_of(directories), directories, strict=True)}
    check(len(runs) == len(directories), "a run is named twice", fix="Name each run once.")
    return runs


def page_parts(runs: dict[str, PastRun]) -> Iterator[str | Figure]:
    """The page below its title: what compares runs, then each of them."""
    from hybridpar.observe.page import curves, element, table
    from hybridpar.observe.summary import report_rows
    from hybridpar.run.runs import comparison_rows, differing_options, option_rows

    caption = "Results, then the options that differ" if len(runs) > 1 else "Results"
    yield table([["", *runs], *comparison_rows([*runs.values()])], caption)
    if (figure := curves([*runs], [run.table for run in runs.values()])) is not None:
        yield figure
    for name, run in runs.items():
        yield element("h2", name)
        if run.summary is None:
            yield element("p", f"There is no report yet: {run.table.last_step:,} steps are recorded so far.")
        else:
            yield table(report_rows(run.summary), "Report")
            if run.summary["prediction_warning"]:
                yield element("strong", run.summary["prediction_warning"])
        rows = [["directory", str(run.directory)], *option_rows(differing_options([{}, run.options]))]
        yield table(rows, "Options that are not by default: the default, then that of the run")
