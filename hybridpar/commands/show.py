"""`hybridpar show`: prints a run, a plan or a timeline, and draws it.

The argument is the directory of a run, or a file that is recognised by its content: a plan, or a trace that
`--timeline` wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from hybridpar.commands import register_command
from hybridpar.commands.runs import check_page
from hybridpar.errors import PlanError, counted, shortened
from hybridpar.formats.file_reader import read_json
from hybridpar.spec import Options

if TYPE_CHECKING:
    from rich.console import Console

    from hybridpar.observe.timeline import Timeline
    from hybridpar.plan import Plan


class Show(Options):
    """Print a run, a plan or a timeline, and draw it.

    Attributes:
        file: A run directory, a plan of `hybridpar plan` or of a run, or a trace of `hybridpar train --timeline`.
        draw: Draw it into this .html file, a page with zoom; of a plan, the schedule with its predicted times. An
            earlier page is replaced.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    draw: Path | None = None


@register_command("show", Show)
def run_show(command: Show, _: Sequence[str]) -> int:
    """Print what is in a file, and draw it if asked to."""
    from rich.console import Console

    console, path, draw = Console(), command.file, command.draw
    if draw is not None:
        check_page("--draw", draw)
    shown, lines = _show_run(path, console) if path.is_dir() else _show_file(path, console)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if draw is not None and shown is not None:
        from hybridpar.observe.page import step_on_lanes, write_page
        from hybridpar.plan import Plan
        from hybridpar.run.plan_step import timeline_of_plan

        timeline = timeline_of_plan(shown) if isinstance(shown, Plan) else shown
        write_page(draw, path.name, [step_on_lanes(timeline)])
        console.print(f"drawn in {draw}", soft_wrap=True)
    return 0


def _show_run(directory: Path, console: Console) -> tuple[Plan | None, list[str]]:
    """Print the result of a run; its plan, and lines on how far it is, its plan and its checkpoints."""
    from hybridpar.observe.summary import print_report
    from hybridpar.plan import read_plan
    from hybridpar.run.runs import read_run

    run, lines, plan = read_run(directory), [""], None
    if run.summary is not None:
        print_report(run.summary, console=console)
    else:
        lines = [f"run  {run.options['model']} on {run.options.get('data', '')}, without a report:"]
        lines.append(f"     {run.table.last_step:,} steps are recorded; it is still running, or ended before its end")
    if (directory / "plan.json").exists():
        plan = read_plan(directory / "plan.json")
        lines += plan_lines(plan)
    return plan, lines + [f"checkpoint  {checkpoint}" for checkpoint in run.checkpoints]


def _show_file(path: Path, console: Console) -> tuple[Plan | Timeline, list[str]]:
    """Print the partition of a plan; the plan or the trace, and lines on it."""
    from hybridpar.observe.timeline import timeline_of
    from hybridpar.partition.table import print_partition
    from hybridpar.plan import parse_plan

    data = read_json(path, "the file", PlanError, "Name a run directory, a plan, or a trace of --timeline.")
    if isinstance(data, dict) and "traceEvents" in data:
        timeline = timeline_of(data, str(path))
        return timeline, [*timeline.lines()]
    plan = parse_plan(data, str(path))
    print_partition(plan, console)
    return plan, [*plan_lines(plan)]


def plan_lines(plan: Plan) -> Iterator[str]:
    """What a plan says besides its partition: how micro-batches flow, and what was predicted."""
    from hybridpar.observe.records import PREDICTED_FIGURES

    stages = len(plan.partition.stages)
    flow = f"plan      {counted(stages, 'stage')}, {counted(plan.layout.replicas, 'replica')}"
    if (pipeline := plan.pipeline) is not None and stages > 1:
        flow += f", {counted(pipeline.micro_batches, 'micro-batch')}, {pipeline.schedule}"
        for saving, what in ((pipeline.recompute, "computed again"), (pipeline.offload, "in the host's memory")):
            flow += f", stages {' '.join(map(str, saving))} {what}" if saving else ""
    yield flow
    rules = plan.sync.policy if plan.sync is not None else ()
    if any(rule.codec != "none" for rule in rules):
        yield "gradients " + shortened("; ".join(f"{rule.pattern} -> {rule.codec}" for rule in rules), 400)
    for row in PREDICTED_FIGURES:
        if (value := getattr(plan.predicted, row.name, None)) is not None:
            yield f"predicted {row.text(value):>9}  {row.title}"
