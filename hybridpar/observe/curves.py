"""Curves of a run with few points, whatever its number of steps: for each stretch of steps the range and a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridpar.observe.metrics import MetricsTable
from hybridpar.observe.plots import running_mean

#: Points of a curve, at most.
MOST_POINTS = 2000

#: Curves of a page: key, title, unit, and columns with what a legend calls them. A noisy one has a running mean in
#: front of its range; `epochs` are drawn at the ends of epochs.
_CHARTS: tuple[dict[str, Any], ...] = (
    {"key": "loss", "title": "Loss", "noisy": "loss", "epochs": {"test_loss": "test", "ema_test_loss": "test, EMA"}},
    {
        "key": "accuracy",
        "title": "Test accuracy",
        "unit": "%",
        "epochs": {"test_accuracy": "", "ema_test_accuracy": "EMA"},
    },
    {"key": "lr", "title": "Learning rate", "plain": "lr"},
    {"key": "step", "title": "Time of a step", "unit": "ms", "noisy": "step_ms"},
    {"key": "norm", "title": "Gradient norm", "noisy": "grad_norm"},
    {"key": "residual", "title": "Residual norm: not sent yet", "noisy": "residual_norm"},
    {"key": "staleness", "title": "Staleness", "unit": "updates", "noisy": "staleness"},
)


def charts_of(tables: Sequence[MetricsTable]) -> list[dict[str, Any]]:
    """The charts of some runs, as plain data for `page.js`: the curves of all runs in each."""
    points = max(200, min(MOST_POINTS, 2 * MOST_POINTS // max(1, len(tables))))
    charts = []
    for chart in _CHARTS:
        lines = [line for run, table in enumerate(tables) for line in _lines(chart, run, table, points)]
        if lines:
            charts.append({"key": chart["key"], "title": chart["title"], "unit": chart.get("unit", ""), "lines": lines})
    for chart in charts:
        if chart["key"] == "loss":
            chart["marks"] = [
                _thinned(table.steps["step"][table.steps["skipped"] > 0], 200).tolist() for table in tables
            ]
    return charts


def _lines(chart: dict[str, Any], run: int, table: MetricsTable, points: int) -> list[dict[str, Any]]:
    steps = table.steps["step"]
    seconds = np.nancumsum(table.steps["step_ms"]) / 1000
    scale = 100.0 if chart.get("unit") == "%" else 1.0
    found = []
    if (column := chart.get("noisy") or chart.get("plain")) is not None:
        values = table.steps[column]
        known = np.isfinite(values)
        if known.any():
            line = bucketed(steps[known], seconds[known], values[known], points, noisy="noisy" in chart)
            found.append({"run": run, "name": "train" if column == "loss" else "", **line})
    for column, name in chart.get("epochs", {}).items():
        tested = [(epoch.step, value) for epoch in table.epochs if (value := getattr(epoch, column)) is not None]
        if tested:
            at, values = _thinned(np.array(tested, dtype=np.float64), points).T
            times = np.interp(at, steps, seconds) if len(steps) else np.zeros(len(at))
            line = {"x": at.astype(int).tolist(), "t": _short(times), "y": _short(scale * values)}
            found.append({"run": run, "name": name, "dots": True, **line})
    return found


def bucketed(
    steps: NDArray[np.float64], seconds: NDArray[np.float64], values: NDArray[np.float64], points: int, *, noisy: bool
) -> dict[str, Any]:
    """A curve in at most so many points, each of which stands for as many steps as the others, or nearly so."""
    edges = np.linspace(0, len(values), min(points, len(values)) + 1).astype(int)
    starts, middles = edges[:-1], (edges[:-1] + edges[1:] - 1) // 2
    means = running_mean(values, max(5, len(values) // 50))[middles] if noisy else _means(values, edges)
    line: dict[str, Any] = {"x": steps[middles].astype(int).tolist(), "t": _short(seconds[middles]), "y": _short(means)}
    if len(starts) < len(values):
        low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        line |= {"lo": _short(low), "hi": _short(high)}
    elif noisy:
        line["lo"] = _short(values)
    return line


def _means(values: NDArray[np.float64], edges: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(np.add.reduceat(values, edges[:-1]) / np.diff(edges))


def _thinned(values: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    return values if len(values) <= most else values[np.linspace(0, len(values) - 1, most).astype(int)]


def _short(values: NDArray[np.float64]) -> list[float | None]:
    """Five digits, as many as a screen shows."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]
