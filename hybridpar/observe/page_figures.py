"""The figures of the report page, as plotly draws them: curves and parts of a step of several runs, and a timeline."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from plotly.graph_objects import Bar, Figure, Scatter
from plotly.subplots import make_subplots

from hybridpar.observe.metrics import MetricsTable
from hybridpar.observe.plots import running_mean
from hybridpar.observe.records import EPOCH_FIGURES, STEP_FIGURES
from hybridpar.observe.report import step_parts
from hybridpar.observe.timeline import Timeline, describe_action, length_ms
from hybridpar.observe.timeline_picture import COLOURS, KIND_NAMES, Line, line_label, panel_title, picture_lines
from hybridpar.schedule.actions import COMPUTE

#: Points of all curves of a chart, at most.
_MOST_POINTS = 4000

# Okabe and Ito's palette, darkened: colour-blind readers can tell these apart. Further runs have other dashes.
_RUN_COLOURS = ("#0072b2", "#d55e00", "#007f5f", "#b0518c", "#b98300", "#3a9bd1", "#4d4d4d", "#7a5195")
_DASHES = ("solid", "dash", "dot", "dashdot")


def _charts() -> list[str]:
    """Titles of the charts, those with results of tests first."""
    titles = dict.fromkeys(row.chart for row in (*STEP_FIGURES, *EPOCH_FIGURES) if row.chart)
    tested = {row.chart for row in EPOCH_FIGURES}
    return sorted(titles, key=lambda title: title not in tested)


def curves(names: Sequence[str], tables: Sequence[MetricsTable]) -> Figure | None:
    """The curves of all runs, with one legend entry per run, on axes that are zoomed together; None without any."""
    points = max(200, _MOST_POINTS // len(tables))
    charts = [(chart, [list(_traces(chart, table, points)) for table in tables]) for chart in _charts()]
    charts = [(chart, runs) for chart, runs in charts if any(runs)]
    if not charts:
        return None
    titles = [chart for chart, _ in charts]
    figure = make_subplots(len(charts), 1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.3 / len(charts))
    seconds: list[list[float | None]] = []
    named: set[int] = set()
    for row, (_, runs) in enumerate(charts, start=1):
        for run, traces in enumerate(runs):
            for trace, times in traces:
                trace.name = ", ".join(filter(None, (html.escape(names[run]), trace.name)))
                trace.update(legendgroup=str(run), showlegend=run not in named)
                trace.marker.color = trace.line.color = _RUN_COLOURS[run % len(_RUN_COLOURS)]
                trace.line.dash = _DASHES[run // len(_RUN_COLOURS) % len(_DASHES)]
                named.add(run)
                seconds.append(times)
                figure.add_trace(trace, row, 1)
    figure.update_xaxes(title="step", row=len(charts))
    along = [("steps", [trace.x for trace in figure.data], "step"), ("training time", seconds, "seconds")]
    axis = f"xaxis{len(charts) if len(charts) > 1 else ''}.title.text"
    menus = [_menu(0.0, [(label, "update", [{"x": x}, {axis: unit}]) for label, x, unit in along])]
    if titles[0] == "Loss":
        scales = [("linear loss", "linear"), ("logarithmic loss", "log")]
        menus.append(_menu(0.25, [(label, "relayout", [{"yaxis.type": scale}]) for label, scale in scales]))
    layout = {"template": "plotly_white", "height": 120 + 250 * len(charts), "updatemenus": menus}
    return figure.update_layout(**layout, hovermode="x unified", hoverlabel={"namelength": -1})


def _menu(x: float, buttons: Sequence[tuple[str, str, list[Any]]]) -> dict[str, Any]:
    plain = [{"label": label, "method": method, "args": args} for label, method, args in buttons]
    above = {"x": x, "xanchor": "left", "y": 1.0, "yanchor": "bottom", "pad": {"b": 30}}
    return {"type": "buttons", "direction": "right", "buttons": plain, **above}


def _traces(chart: str, table: MetricsTable, points: int) -> Iterator[tuple[Scatter, list[float | None]]]:
    """The curves of a run in a chart, the main one first, each with the training time of its points."""
    of_steps, of_epochs = ([row for row in rows if row.chart == chart] for rows in (STEP_FIGURES, EPOCH_FIGURES))
    steps = table.steps["step"]
    seconds = np.nancumsum(table.steps["step_ms"]) / 1000

    def trace(x: NDArray[np.float64], y: NDArray[np.float64], **style: Any) -> tuple[Scatter, list[float | None]]:
        times = np.interp(x, steps, seconds) if len(steps) else np.zeros(len(x))
        return Scatter(x=x.tolist(), y=_short(y), **style), _short(times)

    for row in of_steps:
        values = table.steps[row.name]
        known = np.flatnonzero(np.isfinite(values))
        if not len(known):
            continue
        extremes = known[thinned(values[known], points)]
        mode = "lines+markers" if len(known) < 30 else "lines"
        noisy = row.unit != "rate"
        if noisy:
            middles = np.linspace(0, len(known) - 1, min(points, len(known))).astype(int)
            means = running_mean(values[known], max(5, len(known) // 50))
            yield trace(steps[known[middles]], means[middles], mode=mode)
        pale = {"name": "each step", "opacity": 0.35, "line": {"width": 1}} if noisy else {}
        yield trace(steps[extremes], values[extremes], mode=mode, **pale)
        skipped = steps[table.steps["skipped"] > 0]
        if row.name == "loss" and len(skipped):
            # At the foot of the chart: a skipped step often has no loss to stand on.
            skipped = skipped[thinned(skipped, 200)]
            foot = np.full(len(skipped), values[known].min())
            yield trace(skipped, foot, mode="markers", name="skipped step", marker={"symbol": "x"})
    for row in of_epochs:
        tested = [(epoch.step, value) for epoch in table.epochs if (value := getattr(epoch, row.name)) is not None]
        if tested:
            at, results = np.array(tested, dtype=np.float64).T
            index = thinned(results, points)
            mode = "lines+markers" if len(index) < 60 else "lines"
            scale = 100 if row.unit == "accuracy" else 1
            yield trace(at[index], scale * results[index], mode=mode, name=row.curve)


def thinned(values: NDArray[np.float64], points: int) -> NDArray[np.int64]:
    """Indices of at most so many values: of each stretch the least and the largest, so that none that sticks out is
    lost.
    """
    if len(values) <= points:
        return np.arange(len(values))
    stretches = np.array_split(np.arange(len(values)), points // 2)
    return np.unique([index[pick(values[index])] for index in stretches for pick in (np.argmin, np.argmax)])


def _short(values: NDArray[np.float64]) -> list[float | None]:
    """Five digits, as many as a screen shows."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]


