"""Draws a step of a timeline: the prediction above what was measured, on one axis of time.

A thick row per compute lane, with the number of the micro-batch in each box; below it thin
rows for transfers and sums of gradients. What a receive or a sum spends on waiting for others is pale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridpar.formats.output_files import check_picture, save_picture
from hybridpar.observe.timeline import Timeline, TimelineRow, begin_of, joined_at, length_ms
from hybridpar.observe.timeline_text import headline
from hybridpar.schedule.actions import COMPUTE, Action, Kind
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.spans import Span

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = {
    Kind.FORWARD: "#56B4E9",
    Kind.BACKWARD: "#E69F00",
    Kind.SEND_FORWARD: "#777777",
    Kind.SEND_BACKWARD: "#777777",
    Kind.RECEIVE_FORWARD: "#777777",
    Kind.RECEIVE_BACKWARD: "#777777",
    Kind.SYNC: "#009E73",
    Kind.STEP: "#CC79A7",
}
#: Kinds of actions in the order of the legend, with their names.
KIND_NAMES = (
    (Kind.FORWARD, "forward"),
    (Kind.BACKWARD, "backward"),
    (Kind.STEP, "optimizer"),
    (Kind.SEND_FORWARD, "transfer"),
    (Kind.SYNC, "gradient sum"),
)
_EXPOSED = "#D55E00"
_BUBBLE: dict[str, Any] = {"facecolor": "#F2F2F2", "hatch": "////", "edgecolor": "#D8D8D8", "linewidth": 0}

#: Heights of rows, in units of the height of a compute lane.
_THICK, _THIN, _GAP = 1.0, 0.34, 0.34


@dataclass(frozen=True)
class Box:
    """An action, in milliseconds since the beginning of the step.

    Attributes:
        action: What was done.
        start: When it started.
        joined: When the last party had come to it; what lies before was waiting.
        end: When it ended.
        turn: Which of its lane's stages it belongs to.
    """

    action: Action
    start: float
    joined: float
    end: float
    turn: int = 0


@dataclass(frozen=True)
class Line:
    """One row of the picture.

    Attributes:
        bottom: Where it begins, from the top, in heights of a compute lane.
        height: How high it is.
        name: What kind of queue it is.
        worker: Rank of its worker.
        queue: Kind of its queue.
        boxes: What was done in it.
    """

    bottom: float
    height: float
    name: str
    worker: int
    queue: str
    boxes: tuple[Box, ...]


def draw_timeline(timeline: Timeline, path: str | Path, *, unit: str = "ms") -> None:
    """Draw the step of median length into an SVG, PNG or PDF file: the prediction above what was measured."""
    check_picture("--draw", Path(path))
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    step = timeline.typical_step()
    panels = [rows for predicted in (True, False) if (rows := timeline.at(step, predicted=predicted))]
    lines = [list(picture_lines(rows, timeline.layout)) for rows in panels]
    end = max(box.end for panel in lines for line in panel for box in line.boxes)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a caller's own style could hide what is thin
        matplotlib.rcParams.update({"font.size": 10, "svg.hashsalt": "hybridpar", "hatch.linewidth": 0.6})
        heights = [panel[-1].bottom + panel[-1].height + 0.6 for panel in lines]
        figure = Figure(figsize=(14, 1.3 + 0.42 * sum(heights) + 0.45 * len(panels)), layout="constrained")
        FigureCanvasAgg(figure)
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        figure.suptitle(_title(timeline, step), fontsize=12, x=0.01, ha="left")
        for axes, rows, panel in zip(all_axes, panels, lines, strict=True):
            name = ("predicted" if rows[0].predicted else "measured") if len(panels) > 1 else ""
            _draw_panel(axes, panel, end, length_ms(rows))
            axes.set_title(panel_title(timeline, rows, panel, name, unit), fontsize=10, loc="left", pad=4)
        all_axes[-1].set_xlabel("milliseconds" if unit == "ms" else unit)
        _draw_legend(figure, lines)
        save_picture(figure, Path(path))


def _title(timeline: Timeline, step: int) -> str:
    several = len(timeline.steps) > 1
    return headline(timeline) + (f"; step {step}, the one of median length" if several else "")


def picture_lines(rows: Sequence[TimelineRow], layout: Layout) -> Iterator[Line]:
    """The rows of the picture, from top to bottom."""
    zero = begin_of(rows)
    joined = joined_at(rows, layout)
    top = 0.0
    for row in rows:
        shift = 1e3 * (row.spans.origin - zero)
        lanes = sum(1 for queue, _ in row.queues() if queue == "compute")
        for (queue, lane), spans in _merged(row):
            height = _THICK if queue == "compute" else _THIN
            stages = sorted({span.action.stage for span in spans})
            boxes = []
            for span in spans:
                start, end = max(0.0, shift + span.start_ms), max(0.0, shift + span.end_ms)
                when = joined.get((row.worker, span.action))
                ready = start if when is None else min(max(start, 1e3 * (when - zero)), end)
                boxes.append(Box(span.action, start, ready, end, stages.index(span.action.stage)))
            yield Line(top, height, _line_name(queue, lane, lanes), row.worker, queue, tuple(boxes))
            top += height + 0.08
        top += _GAP


def _merged(row: TimelineRow) -> Iterator[tuple[tuple[str, int], list[Span]]]:
    """Queues of a worker: its lanes, then all sends, all receives, then its sync lanes."""
    queues = row.queues()
    yield from ((key, spans) for key, spans in queues.items() if key[0] == "compute")
    for kind in ("send", "receive"):
        spans = [span for (queue, _), found in queues.items() if queue == kind for span in found]
        if spans:
            yield (kind, 0), spans
    yield from ((key, spans) for key, spans in queues.items() if key[0] == "sync")


def _line_name(queue: str, lane: int, lanes: int) -> str:
    if queue == "compute":
        return f"lane {lane}" if lanes > 1 else ""
    return f"sync {lane}" if queue == "sync" else queue


def _times(lines: Sequence[Line]) -> tuple[float, float]:
    """When the last pass of any worker ended, and its last sum of gradients."""
    computed = max((box.end for line in lines for box in line.boxes if box.action.kind in COMPUTE), default=0.0)
    summed = max((box.end for line in lines for box in line.boxes if box.action.kind is Kind.SYNC), default=0.0)
    return computed, summed


def _draw_panel(axes: Any, lines: Sequence[Line], end: float, length: float) -> None:
    from matplotlib.patches import Rectangle

    computed, summed = _times(lines)
    for line in lines:
        if line.queue == "compute":
            axes.add_patch(Rectangle((0, line.bottom), computed, line.height, **_BUBBLE))
        for box in line.boxes:
            _draw_box(axes, line, box, end)
    bottom = lines[-1].bottom + lines[-1].height
    if summed > computed:
        axes.axvspan(computed, summed, color=_EXPOSED, alpha=0.14, linewidth=0, zorder=0)
    axes.plot([length, length], [-0.25, bottom + 0.1], color="0.25", linewidth=1.0, linestyle=(0, (4, 2)))
    axes.set_ylim(bottom + 0.15, -0.35)
    axes.set_xlim(-0.004 * end, 1.012 * end)
    axes.set_yticks(
        [line.bottom + line.height / 2 for line in lines],
        [line_label(lines, number) for number in range(len(lines))],
        fontsize=8.5,
    )
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def line_label(lines: Sequence[Line], number: int) -> str:
    """What stands in front of a row: the worker in front of its first one, and what kind of queue it is."""
    line = lines[number]
    first = number == 0 or lines[number - 1].worker != line.worker
    return f"worker {line.worker}  {line.name}".rstrip() if first else line.name


def panel_title(timeline: Timeline, rows: Sequence[TimelineRow], lines: Sequence[Line], name: str, unit: str) -> str:
    """A step in figures: its length, its bubble, and the sums of gradients that computation did not hide."""
    computed, summed = _times(lines)
    drawn = "passes" if "whole" in timeline.facts else "step"
    parts = [f"{drawn} {length_ms(rows):,.1f} {unit}", f"bubble {100 * timeline.bubble(rows):.0f} %"]
    if summed > 0:
        parts.append(f"{max(0.0, summed - computed):,.1f} {unit} of gradient sums exposed")
    return f"{name}:  {',  '.join(parts)}" if name else ",  ".join(parts)


def _draw_box(axes: Any, line: Line, box: Box, end: float) -> None:
    from matplotlib.patches import Rectangle

    thick = line.queue == "compute"
    colour = _shade(COLOURS[box.action.kind], box.turn if thick else 0)
    if box.joined > box.start:
        middle = (box.start, line.bottom + line.height * 0.4)
        axes.add_patch(
            Rectangle(middle, box.joined - box.start, line.height * 0.2, facecolor=colour, alpha=0.25, linewidth=0)
        )
    # A hair's breadth at least, so that nothing that happened is invisible.
    width = max(box.end - box.joined, 0.0012 * end)
    edge, thickness = ("white", 0.7) if thick else (colour, 0.2)
    place = (box.joined, line.bottom)
    axes.add_patch(Rectangle(place, width, line.height, facecolor=colour, edgecolor=edge, linewidth=thickness))
    text = str(box.action.index)
    if box.action.kind in COMPUTE and width / end > 0.0052 * len(text) + 0.002:
        axes.text(
            box.joined + width / 2,
            line.bottom + line.height / 2,
            text,
            ha="center",
            va="center",
            fontsize=8.5,
            clip_on=True,
        )


def _shade(colour: str, turn: int) -> tuple[float, float, float]:
    """A colour, paler for every further stage of a lane."""
    from matplotlib.colors import to_rgb

    part = 0.6 ** min(turn, 3)
    red, green, blue = (1 - part * (1 - value) for value in to_rgb(colour))
    return red, green, blue


def _draw_legend(figure: Any, lines: Sequence[Sequence[Line]]) -> None:
    from matplotlib.patches import Patch

    boxes = [(line, box) for panel in lines for line in panel for box in line.boxes]
    kinds = {box.action.kind for _, box in boxes}
    handles = [Patch(facecolor=COLOURS[kind], label=name) for kind, name in KIND_NAMES if kind in kinds]
    if any(box.turn for line, box in boxes if line.queue == "compute"):
        handles.insert(0, Patch(facecolor="white", label="numbers are micro-batches; paler: later stages of a lane"))
    handles.append(Patch(label="bubble", **_BUBBLE))
    if Kind.SYNC in kinds:
        handles.append(Patch(facecolor=_EXPOSED, alpha=0.14, label="exposed sums"))
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=9)
