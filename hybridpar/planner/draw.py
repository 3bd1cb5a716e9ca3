"""Draws the step time over the number of workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridpar.partition.draw import save_picture
from hybridpar.planner.scaling import KHat, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_curve(points: Sequence[Point], equation: KHat, title: str, path: Path) -> None:
    """Draw the time of a step over the number of workers.

    Args:
        points: The curve.
        equation: 1-bit SGD's, which is drawn as a line at the number of workers that it gives.
        title: Above the picture.
        path: The file; its ending says which format.

    Raises:
        UsageError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    best = [(point.workers, point.step_ms) for point in points if point.step_ms is not None]
    plain = [(point.workers, point.plain_ms) for point in points if point.plain_ms is not None]
    if best:
        count, first = best[0]
        axes.plot([at for at, _ in best], [first * count / at for at, _ in best], color="0.7", ls=":", label="linear")
        axes.plot(*zip(*best, strict=True), marker="o", label="best plan")
    if plain:
        axes.plot(*zip(*plain, strict=True), marker="x", ls="--", label="plain data parallelism")
    most = max(point.workers for point in points)
    if math.isfinite(equation.workers) and equation.workers <= most:
        label = f"1-bit SGD's equation: {equation.workers:,.1f}"
        axes.axvline(equation.workers, color="tab:green", lw=1, ls="-.", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([point.workers for point in points], [f"{point.workers:,}" for point in points])
    axes.xaxis.minorticks_off()
    _label_times(axes)
    axes.set_xlabel("workers")
    axes.set_ylabel("step, in time to the same result (ms)")
    axes.set_title(title)
    axes.legend()
    save_picture(figure, path)


def _label_times(axes: Axes) -> None:
    """Ticks of a logarithmic axis that can be read: 1, 2 and 5 of every decade, or in a short range steps alike."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    low, high = axes.get_ylim()
    if high >= 8 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    else:
        found = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        axes.set_yticks([tick for tick in found if low <= tick <= high])
    axes.yaxis.set_major_formatter("{x:,.5g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
