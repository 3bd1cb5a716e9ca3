"""What the report page shows of runs, read from the files of their directories, as plain data for `observe/page.js`.

Files of an older version, or damaged ones, leave out what they do not tell, with a line that says so. Where a run has
no summary yet, its figures are those of the steps so far.
"""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridpar.errors import HybridparError, RunDirectoryError, UsageError
from hybridpar.formats.file_reader import read_text
from hybridpar.observe.curves import charts_of
from hybridpar.observe.metrics import METRICS_FILE, MetricsTable, read_metrics
from hybridpar.observe.page import lanes_block
from hybridpar.observe.records import RunInfo
from hybridpar.observe.report import fact_rows, predictions, step_parts
from hybridpar.observe.summary import read_summary, summarize, summary_schema
from hybridpar.observe.text import format_accuracy, format_bytes, format_duration, format_rate
from hybridpar.observe.timeline import Timeline
from hybridpar.observe.timeline_file import read_timeline
from hybridpar.plan import Plan, read_plan
from hybridpar.run.directory import RUN_FILE, changed_options, run_facts
from hybridpar.run.plan_step import timeline_of_plan
from hybridpar.run.runs import differing_options, names_of
from hybridpar.schedule.layout import Layout

#: A run without a summary whose last step is as old has ended, in seconds.
_SILENT = 120.0

#: Layers in the table of codecs, boxes of a timeline, and ages of gradients that a page shows.
_MOST_LAYERS, _MOST_BOXES, _MOST_AGES = 2_000, 4_000, 80

_Block = dict[str, Any]


@dataclass
class _Known:
    """What the files of a run say.

    Attributes:
        directory: Of the run.
        name: What the page calls it.
        facts: Its `run.json`.
        options: The options in that.
        table: Its metrics.
        plan: Its plan, if it can be read.
        summary: Its summary, or its figures so far.
        state: How it ended, or `running`, or `stopped` for one that left no summary.
        notes: What cannot be read.
    """

    directory: Path
    name: str
    facts: dict[str, Any]
    options: dict[str, Any]
    table: MetricsTable
    plan: Plan | None
    summary: dict[str, Any]
    state: str
    notes: list[str]


def check_runs(directories: Sequence[Path]) -> None:
    """Refuse what is no run, or no run at all."""
    if not directories:
        raise UsageError("no run is named", fix="Name a run directory, for instance runs/resnet18-digits.")
    places = [directory.resolve() for directory in directories]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise UsageError(f"{directories[number]} is named twice", fix="Name each run once.")
        run_facts(directories[number])


def page_data(directories: Sequence[Path]) -> dict[str, Any]:
    """Everything that the page shows."""
    names = names_of(directories)
    known = [_read(directory, name) for directory, name in zip(directories, names, strict=True)]
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    return {
        "title": f"{title} - hybridpar",
        "heading": title,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [
            {
                "name": one.name,
                "state": one.state,
                "about": _about(one),
                "notes": one.notes,
                "tiles": _tiles(one),
                "sections": list(_sections(one)),
            }
            for one in known
        ],
        "charts": charts_of([one.table for one in known]),
        "comparison": _comparison(known) if len(known) > 1 else None,
    }


# --------------------------------------------------------------------------------------------------------------- files


def _read(directory: Path, name: str) -> _Known:
    facts, notes = run_facts(directory), list[str]()
    options = facts.get("options")
    options = options if isinstance(options, dict) else {}
    plan: Plan | None = None
    if (directory / "plan.json").exists():
        try:
            plan = read_plan(directory / "plan.json")
        except HybridparError as error:
            notes.append(f"{error.what} {error.why}".strip())
    table, summary = read_metrics(directory), read_summary(directory)
    done = int(table.steps["step"][-1]) if len(table.steps["step"]) else 0
    if summary is not None and summary["steps"] >= done:
        state = summary["exit"]
    else:
        summary = _figures_so_far(facts, options, table, plan, directory)
        state = "running" if _seconds_silent(directory) < _SILENT else "stopped"
    if state == "stopped":
        notes.append(
            "The run ended before its end, or stands still: it left no summary, so figures are of its steps so far."
        )
    if not done:
        notes.append("No step is recorded yet.")
    return _Known(directory, name, facts, options, table, plan, summary, state, notes)


