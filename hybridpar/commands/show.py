"""`hybridpar show`: prints a run, a plan, a timeline or a schedule, and draws it.

The argument is the directory of a run, or a file that is recognised by its content: a plan, a trace that `--timeline`
wrote, or a schedule in the CSV format of torch.distributed.pipelining. Tables fit into 80 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from hybridpar.commands import register_command
from hybridpar.errors import PlanError, ScheduleError
from hybridpar.formats.file_reader import read_json

if TYPE_CHECKING:
    from rich.console import Console

    from hybridpar.observe.timeline import Timeline
    from hybridpar.plan import Plan
    from hybridpar.schedule.actions import Schedule
    from hybridpar.schedule.layout import Layout

_WIDTH = 80
_ANY_WIDTH = 10**9

#: Most rules of a codec policy that are shown.
_MOST_RULES = 12


@dataclass(frozen=True, kw_only=True)
class Show:
    """Print a run, a plan, a timeline or a schedule, and draw it."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A run directory, a plan of `hybridpar plan` or of a run, a trace of `hybridpar train --timeline`, or a schedule
    as CSV."""
    draw: Path | None = None
    """Draw it into this .svg, .png or .pdf file; of a plan, the schedule with its predicted times."""


@register_command("show", "Print a run, a plan, a timeline or a schedule, and draw it.", Show)
def _run(command: Show, _: Sequence[str]) -> int:
    return run_show(command.file, command.draw)


def run_show(path: Path, draw: Path | None = None, console: Console | None = None) -> int:
    """Print what is in a file, and draw it if asked to."""
    from rich.console import Console

    from hybridpar.run.plan_step import timeline_of_plan

    console = console or Console()
    if draw is not None:
        from hybridpar.formats.output_files import check_picture

        check_picture("--draw", draw)
    timeline: Timeline | None
    if path.is_dir():
        plan = _show_run(path, console)
        timeline, unit = (timeline_of_plan(plan) if plan is not None and draw is not None else None), "ms"
    elif path.suffix == ".csv":
        timeline, unit = _show_schedule(path, console), "slots"
    elif "traceEvents" in (data := _read_object(path)):
        timeline, unit = _show_trace(data, path, console), "ms"
    else:
        plan = _show_plan(data, path, console)
        timeline, unit = (timeline_of_plan(plan) if draw is not None else None), "ms"
    if draw is not None and timeline is not None:
        from hybridpar.observe.timeline_picture import draw_timeline

        draw_timeline(timeline, draw, unit=unit)
        console.print(f"picture written to {draw}", soft_wrap=True)
    return 0


def _read_object(path: Path) -> dict[str, Any]:
    why, fix = "Plans and traces are JSON; a schedule's name ends in .csv.", "Name such a file."
    data = read_json(path, "the file", PlanError, fix, why=why)
    return data if isinstance(data, dict) else {}


# --------------------------------------------------------------------------------------------------------------- runs


def _show_run(directory: Path, console: Console) -> Plan | None:
    """What a run is, how far it is, its result, its plan and its checkpoints."""
    from hybridpar.observe.report import print_report
    from hybridpar.plan import read_plan
    from hybridpar.run.runs import read_run

    run = read_run(directory)
    if run.summary is not None:
        print_report(run.summary, console=console)
    else:
        model, data = run.options["model"], run.options.get("data", "")
        console.print(f"run  {model} on {data}, without a report: still running, or ended before its end")
        console.print(f"     {run.figures['steps']:,} steps are recorded")
    console.print()
    plan = read_plan(directory / "plan.json") if (directory / "plan.json").exists() else None
    if plan is not None:
        console.print(
            f"plan         {len(plan.partition.stages)} stage(s), {plan.layout.replicas} replica(s)", highlight=False
        )
        for line in plan_lines(plan):
            console.print(line, highlight=False)
    best = (run.summary or {}).get("best") or {}
    label = str(best.get("metric", "")).replace("_", " ")
    for number, path in enumerate(run.checkpoints):
        said = f" (best {label})" * (path.relative_to(directory).as_posix() == best.get("checkpoint"))
        console.print(f"{'' if number else 'checkpoints':11}  {path}{said}", highlight=False, soft_wrap=True)
    if not run.checkpoints:
        console.print("checkpoints  none")
    return plan


# ------------------------------------------------------------------------------------------------------------- traces


def _show_trace(data: dict[str, Any], path: Path, console: Console) -> Timeline:
    from hybridpar.observe.timeline_file import timeline_of
    from hybridpar.observe.timeline_text import print_timeline

    timeline = timeline_of(data, str(path))
    print_timeline(timeline, console)
    return timeline


# ---------------------------------------------------------------------------------------------------------- schedules


def _show_schedule(path: Path, console: Console) -> Timeline:
    from hybridpar.run.plan_step import simulated
    from hybridpar.schedule.actions import read_schedule
    from hybridpar.schedule.check import check
    from hybridpar.schedule.costs import Costs
    from hybridpar.schedule.picture import draw_schedule

    schedule = read_schedule(path, path.stem)
    layout = _layout_of(schedule)
    proof = check(schedule, layout)
    # In unit time: what a pass takes is not in the file.
    costs = Costs((1.0,) * layout.stages, (2.0,) * layout.stages)
    timeline = simulated(schedule, layout, costs, {"schedule": schedule.name})
    console.print(
        f"{schedule.name}: {layout.stages} stages on {layout.lanes} lanes, {schedule.micro_batches} micro-batches",
        style="bold",
    )
    width = min(_WIDTH, console.width)
    for part in _wrapped(draw_schedule(schedule, layout, width=_ANY_WIDTH), width):
        console.print(part, markup=False, highlight=False, soft_wrap=True)
        console.print()
    bubble = timeline.bubble(timeline.at(0, predicted=True))
    console.print(f"{proof.slots} slots (F takes 1, B takes 2), bubble {100 * bubble:.1f} %")
    console.print(f"most micro-batches held, by stage: {' '.join(str(count) for count in proof.peak_in_flight)}")
    console.print("checked: every pass is there once, and no order of events can deadlock")
    return timeline


def _wrapped(grid: str, width: int) -> list[str]:
    """A grid whose lines are too long, in parts below each other."""
    lines = grid.splitlines()
    label = lines[0].index("0")
    column = lines[0].index("1", label + 1) - label if " 1" in lines[0] else 1
    each = max(1, (width - label) // column) * column
    longest = max(len(line) for line in lines)
    return [
        "\n".join((line[:label] + line[start : start + each]).rstrip() for line in lines)
        for start in range(label, longest, each)
    ]


def _layout_of(schedule: Schedule) -> Layout:
    """The layout that a schedule's rows imply: a worker per lane, and every stage hands on to the next."""
    from hybridpar.schedule.layout import Layout

    lane_of: dict[int, int] = {}
    for lane, row in enumerate(schedule.rows):
        for action in row:
            if lane_of.setdefault(action.stage, lane) != lane:
                raise ScheduleError(
                    f"stage {action.stage} of {schedule.name!r} stands on lanes {lane_of[action.stage]} and {lane}",
                    "Every stage runs on one lane.",
                    f"Move all its actions to the row of lane {lane_of[action.stage]}.",
                )
    missing = [stage for stage in range(schedule.stages) if stage not in lane_of]
    if missing:
        raise ScheduleError(
            f"schedule {schedule.name!r} has no stage {missing[0]}",
            "Stages are numbered from 0 without gaps.",
            f"Add actions of stage {missing[0]}, or number the others anew.",
        )
    return Layout.repeated((lane_of[stage], 0) for stage in range(schedule.stages))


