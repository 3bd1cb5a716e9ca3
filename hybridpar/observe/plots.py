"""Pictures: `loss.png` for every run, `staleness.png` for one with parameter servers, `confusion.png` of a test.

`loss.png` shows above the training loss of each step, its running mean, and the steps that were skipped; below the test
accuracy of each epoch over the learning rate. `staleness.png` shows how many gradients arrived at which age, and
`confusion.png` which part of the images of a class was taken for which class. Sizes are
chosen for a picture shown 600 pixels wide. Neither pyplot nor the caller's settings of matplotlib are touched.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridpar.errors import RunDirectoryError, shortened
from hybridpar.formats.file_reader import read_json
from hybridpar.observe.files import replace_file
from hybridpar.observe.metrics import METRICS_FILE, MetricsTable, read_metrics
from hybridpar.observe.records import RunInfo
from hybridpar.observe.summary import SUMMARY_FILE

#: Names of the files in the run directory.
LOSS_PICTURE, STALENESS_PICTURE = "loss.png", "staleness.png"
#: Name of the file beside the tables of a test.
CONFUSION_PICTURE = "confusion.png"

#: Classes whose names, and whose numbers of images, have room in a confusion matrix.
_MOST_NAMED, _MOST_NUMBERED = 40, 20

# Blue, orange and vermilion of Okabe and Ito's palette, which colour-blind readers can tell apart.
_LOSS, _ACCURACY, _SKIPPED = "#0072B2", "#E69F00", "#D55E00"
# Opaque: a long line is painted in chunks, and transparent ones would show their seams.
_EACH_STEP = "#A6CCE3"
_ACCURACY_TEXT, _RATE, _RATE_TEXT = "#805300", "#B8B8B8", "#808080"


def draw_loss(run_dir: Path, info: RunInfo | None = None, say: Callable[[str], object] = print) -> Path | None:
    """Draw `loss.png` from the metrics of a run; None, with a line that says why, where that cannot be."""
    table = read_metrics(run_dir)
    if not len(table.steps["step"]):
        say(f"{LOSS_PICTURE} was not drawn: {METRICS_FILE} holds no steps")
        return None
    title = _title(Path(run_dir), info)
    return _draw(Path(run_dir) / LOSS_PICTURE, say, lambda figure: _draw_run(figure, table, title), 6.3)


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Centred mean over a window, over what there is of it at the ends; NaN and infinities count as absent."""
    present = np.isfinite(values)
    half = window // 2
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    sums = _window_sums(np.where(present, values, 0.0), low, high)
    counts = _window_sums(present.astype(np.float64), low, high)
    means = np.full(len(values), np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def _window_sums(values: NDArray[np.float64], low: NDArray[np.int64], high: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sums of values[low:high], put together from blocks of 1, 2, 4, ... values.

    Differences of a cumulative sum would be shorter, but one loss of 1e20 would drown all that come after it.
    """
    width, position, block, size = high - low, low.copy(), values, 1
    sums = np.zeros(len(values))
    while size <= width.max(initial=0):
        take = (width & size) > 0
        sums[take] += block[position[take]]
        position[take] += size
        block = block[:-size] + block[size:]
        size *= 2
    return sums


def _title(run_dir: Path, info: RunInfo | None) -> str:
    try:
        known = read_json(run_dir / SUMMARY_FILE, "the summary", RunDirectoryError) if info is None else asdict(info)
        model, data, workers = known["model"], known["data"], known["workers"]
    except (RunDirectoryError, KeyError, TypeError):  # no summary, or not one of ours
        return run_dir.resolve().name
    return shortened(f"{model} on {data}, {workers} worker{'' if workers == 1 else 's'}", 100)


def _draw(path: Path, say: Callable[[str], object], draw: Callable[[Any], object], height: float) -> Path | None:
    """Write what `draw` puts on a figure, and return where; None where there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        say(f"{path.name} needs matplotlib: pip install 'hybridpar[plots]'")
        return None
    replace_file(path, [_png(draw, height)])
    return path


def _png(draw: Callable[[Any], object], height: float) -> bytes:
    """What `draw` draws into a figure, as a PNG file."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a caller's own style could need LaTeX, or hide the lines
        matplotlib.rcParams.update({"font.size": 13, "agg.path.chunksize": 10_000})
        figure = Figure(figsize=(9, height), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_run(figure: Any, table: MetricsTable, title: str) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    upper.set_title(title, parse_math=False, fontsize=14, loc="left", pad=12)
    _draw_losses(upper, table.steps)
    _draw_epochs(lower, table)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    upper.margins(x=0.01)
    figure.align_ylabels()


def _draw_losses(axes: Any, steps: Any) -> None:
    step, loss = steps["step"], steps["loss"]
    smooth = running_mean(loss, max(5, len(step) // 50))
    finite = loss[np.isfinite(loss)]
    marker = "." if len(step) < 30 else None
    axes.plot(step, loss, color=_EACH_STEP, linewidth=0.8, marker=marker, label="each step")
    axes.plot(step, smooth, color=_LOSS, linewidth=2.5, label="running mean")
    if len(finite):
        # A few wild steps, as in warm-up, must not flatten the rest of the curve.
        usual = 99 if len(step) >= 100 else 100
        top = float(np.percentile(finite, usual))
        if finite.min() > 0 and top > 30 * np.nanmin(smooth):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        elif top > 0:
            axes.set_ylim(min(0.0, float(finite.min())), 1.08 * top)
    skipped = step[steps["skipped"] > 0]
    if len(skipped):
        # At the foot of the panel: a skipped step often has no loss to stand on.
        axes.plot(
            skipped,
            np.full(len(skipped), 0.03),
            transform=axes.get_xaxis_transform(),
            linestyle="none",
            marker="x",
            markersize=8,
            markeredgewidth=2,
            color=_SKIPPED,
            clip_on=False,
            label=f"skipped ({len(skipped):,})",
        )
    axes.set_ylabel("training loss")
    axes.legend(loc="upper right", frameon=False, ncols=3)


def _draw_epochs(axes: Any, table: MetricsTable) -> None:
    rate = axes.twinx()
    rate.fill_between(table.steps["step"], table.steps["lr"], color=_RATE, alpha=0.35, linewidth=0)
    rate.set_ylim(bottom=0)
    rate.set_ylabel("learning rate", color=_RATE_TEXT)
    rate.tick_params(axis="y", colors=_RATE_TEXT)
    rate.spines[["top", "right"]].set_visible(False)
    axes.set_zorder(rate.get_zorder() + 1)
    axes.set_facecolor("none")
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("test accuracy")
    tested = [(epoch.step, epoch.test_accuracy) for epoch in table.epochs if epoch.test_accuracy is not None]
    if not tested:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not evaluated", transform=axes.transAxes, ha="center", va="center", color=_RATE_TEXT)
        return
    step, accuracy = np.array(tested, dtype=float).T
    axes.plot(step, 100 * accuracy, color=_ACCURACY, linewidth=2.5, marker="o", markersize=6 if len(step) <= 40 else 0)
    # Accuracy rises, so the lower right corner is free.
    best = f"best {100 * accuracy.max():.2f}%, last {100 * accuracy[-1]:.2f}%"
    axes.text(0.99, 0.06, best, transform=axes.transAxes, ha="right", color=_ACCURACY_TEXT)
    axes.yaxis.set_major_formatter("{x:g}%")


def draw_staleness(
    run_dir: Path, counts: Mapping[int, int], expected: float | None = None, say: Callable[[str], object] = print
) -> Path | None:
    """Draw `staleness.png`: how many gradients arrived at which age; None, with a line, where that cannot be.

    The mean that equally fast workers would have is drawn as a line, where it is `expected`.
    """
    if not sum(counts.values()):
        say(f"{STALENESS_PICTURE} was not drawn: no gradient arrived")
        return None
    return _draw(Path(run_dir) / STALENESS_PICTURE, say, lambda figure: _draw_ages(figure, counts, expected), 4.5)


def _draw_ages(figure: Any, counts: Mapping[int, int], expected: float | None) -> None:
    from matplotlib.ticker import MaxNLocator

    axes, ages, total = figure.subplots(), sorted(counts), sum(counts.values())
    mean = sum(age * count for age, count in counts.items()) / total
    axes.bar(ages, [100 * counts[age] / total for age in ages], width=0.9, color=_LOSS)
    axes.set_title(f"staleness of {total:,} gradients, mean {mean:.2f}, largest {ages[-1]}", fontsize=14, loc="left")
    axes.set_xlabel("updates between the weights of a gradient and its arrival")
    axes.set_ylabel("% of gradients")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if expected is not None:
        axes.axvline(expected, color=_SKIPPED, linewidth=2, linestyle="--", label=f"equal workers: {expected:.2f}")
        axes.legend(frameon=False, loc="upper right")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw_confusion(
    folder: Path,
    counts: NDArray[np.int64],
    classes: Sequence[str],
    title: str,
    say: Callable[[str], object] = print,
) -> Path | None:
    """Draw `confusion.png`, the confusion matrix of a test."""
    return _draw(folder / CONFUSION_PICTURE, say, lambda figure: _draw_matrix(figure, counts, classes, title), 8.2)


def _draw_matrix(figure: Any, counts: NDArray[np.int64], classes: Sequence[str], title: str) -> None:
    from matplotlib.colors import PowerNorm

    axes = figure.subplots()
    parts = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    # The square root of the part: a mistake of one in a hundred must be seen beside the diagonal.
    picture = axes.imshow(parts, cmap="Blues", norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest")
    axes.set_title(shortened(title, 90), parse_math=False, fontsize=14, loc="left", pad=12)
    axes.set_xlabel("taken for")
    axes.set_ylabel("class")
    if len(classes) <= _MOST_NAMED:
        names = [shortened(name, 24) for name in classes]
        size = 12 if len(classes) <= _MOST_NUMBERED else 8
        slant = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if max(map(len, names)) > 3 else {}
        axes.set_xticks(range(len(names)), names, fontsize=size, parse_math=False, **slant)
        axes.set_yticks(range(len(names)), names, fontsize=size, parse_math=False)
    if len(classes) <= _MOST_NUMBERED:
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if parts[row, column] > 0.4 else "black"
            axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", fontsize=11, color=colour)
    bar = figure.colorbar(picture, ax=axes, shrink=0.8, label="part of the class")
    bar.set_ticks([0, 0.01, 0.1, 0.25, 0.5, 1], labels=["0", "1 %", "10 %", "25 %", "50 %", "100 %"])