def _seconds_silent(directory: Path) -> float:
    times = [path.stat().st_mtime for name in (RUN_FILE, METRICS_FILE) if (path := directory / name).exists()]
    return time.time() - max(times, default=0.0)


def _figures_so_far(
    facts: Mapping[str, Any], options: Mapping[str, Any], table: MetricsTable, plan: Plan | None, directory: Path
) -> dict[str, Any]:
    """A summary of the steps so far; what only the run itself could tell is missing."""

    def number(name: str, usual: int) -> int:
        value = options.get(name)
        return value if isinstance(value, int) else usual

    layout = plan.layout if plan is not None else Layout.repeated([(0, 0)])
    pipeline = plan.pipeline if plan is not None else None
    info = RunInfo(
        model=facts["model"],
        data=str(options.get("data", "")),
        workers=number("workers", layout.workers),
        device=plan.measured.device if plan is not None and plan.measured is not None else "",
        epochs=number("epochs", 0),
        steps_total=0,
        steps_per_epoch=0,
        parameters=plan.model.parameters if plan is not None else 0,
        batch_size=number("batch_size", 0),
        run_dir=directory,
        stages=layout.stages,
        replicas=layout.replicas,
        micro_batches=pipeline.micro_batches if pipeline is not None else 1,
        codec=plan.sync.codec if plan is not None and plan.sync is not None else "none",
        schedule=pipeline.schedule if pipeline is not None else "accumulate",
        sync=str(options.get("sync") or "allreduce"),
        servers=number("servers", 0),
    )
    summary = summarize(info, table, seed=number("seed", 0), ended="interrupted")
    versions = facts.get("versions")
    summary |= {"epochs": len(table.epochs), "versions": versions if isinstance(versions, dict) else {}}
    if plan is not None and plan.predicted is not None:
        told = {f"predicted_{key}": value for key, value in plan.predicted.model_dump().items()}
        summary |= {key: value for key, value in told.items() if key in summary_schema()["properties"]}
    return summary


# ------------------------------------------------------------------------------------------------------------- figures


def _about(one: _Known) -> str:
    summary = one.summary
    workers = f"{summary['workers']} worker{'s' if summary['workers'] != 1 else ''}"
    where = f" on {summary['device']}" if summary["device"] else ""
    told = f"{summary['model']} on {summary['data']}, {workers}{where}, batch {summary['batch_size']:,}; "
    steps = f"{summary['steps']:,} steps in {format_duration(summary['train_seconds'])}"
    return told + steps + (f", resumed from step {summary['resumed_from']:,}" if summary["resumed_from"] else "")


#: Figures of a run: title, key of the summary, how they are told, and which value is the better one.
_FIGURES: tuple[tuple[str, str, Callable[[float], str], Callable[..., float] | None], ...] = (
    ("Test accuracy", "test_accuracy", format_accuracy, max),
    ("Best test accuracy", "best_test_accuracy", format_accuracy, max),
    ("Accuracy of EMA", "ema_test_accuracy", format_accuracy, max),
    ("Images per second", "images_per_second", lambda value: format_rate(value).removesuffix(" images/s"), max),
    ("Step, median", "step_ms_median", lambda value: f"{value:.1f} ms", min),
    ("Sent per step", "bytes_sent_per_step", format_bytes, min),
    ("Compression", "compression_ratio", lambda value: f"{value:.1f}x", None),
    ("Memory", "memory_bytes", format_bytes, min),
    ("Trained for", "train_seconds", format_duration, None),
)


