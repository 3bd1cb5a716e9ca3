"""What the report page shows of runs, read from the files of their directories, also of runs that still train.

Damaged files leave out what they do not tell, with a line that says so.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from plotly.graph_objects import Figure
from rich.console import Console

from hybridpar.errors import UsageError
from hybridpar.observe.page import curves, element, step_on_lanes, table
from hybridpar.observe.report import print_report
from hybridpar.observe.timeline import read_timeline
from hybridpar.run.directory import changed_options
from hybridpar.run.runs import PastRun, comparison_rows, names_of, option_rows, read_run

#: Actions of a step that a page shows.
_MOST_BOXES = 4_000


def read_runs(directories: Sequence[Path]) -> dict[str, PastRun]:
    """The runs by their names on the page; what is no run, or none at all, is refused."""
    if not directories:
        raise UsageError("no run is named", fix="Name a run directory, for instance runs/resnet18-digits.")
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise UsageError("a run is named twice", fix="Name each run once.")
    return {name: read_run(directory) for name, directory in zip(names_of(directories), directories, strict=True)}


def page_parts(runs: dict[str, PastRun]) -> Iterator[str | Figure]:
    """The page below its title: what compares runs, then each of them."""
    caption = "Results, then the options that differ" if len(runs) > 1 else "Results"
    yield table([["", *runs], *comparison_rows([*runs.values()])], caption)
    if (figure := curves([*runs], [run.table for run in runs.values()])) is not None:
        yield figure
    for name, run in runs.items():
        yield element("h2", name)
        yield from _parts_of_run(run)


def _parts_of_run(run: PastRun) -> Iterator[str | Figure]:
    if run.summary is None:
        yield element("p", f"There is no report yet: {run.table.last_step:,} steps are recorded so far.")
    else:
        text = io.StringIO()
        print_report(run.summary, console=Console(file=text, width=120))
        yield element("pre", text.getvalue().strip("\n"))
        if run.summary["prediction_warning"]:
            yield element("strong", run.summary["prediction_warning"])
    if run.options.get("timeline"):
        yield from _timeline(run, Path(str(run.options["timeline"])))
    yield table(
        [["directory", str(run.directory)], *option_rows(changed_options(run.options))], "Options not by default"
    )


def _timeline(run: PastRun, path: Path) -> Iterator[str | Figure]:
    """The step of median length that `--timeline` recorded."""
    try:
        timeline = read_timeline(path if path.exists() else run.directory / path.name)
    except UsageError as error:
        yield element("strong", f"There is no timeline to show: {error.what}.")
        return
    boxes = sum(len(row.spans.spans) for row in timeline.rows) // len(timeline.steps)
    if boxes > _MOST_BOXES:
        yield element(
            "strong", f"A step has {boxes:,} actions, too many for this page: open {path} in ui.perfetto.dev."
        )
        return
    yield element("h3", "A step on its lanes")
    yield element("pre", "\n".join(timeline.lines()))
    yield step_on_lanes(timeline)
