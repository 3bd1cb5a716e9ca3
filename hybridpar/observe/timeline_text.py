"""Prints a timeline in a terminal: figures of every worker, then a strip per lane, 80 columns wide."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridpar.observe.text import counted
from hybridpar.observe.timeline import Timeline, TimelineRow, begin_of, joined_at, length_ms
from hybridpar.schedule.actions import COMPUTE, Action, Kind
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.spans import Span

WIDTH = 80

#: What fills the box of an action behind its name, and its colour.
_LOOKS: dict[Kind, tuple[str, str]] = {
    Kind.FORWARD: ("-", "blue"),
    Kind.BACKWARD: ("=", "yellow"),
    Kind.SEND_FORWARD: (">", "bright_black"),
    Kind.SEND_BACKWARD: ("<", "bright_black"),
    Kind.SYNC: ("s", "green"),
    Kind.STEP: ("o", "red"),
}

#: Columns of the table: name, and the figure of one worker in one step, given all workers of its replica.
_FIGURES: tuple[tuple[str, Callable[[TimelineRow, Sequence[TimelineRow]], float]], ...] = (
    ("step ms", lambda row, replica: 1e3 * (row.end - max(row.spans.origin, begin_of(replica)))),
    ("forward", lambda row, replica: _busy(row, Kind.FORWARD)),
    ("backward", lambda row, replica: _busy(row, Kind.BACKWARD)),
    ("idle", lambda row, replica: 100 * _idle(row, replica)),
    ("sums", lambda row, replica: row.spans.sync_ms),
    ("exposed", lambda row, replica: row.spans.exposed_sync_ms),
)


def print_timeline(timeline: Timeline, console: Console | None = None) -> None:
    """Print figures of all workers, and the strips of one typical step."""
    console = console or Console()
    console.print(Text(headline(timeline), style="bold"))
    for key in ("prediction", "clocks"):
        if key in timeline.facts:
            console.print(Text(f"{key}: {timeline.facts[key]}", style="dim"))
    console.print()
    console.print(_table(timeline))
    width = min(WIDTH, console.width)
    step = timeline.typical_step()
    several = len(timeline.steps) > 1
    both = len({row.predicted for row in timeline.rows}) > 1
    end = max(length_ms(timeline.at(step, predicted=predicted)) for predicted in (True, False))
    for predicted in (True, False):
        rows = timeline.at(step, predicted=predicted)
        if not rows:
            continue
        parts = ["predicted" if predicted else "measured"] if both else []
        parts += [f"step {step}, the one of median length"] if several and not predicted else []
        parts.append(f"{length_ms(rows):,.1f} ms, bubble {100 * timeline.bubble(rows):.0f} %")
        console.print()
        console.print(Text(":  ".join(parts), style="bold"))
        for line in strips(rows, timeline.layout, end, width):
            console.print(line, no_wrap=True, overflow="crop")
    console.print()
    console.print(_legend(timeline), no_wrap=True)


def headline(timeline: Timeline) -> str:
    """What ran, in a line."""
    facts = timeline.facts
    parts = [str(facts["model"])] if "model" in facts else []
    if "stages" in facts:
        replicas = f" x {timeline.layout.replicas} replicas" if timeline.layout.replicas > 1 else ""
        parts.append(counted(facts["stages"], "stage") + replicas)
    if "micro_batches" in facts:
        parts.append(counted(facts["micro_batches"], "micro-batch"))
    if "schedule" in facts:
        parts.append(str(facts["schedule"]))
    if "whole" in facts:
        parts.append(str(facts["whole"]))
    steps = timeline.steps
    if any(not row.predicted for row in timeline.rows):
        parts.append(f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}")
    return ", ".join(parts)


def strips(rows: Sequence[TimelineRow], layout: Layout, end_ms: float, width: int = WIDTH) -> list[Text]:
    """A line per lane: boxes of `F0--` and `B0====` on a common axis."""
    zero = begin_of(rows)
    joined = joined_at(rows, layout)
    lines = list(_lines(rows, layout))
    label = max(len(name) for name, _, _ in lines) + 2
    columns = max(10, width - label)
    scale = columns / end_ms if end_ms > 0 else 0.0
    several = any(
        len({span.action.stage for span in spans if span.action.kind in COMPUTE}) > 1 for _, _, spans in lines
    )
    last = f"{end_ms:,.1f} ms"
    drawn = [Text(" " * label + "0" + last.rjust(columns - 1), style="dim")]
    for name, row, spans in lines:
        cells = Text("." * columns, style="dim") if spans[0].queue == "compute" else Text(" " * columns)
        for span in spans:
            start = joined.get((row.worker, span.action), row.spans.origin + span.start_ms / 1e3)
            left = max(0, int(1e3 * (start - zero) * scale))
            right = round((1e3 * (row.spans.origin - zero) + span.end_ms) * scale)
            left = min(left, columns - 1)
            fill, colour = _LOOKS[span.action.kind]
            box = _box(span.action, fill, several)[: max(1, right - left)].ljust(max(1, right - left), fill)
            cells = cells[:left] + Text(box[: columns - left], style=colour) + cells[left + len(box) :]
        drawn.append(Text(name.ljust(label)) + cells[:columns])
    return drawn


def _lines(rows: Sequence[TimelineRow], layout: Layout) -> Iterator[tuple[str, TimelineRow, list[Span]]]:
    """Every lane of every worker that computes, sends or sums; receives are seen in their sends."""
    for row in rows:
        lanes = [item for item in row.queues().items() if item[0][0] in ("compute", "send", "sync")]
        counts = {queue: sum(1 for (one, _), _ in lanes if one == queue) for (queue, _), _ in lanes}
        for number, ((queue, lane), spans) in enumerate(lanes):
            if queue == "send":
                name = f"to {layout.peer(row.worker, lane)}"
            elif queue == "sync":
                name = f"sync {lane}"
            else:
                name = f"lane {lane}" if counts[queue] > 1 else "computes"
            yield (f"worker {row.worker} {name}" if number == 0 else f"{'':9}{name}"), row, spans


def _box(action: Action, fill: str, several: bool) -> str:
    if action.kind in COMPUTE:
        return f"{action.stage if several else ''}{action.kind.value}{action.index}{fill}"
    return fill


def _table(timeline: Timeline) -> Table:
    """The median of every figure over the steps, predicted above measured."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    table.add_column("")
    for name, _ in _FIGURES:
        table.add_column(name, justify="right", no_wrap=True)
    for worker in sorted({row.worker for row in timeline.rows}):
        for predicted in (True, False):
            figures = _figures_of(timeline, worker, predicted)
            if figures:
                medians = [statistics.median(values) for values in zip(*figures, strict=True)]
                shown = [
                    f"{value:.1f} %" if name == "idle" else f"{value:,.1f}"
                    for (name, _), value in zip(_FIGURES, medians, strict=True)
                ]
                table.add_row(f"worker {worker}", "predicted" if predicted else "measured", *shown)
    return table