def _tiles(one: _Known) -> list[list[str]]:
    """Title, value and remark of the figures on top."""
    summary = one.summary
    best, last = summary["best_test_accuracy"], summary["test_accuracy"]
    tiles = []
    for title, key, told, _ in _FIGURES:
        if (value := summary.get(key)) is None or key == "best_test_accuracy":
            continue
        remark = ""
        if key == "test_accuracy" and best is not None and best > last:
            remark = f"best {format_accuracy(best)}"
        elif key in ("bytes_sent_per_step", "memory_bytes"):
            remark = "per worker" if key == "bytes_sent_per_step" else "most of any worker"
        elif key == "images_per_second":
            remark = "median"
        elif key == "compression_ratio":
            remark = "less bytes of gradients"
            if value <= 1.0:
                continue
        elif key == "train_seconds":
            remark = f"{summary['epochs']:,} whole epoch{'s' if summary['epochs'] != 1 else ''}"
        tiles.append([title, told(value), remark])
    return tiles


def _comparison(known: Sequence[_Known]) -> _Block:
    """Results, and the options that are not the same in all runs."""
    rows: list[list[Any]] = [["State", *(one.state for one in known)]]
    best: list[int | None] = [None]
    for title, key, told, better in _FIGURES:
        values = [one.summary.get(key) for one in known]
        there = [value for value in values if value is not None]
        if there:
            rows.append([title, *("-" if value is None else told(value) for value in values)])
            wins = [number for number, value in enumerate(values) if better and value == better(there)]
            best.append(1 + wins[0] if len(wins) == 1 and len(there) > 1 else None)
    begun = [one.options | {"model": one.facts["model"]} for one in known]
    for name, options in differing_options(begun).items():
        rows.append([_flag(name), *map(_text, options)])
        best.append(None)
    return _table(["", *(one.name for one in known)], rows, best=best, name="What differs, results first")


# ------------------------------------------------------------------------------------------------------------ sections


def _sections(one: _Known) -> Iterator[dict[str, Any]]:
    for key, title, blocks in (
        ("step", "Where the time of a step went", _step_blocks(one)),
        ("predicted", "Predicted beside measured", _prediction_blocks(one)),
        ("plan", "Plan", _plan_blocks(one)),
        ("timeline", "A step on its lanes", _timeline_blocks(one)),
        ("gradients", "Gradients", _gradient_blocks(one)),
        ("staleness", "Staleness", _staleness_blocks(one)),
        ("memory", "Memory", _memory_blocks(one)),
        ("environment", "Environment and options", _environment_blocks(one)),
    ):
        if found := list(blocks):
            yield {"key": key, "title": title, "blocks": found}


def _step_blocks(one: _Known) -> Iterator[_Block]:
    if parts := step_parts(one.summary):
        yield {
            "type": "parts",
            "parts": [[name, f"{value:.2f} ms", share, round(value, 3)] for name, value, share in parts],
        }
    if rows := fact_rows(one.summary):
        yield {"type": "facts", "rows": [[label, text] for label, text, _ in rows]}


def _prediction_blocks(one: _Known) -> Iterator[_Block]:
    rows = [
        [
            found.name,
            found.predicted,
            found.measured,
            found.told(found.predicted),
            found.told(found.measured),
            found.apart,
        ]
        for found in predictions(one.summary)
    ]
    if rows:
        yield {"type": "beside", "rows": rows}
    if warning := one.summary.get("prediction_warning"):
        yield _note(warning, warn=True)
    if one.plan is not None and one.plan.predicted is None and not rows:
        yield _note("Nothing was predicted: the run did what its options said. `--plan auto` predicts.")


