"""What the report page shows of runs, read from the files of their directories.

Damaged files leave out what they do not tell, with a line that says so. Where a run has no summary yet, its figures are
those of the steps so far.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plotly.graph_objects import Figure
from rich.console import Console

from hybridpar.errors import HybridparError, UsageError
from hybridpar.observe.metrics import METRICS_FILE
from hybridpar.observe.page import element, table
from hybridpar.observe.page_figures import curves, parts_of_steps, step_on_lanes
from hybridpar.observe.records import PREDICTED_FIGURES, RunInfo
from hybridpar.observe.report import print_report
from hybridpar.observe.summary import summarize
from hybridpar.observe.timeline_file import read_timeline
from hybridpar.plan import Plan, read_plan
from hybridpar.run.directory import RUN_FILE, changed_options, run_facts
from hybridpar.run.runs import PastRun, comparison_rows, names_of, option_rows, read_run
from hybridpar.schedule.layout import Layout

#: A run without a summary whose last step is as old has ended, in seconds.
_SILENT = 120.0

#: Actions of a step that a page shows.
_MOST_BOXES = 4_000


@dataclass(frozen=True)
class ReportedRun:
    """What the files of a run say.

    Attributes:
        name: What the page calls it.
        files: Its facts and metrics, and its summary.
        summary: The same summary, or the figures so far of a run that left none, which is `running` or `stopped`.
        notes: What cannot be read.
    """

    name: str
    files: PastRun
    summary: dict[str, Any]
    notes: tuple[str, ...]


def check_runs(directories: Sequence[Path]) -> None:
    """Refuse what is no run, or no run at all."""
    if not directories:
        raise UsageError("no run is named", fix="Name a run directory, for instance runs/resnet18-digits.")
    resolved = [directory.resolve() for directory in directories]
    for number, directory in enumerate(directories):
        if resolved[number] in resolved[:number]:
            raise UsageError(f"{directory} is named twice", fix="Name each run once.")
        run_facts(directory)


def read_runs(directories: Sequence[Path]) -> list[ReportedRun]:
    """Read what the files of runs say."""
    return [_read(directory, name) for directory, name in zip(directories, names_of(directories), strict=True)]


def page_parts(runs: Sequence[ReportedRun]) -> Iterator[str | Figure]:
    """The page below its title: what compares runs, then each of them."""
    names = [run.name for run in runs]
    rows = comparison_rows([run.files for run in runs])
    caption = "Results, then the options that differ" if len(runs) > 1 else "Results"
    yield table(rows, ["", *names], caption=caption)
    figures = curves(names, [run.files.table for run in runs]), parts_of_steps(names, [run.summary for run in runs])
    yield from (figure for figure in figures if figure is not None)
    for run in runs:
        yield from _parts_of_run(run)


# -------------------------------------------------------------------------------------------------------------- files


def _read(directory: Path, name: str) -> ReportedRun:
    files, notes, plan = read_run(directory), list[str](), None
    if (directory / "plan.json").exists():
        try:
            plan = read_plan(directory / "plan.json")
        except HybridparError as error:
            notes.append(f"{error.what} {error.why}".strip())
    if (summary := files.summary) is None:
        times = [path.stat().st_mtime for file in (RUN_FILE, METRICS_FILE) if (path := directory / file).exists()]
        running = time.time() - max(times, default=0.0) < _SILENT
        summary = _figures_so_far(files, plan) | {"exit": "running" if running else "stopped"}
        if not running:
            notes.append("The run ended before its end, or stands still: figures are of its steps so far.")
    if not len(files.table.steps["step"]):
        notes.append("No step is recorded yet.")
    return ReportedRun(name, replace(files, summary=summary), summary, tuple(notes))


def _figures_so_far(run: PastRun, plan: Plan | None) -> dict[str, Any]:
    """A summary of the steps so far; what only the run itself could tell is missing."""
    options = run.options

    def number(name: str, usual: int) -> int:
        value = options.get(name)
        return value if isinstance(value, int) else usual

    layout = plan.layout if plan is not None else Layout.repeated([(0, 0)])
    pipeline = plan.pipeline if plan is not None else None
    info = RunInfo(
        model=options["model"],
        data=str(options.get("data", "")),
        workers=number("workers", layout.workers),
        device=plan.measured.device if plan is not None and plan.measured is not None else "",
        epochs=number("epochs", 0),
        steps_total=0,
        steps_per_epoch=0,
        parameters=plan.model.parameters if plan is not None else 0,
        batch_size=number("batch_size", 0),
        run_dir=run.directory,
        stages=layout.stages,
        replicas=layout.replicas,
        micro_batches=pipeline.micro_batches if pipeline is not None else 1,
        codec=plan.sync.codec if plan is not None and plan.sync is not None else "none",
        schedule=pipeline.schedule if pipeline is not None else "accumulate",
        sync=str(options.get("sync") or "allreduce"),
        servers=number("servers", 0),
    )
    summary = summarize(info, run.table, seed=number("seed", 0), ended="interrupted")
    versions = run.facts.get("versions")
    summary |= {"epochs": len(run.table.epochs), "versions": versions if isinstance(versions, dict) else {}}
    if plan is not None and plan.predicted is not None:
        predicted = plan.predicted.model_dump()
        summary |= {f"predicted_{row.name}": predicted[row.name] for row in PREDICTED_FIGURES if row.name in predicted}
    return summary


# -------------------------------------------------------------------------------------------------------------- parts


def _parts_of_run(run: ReportedRun) -> Iterator[str | Figure]:
    yield element("h2", run.name)
    for note in run.notes:
        yield element("strong", note)
    text = io.StringIO()
    print_report(run.summary, console=Console(file=text, width=120))
    yield element("pre", text.getvalue().strip("\n"))
    if warning := run.summary.get("prediction_warning"):
        yield element("strong", warning)
    yield from _timeline(run)
    versions = ", ".join(f"{name} {version}" for name, version in run.summary["versions"].items())
    yield table([["directory", str(run.files.directory)], ["versions", versions]], caption="Environment")
    changed = changed_options(run.files.options)
    yield table(option_rows(changed), caption="Options that are not by default")
    rest = {name: value for name, value in run.files.options.items() if name not in changed}
    yield table(option_rows(rest), caption="All other options", folded=True)


def _timeline(run: ReportedRun) -> Iterator[str | Figure]:
    """The step of median length that `--timeline` recorded."""
    if not (option := run.files.options.get("timeline")):
        return
    path = Path(str(option))
    path = path if path.exists() else run.files.directory / path.name
    try:
        timeline = read_timeline(path)
    except HybridparError as error:
        yield element("strong", f"There is no timeline to show: {error.what}.")
        return
    step = timeline.typical_step()
    boxes = sum(len(row.spans.spans) for row in timeline.rows if row.step == step)
    if boxes > _MOST_BOXES:
        show = f"hybridpar show {path} --draw FILE.svg"
        yield element("strong", f"A step has {boxes:,} actions, too many for this page: `{show}`.")
        return
    yield element("h3", "A step on its lanes")
    yield step_on_lanes(timeline)
    yield table([[name, str(timeline.facts[name])] for name in ("prediction", "clocks") if name in timeline.facts])