def _figures_of(timeline: Timeline, worker: int, predicted: bool) -> list[list[float]]:
    """All figures of a worker in every step."""
    found = []
    for step in timeline.steps:
        rows = timeline.at(step, predicted=predicted)
        ranks = timeline.layout.ranks[timeline.layout.replica_of(worker)]
        replica = [row for row in rows if row.worker in ranks]
        found += [[figure(row, replica) for _, figure in _FIGURES] for row in rows if row.worker == worker]
    return found


def _legend(timeline: Timeline) -> Text:
    kinds = {span.action.kind for row in timeline.rows for span in row.spans.spans}
    legend = Text()
    for kind, text in (
        (Kind.FORWARD, "F-- forward"),
        (Kind.BACKWARD, "B== backward"),
        (Kind.SEND_FORWARD, "> < sends"),
        (Kind.SYNC, "s gradient sums"),
        (Kind.STEP, "o optimizer"),
    ):
        if kind in kinds:
            legend += Text(f"{text}   ", style=_LOOKS[kind][1])
    return legend + Text(". idle", style="dim")


def _busy(row: TimelineRow, kind: Kind) -> float:
    return sum(span.duration_ms for span in row.spans.spans if span.action.kind is kind)


def _idle(row: TimelineRow, replica: Sequence[TimelineRow]) -> float:
    """Part of its lanes' time, from the beginning of the step to the last pass of any worker, without a pass."""
    mine = row.spans.computed
    span_ms = 1e3 * (max(other.spans.computed.end for other in replica) - begin_of(replica))
    return max(0.0, 1 - mine.busy_ms / (mine.lanes * span_ms)) if mine.lanes and span_ms > 0 else 0.0