def _plan_blocks(one: _Known) -> Iterator[_Block]:
    plan = one.plan
    if plan is None:
        return
    stages, placement, pipeline = plan.partition.stages, plan.placement, plan.pipeline
    rows = [["model", f"{plan.model.name}, {plan.model.parameters:,} parameters"]]
    if placement is not None:
        rows.append(
            ["layout", f"{len(stages)} stage(s) x {plan.layout.replicas} replica(s), {plan.layout.kind or 'as named'}"]
        )
    if pipeline is not None:
        rows.append(["schedule", f"{pipeline.schedule}, {pipeline.micro_batches} micro-batch(es)"])
    if plan.sync is not None:
        rows.append(["gradients as", plan.sync.codec])
    yield {"type": "facts", "rows": rows}
    if len(stages) > 1:
        table = []
        for index, stage in enumerate(stages):
            worker, lane = plan.layout.replica().rows[0][index]
            units = f"{stage.units[0]} to {stage.units[-1]} ({len(stage.units)})" if stage.units else ""
            table.append(
                [
                    str(index),
                    units,
                    f"worker {worker}, {placement.device}, lane {lane}" if placement is not None else "",
                    *("" if value is None else f"{value:.2f} ms" for value in (stage.forward_ms, stage.backward_ms)),
                    format_bytes(stage.parameter_bytes),
                    *("" if value is None else format_bytes(value) for value in (stage.saved_bytes, stage.cut_bytes)),
                ]
            )
        head = ["stage", "units", "where", "forward", "backward", "parameters", "kept for backward", "sent on"]
        yield _table(head, table, name="Stages, per micro-batch", numbers=range(3, 8))


def _timeline_blocks(one: _Known) -> Iterator[_Block]:
    """What `--timeline` recorded, else what the plan has."""
    if told := one.options.get("timeline"):
        path = Path(str(told))
        path = path if path.exists() else one.directory / path.name
        try:
            timeline = read_timeline(path)
        except HybridparError as error:
            yield _note(f"There is no timeline to show: {error.what}.")
        else:
            yield from _lanes(timeline, "The step of median length of those that --timeline recorded", str(path))
            facts = [[name, str(timeline.facts[name])] for name in ("prediction", "clocks") if name in timeline.facts]
            if facts:
                yield {"type": "facts", "rows": facts}
            return
    if one.plan is not None and len(one.plan.partition.stages) > 1:
        try:
            name = "Passes and transfers as the plan has them; --timeline FILE records what really runs"
            yield from _lanes(timeline_of_plan(one.plan), name, "plan.json")
        except HybridparError as error:
            yield _note(f"The step of the plan is not drawn: {error.what}.")


def _lanes(timeline: Timeline, name: str, source: str) -> Iterator[_Block]:
    block = lanes_block(timeline)
    boxes = sum(len(row["boxes"]) for panel in block["panels"] for row in panel["rows"])
    if boxes > _MOST_BOXES:
        yield _note(f"A step has {boxes:,} actions, too many for this page: `hybridpar show {source} --draw FILE.svg`.")
    else:
        yield block | {"name": name}


def _gradient_blocks(one: _Known) -> Iterator[_Block]:
    path = one.directory / "compress.csv"
    if not path.exists():
        return
    residual, norms = one.table.steps["residual_norm"], one.table.residual_norms
    residual = residual[residual == residual]  # without NaN
    if len(residual):
        told = f"last {residual[-1]:.4g}, largest {residual.max():.4g}, measured in {len(residual):,} of the steps"
        yield {"type": "facts", "rows": [["residual norm", told]]}
    try:
        lines = list(csv.DictReader(io.StringIO(read_text(path, "the table of codecs", RunDirectoryError))))[
            :_MOST_LAYERS
        ]
        rows = []
        for line in sorted(lines, key=lambda line: -float(line["bytes_before"])):
            before, after = float(line["bytes_before"]), float(line["bytes_after"])
            sizes = [format_bytes(before), format_bytes(after), f"{before / max(1.0, after):.1f}x"]
            rows.append([line["layer"], line["kind"], f"{int(line['size']):,}", line["codec"], *sizes])
            if norms:
                left = norms.get(line["layer"], math.nan)
                rows[-1].append("" if math.isnan(left) else f"{left:.4g}")
    except (HybridparError, csv.Error, KeyError, TypeError, ValueError) as error:
        yield _note(f"{path.name} cannot be read: {getattr(error, 'what', error)}")
        return
    head = ["layer", "kind", "size", "codec", "before", "after", "less"]
    numbers: tuple[int, ...] = (2, 4, 5, 6)
    if norms:  # of worker 0, when they were measured last
        head, numbers = [*head, "not sent yet (norm)"], (*numbers, 7)
    yield _table(head, rows, name="What a worker sends of each layer in a step", numbers=numbers, first=10)


