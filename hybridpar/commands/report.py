"""`hybridpar report`: writes one HTML page about one or several runs, also of runs that still train.

Damaged files leave out what they do not tell, with a line that says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from hybridpar.commands import register_command
from hybridpar.errors import check, not_installed
from hybridpar.formats.output_files import check_writable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from hybridpar.run.runs import PastRun


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one HTML page about a run, or several of them side by side. The page needs no network and no other file."""

    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")
    ]
    """Run directories."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The file to write; an earlier report is replaced."""


@register_command("report", "Write one HTML page about a run, or several of them side by side.", Report)
def run_report(command: Report, _: Sequence[str]) -> int:
    """Write the page."""
    check_page("--output", command.output)
    runs = read_runs(command.runs)
    from hybridpar.observe.page import write_page

    write_page(command.output, next(iter(runs)) if len(runs) == 1 else f"{len(runs)} runs", page_parts(runs))
    print(f"report written to {command.output}")
    return 0


def check_page(option: str, path: Path) -> None:
    """Refuse a page that could not be written; an earlier one is replaced."""
    if importlib.util.find_spec("plotly") is None:
        raise not_installed(f"{option} {path} needs plotly", "report")
    check(path.suffix == ".html", f"{option} {path}", "A page is an .html file.", f"Use {path.with_suffix('.html')}.")
    check_writable(option, path)


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