# -------------------------------------------------------------------------------------------------------------- plans


def _show_plan(data: dict[str, Any], path: Path, console: Console) -> Plan:
    from hybridpar.partition.table import print_partition
    from hybridpar.plan import parse_plan, read_plan

    # A file is read by the plan's own reader, which has limits; a pipe cannot be read twice.
    plan = read_plan(path) if path.is_file() else parse_plan(data, str(path))
    print_partition(plan, console)
    for line in plan_lines(plan):
        console.print(line, highlight=False)
    return plan


def plan_lines(plan: Plan) -> list[str]:
    """What a plan says besides its partition: how micro-batches flow, and what was predicted."""
    lines = []
    if plan.pipeline is not None and len(plan.partition.stages) > 1:
        pipeline = plan.pipeline
        text = (
            f"pipeline  {pipeline.micro_batches} micro-batches, {pipeline.schedule}, {plan.layout.replicas} replica(s)"
        )
        if pipeline.recompute:
            text += f", stages {' '.join(map(str, pipeline.recompute))} computed again"
        if pipeline.offload:
            text += f", stages {' '.join(map(str, pipeline.offload))} in the host's memory"
        lines.append(text)
    if plan.sync is not None and any(rule.codec != "none" for rule in plan.sync.policy):
        width = min(36, max(len(rule.pattern) for rule in plan.sync.policy))
        rules = [f"{rule.pattern[:width]:{width}} as {rule.codec[:28]}" for rule in plan.sync.policy]
        lines += [f"{'' if index else 'gradients':9} {rule}" for index, rule in enumerate(rules[:_MOST_RULES])]
        if len(rules) > _MOST_RULES:
            lines.append(f"{'':9} and {len(rules) - _MOST_RULES} more rules")
    if plan.predicted is not None:
        predicted = plan.predicted
        parts = [
            ("step", predicted.step_ms, "{:,.1f} ms"),
            ("bubble", None if predicted.bubble is None else 100 * predicted.bubble, "{:.0f} %"),
            ("exposed sums", predicted.exposed_sync_ms, "{:,.1f} ms"),
            ("sent", _megabytes(predicted.bytes_sent_per_step), "{:,.2f} MB per worker"),
            ("kept for backward", _megabytes(predicted.peak_saved_bytes), "{:,.1f} MB"),
        ]
        told = [f"{name} {form.format(value)}" for name, value, form in parts if value is not None]
        lines += [f"predicted {', '.join(told[:3])}", f"          {', '.join(told[3:])}"] if told else []
    return [line.rstrip() for line in lines if line.strip()]


def _megabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e6