def _staleness_blocks(one: _Known) -> Iterator[_Block]:
    ages = one.summary.get("staleness")
    if not ages or ages["mean"] is None:
        return
    total = sum(ages["histogram"].values()) or 1
    rows = [["updates", f"mean {ages['mean']:.2f}, largest {ages['most']}"]]
    if one.summary.get("queued") is not None:
        rows.append(["queued", f"{one.summary['queued']:.2f} gradients waited when one arrived, that one included"])
    yield {"type": "facts", "rows": rows}
    yield {
        "type": "bars",
        "name": "Gradients by the updates between their weights and their arrival",
        "rows": [
            [str(age), round(100 * count / total, 2), f"{count:,}"]
            for age in range(min(int(ages["most"]), _MOST_AGES) + 1)
            for count in [ages["histogram"].get(str(age), 0)]
        ],
    }


def _memory_blocks(one: _Known) -> Iterator[_Block]:
    summary, rows = one.summary, []
    for key, name in (("memory_bytes", "most of any worker"), ("peak_saved_bytes", "kept for backward")):
        if (value := summary.get(key)) is not None:
            predicted = summary.get(f"predicted_{key}")
            rows.append([name, format_bytes(value) + (f", predicted {format_bytes(predicted)}" if predicted else "")])
    if one.plan is not None and one.plan.model.parameters:
        rows.append(["parameters", f"{format_bytes(4 * one.plan.model.parameters)} in float32"])
    if rows:
        yield {"type": "facts", "rows": rows}


def _environment_blocks(one: _Known) -> Iterator[_Block]:
    summary, measured = one.summary, one.plan.measured if one.plan is not None else None
    rows = [["device", str(summary["device"])]] if summary["device"] else []
    rows.append(
        ["workers", f"{summary['workers']}" + (f", servers {summary['servers']}" if summary["servers"] else "")]
    )
    if measured is not None and measured.threads is not None:
        rows.append(["threads", f"{measured.threads} per worker, {measured.dtype}, {measured.memory_format}"])
    if measured is not None and measured.link_bytes_per_second:
        rows.append(
            ["link", f"{format_bytes(measured.link_bytes_per_second)}/s, {measured.link_latency_ms or 0:.3f} ms"]
        )
    rows.append(["versions", ", ".join(f"{name} {version}" for name, version in summary["versions"].items())])
    rows += [["seed", str(summary["seed"])], ["directory", str(one.directory)]]
    yield {"type": "facts", "rows": rows}
    if one.options:
        changed = changed_options(one.options)
        pairs = [[_flag(name), _text(value)] for name, value in changed.items()]
        rest = [[_flag(name), _text(value)] for name, value in one.options.items() if name not in changed]
        yield _table(["option", "value"], pairs + rest, name="Options, those not by default first", first=len(pairs))


# -------------------------------------------------------------------------------------------------------------- blocks


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    name: str,
    numbers: Sequence[int] = (),
    first: int | None = None,
    best: Sequence[int | None] = (),
) -> _Block:
    """A table of which the first rows are shown at once; `best` is for each row the column with the best value."""
    shown = len(rows) if first is None else first
    return {
        **{"type": "table", "name": name, "head": list(head), "rows": rows, "numbers": list(numbers), "first": shown},
        "best": list(best),
    }


def _note(text: str, *, warn: bool = False) -> _Block:
    return {"type": "note", "text": text, "warn": warn}


def _flag(name: str) -> str:
    return name if name == "model" else f"--{name.replace('_', '-')}"


def _text(value: object) -> str:
    """The value of an option."""
    if isinstance(value, list):
        return " ".join(map(_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
