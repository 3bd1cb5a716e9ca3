"""The report page: one HTML file that loads nothing else, with tables as HTML and figures drawn by plotly.js.

Figures are the curves of several runs, a step on its lanes, and the confusion matrix of a test.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from plotly.graph_objects import Bar, Figure, Heatmap, Scatter
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from hybridpar.formats.output_files import replace_file
from hybridpar.observe.metrics import MetricsTable
from hybridpar.observe.records import EPOCH_FIGURES, STEP_FIGURES
from hybridpar.observe.timeline import Timeline, describe_action, length_ms
from hybridpar.schedule.actions import COMPUTE, Kind

#: The logo is a link, which there is none of on a page of ours. Pictures are saved as SVG.
_CONFIG = {"responsive": True, "displaylogo": False, "toImageButtonOptions": {"format": "svg"}}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="hybridpar">
<title>{title} - hybridpar</title>
<style>
body {{ margin: 0 auto; padding: 1rem; max-width: 1200px; font: 15px/1.5 system-ui, sans-serif; }}
h1, td {{ overflow-wrap: anywhere; }} pre {{ overflow-x: auto; }}
caption {{ text-align: left; font-weight: 600; }}
th, td {{ padding: 0.2rem 1rem 0.2rem 0; border-bottom: 1px solid #d5d9df; text-align: left; vertical-align: top; }}
</style>
<script>{script}</script>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""

#: Points of a curve, at most.
_POINTS = 500

#: Okabe and Ito's palette, darkened: colour-blind readers can tell these apart.
_COLOURS = ("#0072b2", "#d55e00", "#007f5f", "#b0518c", "#b98300", "#3a9bd1", "#4d4d4d", "#7a5195")

#: What is drawn of a step, and in which colour.
_KINDS = {
    Kind.FORWARD: ("forward", _COLOURS[5]),
    Kind.BACKWARD: ("backward", _COLOURS[1]),
    Kind.SYNC: ("gradient sum", _COLOURS[2]),
    Kind.STEP: ("optimizer", _COLOURS[3]),
}


def element(tag: str, text: str) -> str:
    """A heading, a paragraph or lines as they stand in a terminal."""
    return f"<{tag}>{html.escape(text)}</{tag}>"


def table(rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table; the first column has the names of the rows."""
    lines = ("".join(element("td" if column else "th", cell) for column, cell in enumerate(row)) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{element('caption', caption)}{body}</table>"


def write_page(path: Path, title: str, parts: Iterable[str | Figure]) -> None:
    """Write a page of HTML and figures as a whole or not at all."""
    # The JSON of a figure has no "<", so nothing in it ends the script.
    shown = [
        part if isinstance(part, str) else part.to_html(_CONFIG, include_plotlyjs=False, full_html=False)
        for part in parts
    ]
    page = _PAGE.format(title=html.escape(title), script=get_plotlyjs(), body="\n".join(shown))
    replace_file(path, [page.encode(errors="replace")])


def is_page(path: Path) -> bool:
    """Whether a file is a page that `write_page` wrote."""
    with open(path, "rb") as file:
        return b'<meta name="generator" content="hybridpar">' in file.read(500)


def curves(names: Sequence[str], tables: Sequence[MetricsTable]) -> Figure | None:
    """The curves of all runs, with one legend entry per run, on axes that are zoomed together; None without any."""
    tested = {row.chart for row in EPOCH_FIGURES}
    titles = dict.fromkeys(row.chart for row in (*STEP_FIGURES, *EPOCH_FIGURES) if row.chart)
    charts = {
        title: [(run, trace) for run, table in enumerate(tables) for trace in _traces(title, table)]
        for title in sorted(titles, key=lambda title: title not in tested)
    }
    charts = {title: traces for title, traces in charts.items() if traces}
    if not charts:
        return None
    spacing = 0.3 / len(charts)
    figure = make_subplots(len(charts), 1, shared_xaxes=True, subplot_titles=[*charts], vertical_spacing=spacing)
    clocks = [
        (np.r_[0, table.steps["step"]], np.r_[0, np.nancumsum(table.steps["step_ms"]) / 1000]) for table in tables
    ]
    seconds: list[list[float | None]] = []
    named: set[int] = set()
    for row, traces in enumerate(charts.values(), start=1):
        for run, trace in traces:
            seconds.append(_short(np.interp(trace.x, *clocks[run])))
            trace.name = ", ".join(filter(None, (html.escape(names[run]), trace.name)))
            trace.update(legendgroup=str(run), showlegend=run not in named)
            trace.line.color = _COLOURS[run % len(_COLOURS)]
            named.add(run)
            figure.add_trace(trace, row, 1)
    buttons = [
        {"label": label, "method": "update", "args": args}
        for label, args in (
            ("by step", [{"x": [trace.x for trace in figure.data]}]),
            ("by training time in seconds", [{"x": seconds}]),
            *((f"{scale} loss", [{}, {"yaxis.type": scale}]) for scale in ("linear", "log")),
        )
    ]
    above = {"x": 0.0, "xanchor": "left", "y": 1.0, "yanchor": "bottom", "pad": {"b": 30}}
    menu = {"type": "buttons", "direction": "right", "showactive": False, "buttons": buttons, **above}
    layout = {"template": "plotly_white", "height": 120 + 250 * len(charts), "updatemenus": [menu]}
    return figure.update_layout(**layout, hovermode="x unified", hoverlabel={"namelength": -1})


def _traces(chart: str, table: MetricsTable) -> Iterator[Scatter]:
    """The curves of a run in a chart, the main one first: of many steps the means of stretches, and their extremes."""
    for row in STEP_FIGURES:
        known = np.flatnonzero(np.isfinite(table.steps[row.name]))
        if row.chart == chart and len(known):
            values, count = table.steps[row.name][known], min(_POINTS, len(known))
            starts = np.linspace(0, len(known), count, endpoint=False).astype(int)
            steps = table.steps["step"][known][starts]
            yield _curve(steps, np.add.reduceat(values, starts) / np.diff(starts, append=len(known)))
            if count < len(known):
                faint = {"opacity": 0.35, "line": {"width": 1}}
                yield _curve(steps, np.minimum.reduceat(values, starts), name="least", **faint)
                yield _curve(steps, np.maximum.reduceat(values, starts), name="largest", **faint)
    for row in EPOCH_FIGURES:
        tests = [(epoch.step, value) for epoch in table.epochs if (value := getattr(epoch, row.name)) is not None]
        if row.chart == chart and tests:
            at, results = np.array(tests, dtype=np.float64).T
            yield _curve(at, (100 if row.unit == "accuracy" else 1) * results, name=row.curve)


def _curve(x: NDArray[np.float64], y: NDArray[np.float64], **style: Any) -> Scatter:
    return Scatter(x=x.tolist(), y=_short(y), mode="lines" if len(x) > 40 else "lines+markers", **style)


def _short(values: NDArray[np.float64]) -> list[float | None]:
    """Five digits, as many as a screen shows."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]


def step_on_lanes(timeline: Timeline) -> Figure:
    """The step of median length, what was predicted above what was measured: a row per lane, and a box per action.

    Numbers are micro-batches.
    """
    panels = [(title, length_ms(rows), timeline.lanes(rows)) for title, rows in timeline.panels()]
    heights = [len(lanes) for *_, lanes in panels]
    grid = {"subplot_titles": [title for title, *_ in panels], "row_heights": heights, "vertical_spacing": 0.15}
    figure = make_subplots(len(panels), 1, shared_xaxes=True, **grid)
    for row, (_, length, lanes) in enumerate(panels, start=1):
        spans = [span for lane in lanes.values() for span in lane]
        boxes = {
            "y": [name for name, lane in lanes.items() for _ in lane],
            "base": [round(span.start_ms, 4) for span in spans],
            "x": [round(span.duration_ms, 4) for span in spans],
            "text": [str(span.action.index) if span.action.kind in COMPUTE else "" for span in spans],
            "hovertext": [
                f"{describe_action(span.action)}: {span.duration_ms:.4g} ms, from {span.start_ms:.4g}" for span in spans
            ],
            "marker": {"color": [_KINDS.get(span.action.kind, ("transfer", "#999999"))[1] for span in spans]},
        }
        figure.add_trace(Bar(**boxes, orientation="h", textposition="inside", hoverinfo="text"), row, 1)
        figure.add_vline(length, line={"dash": "dash", "color": "#57606a"}, row=row, col=1)
    figure.update_yaxes(autorange="reversed", fixedrange=True, showgrid=False)
    whole = timeline.facts.get("whole")
    figure.update_xaxes(title=f"ms; the step takes {whole}" if whole else "ms", row=len(panels))
    colours = ", ".join(f'<span style="color:{colour}">{name}</span>' for name, colour in _KINDS.values())
    height = 150 + 100 * len(panels) + 25 * sum(heights)
    layout = {"template": "plotly_white", "barmode": "overlay", "showlegend": False, "height": height}
    return figure.update_layout(title={"text": colours, "font": {"size": 14}}, **layout)


def confusion_matrix(counts: NDArray[np.int64], classes: Sequence[str]) -> Figure:
    """Which part of the images of a class (row) were taken for which class (column)."""
    # The square root of the part: a mistake of one in a hundred must be seen beside the diagonal.
    shades = np.sqrt(counts / np.maximum(1, counts.sum(axis=1, keepdims=True)))
    names = [html.escape(name) for name in classes]
    hover = "%{y} taken for %{x}: %{text}<extra></extra>"
    matrix = Heatmap(z=shades, x=names, y=names, text=counts, hovertemplate=hover, colorscale="Blues", showscale=False)
    axes = {"xaxis": {"title": "taken for", "type": "category"}, "yaxis": {"type": "category", "autorange": "reversed"}}
    return Figure([matrix], {"template": "plotly_white", "height": 800, **axes})