def parts_of_steps(names: Sequence[str], summaries: Sequence[Mapping[str, Any]]) -> Figure | None:
    """A bar per run of where the time of a step went; None where nothing is known of it."""
    parts: dict[str, list[tuple[str, float, str]]] = {}
    for run, summary in zip(names, summaries, strict=True):
        for part, value, share in step_parts(summary) or ():
            parts.setdefault(part, []).append((html.escape(run), round(value, 3), f"{value:.2f} ms, {share}%"))
    bars = []
    for part, entries in parts.items():
        runs, values, texts = zip(*entries, strict=True)
        bars.append(Bar(orientation="h", name=part, y=runs, x=values, text=texts, hoverinfo="text+name"))
    axes = {"xaxis": {"title": "ms"}, "yaxis": {"type": "category", "autorange": "reversed"}}
    layout = {"barmode": "stack", "template": "plotly_white", "height": 250 + 40 * len(names), **axes}
    return Figure(bars, layout | {"title": "Where the time of a step went"}) if bars else None


def step_on_lanes(timeline: Timeline) -> Figure:
    """The step of median length as `draw_timeline` draws it: what was predicted above what was measured."""
    step = timeline.typical_step()
    titles, panels = [], []
    for predicted, name in ((True, "predicted"), (False, f"measured, step {step}")):
        if rows := timeline.at(step, predicted=predicted):
            lines = list(picture_lines(rows, timeline.layout))
            titles.append(panel_title(timeline, rows, lines, name, "ms"))
            panels.append((length_ms(rows), lines))
    heights = [lines[-1].bottom + lines[-1].height for _, lines in panels]
    grid = {"subplot_titles": titles, "row_heights": heights, "vertical_spacing": 0.15}
    figure = make_subplots(len(panels), 1, shared_xaxes=True, **grid)
    named: set[str] = set()
    for row, (length, lines) in enumerate(panels, start=1):
        for bar in _boxes(lines):
            figure.add_trace(bar.update(showlegend=bar.name not in named), row, 1)
            named.add(bar.name)
        figure.add_vline(length, line={"dash": "dash", "color": "#57606a"}, row=row, col=1)
        labels = [line_label(lines, index) for index in range(len(lines))]
        ticks = {"tickvals": [line.bottom + line.height / 2 for line in lines], "ticktext": labels}
        figure.update_yaxes(range=[heights[row - 1], 0], showgrid=False, fixedrange=True, **ticks, row=row, col=1)
    figure.update_xaxes(title="ms", row=len(panels))
    height = 120 + 100 * len(panels) + 30 * sum(heights)
    return figure.update_layout(template="plotly_white", barmode="overlay", height=height)


def _boxes(lines: Sequence[Line]) -> Iterator[Bar]:
    """What was done, by kind; pale what receives and sums waited for others."""
    names = {COLOURS[kind]: name for kind, name in KIND_NAMES}
    segments: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        y = line.bottom + line.height / 2
        for box in line.boxes:
            drawn = segments.setdefault(COLOURS[box.action.kind], [])
            action, index = describe_action(box.action), str(box.action.index) if box.action.kind in COMPUTE else ""
            drawn.append(_segment(box.joined, box.end, action) | {"y": y, "width": line.height, "text": index})
            if box.joined > box.start:
                waiting = _segment(box.start, box.joined, f"{action}: waiting")
                drawn.append(waiting | {"y": y, "width": 0.3 * line.height, "text": "", "opacity": 0.35})
    for colour, drawn in segments.items():
        columns = {key: [segment[key] for segment in drawn] for key in drawn[0]}
        marker = {"color": colour, "opacity": columns.pop("opacity")}
        style = {"orientation": "h", "marker": marker, "textposition": "inside", "hoverinfo": "text"}
        yield Bar(name=names[colour], legendgroup=colour, **columns, **style)


def _segment(start: float, end: float, name: str) -> dict[str, Any]:
    hover = f"{name}: {end - start:.4g} ms, from {start:.4g} to {end:.4g} ms"
    return {"base": round(start, 4), "x": round(end - start, 4), "hovertext": hover, "opacity": 1.0}
