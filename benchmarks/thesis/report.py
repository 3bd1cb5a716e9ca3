"""Prints the results as speed-ups over each baseline, with accuracies, from one row per seed and comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.rig.rows import Row
from benchmarks.rig.table import wide_console
from benchmarks.thesis import cells


def newest(rows: Sequence[Row]) -> list[Row]:
    """Of the rows of the same seed and comparison, the last."""
    return list(
        {
            (row.setting, row.device, row.ranks, row.method, row.baseline, row.extra["seed"]): row for row in rows
        }.values()
    )


def print_report(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print one table per setting and device: every method, and how many times as fast hybridpar is.

    Speed-ups are medians over the seeds of the seeds' medians; the interval spans all of theirs.
    """
    console = console or wide_console()
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for entry in newest(rows):
        groups.setdefault((entry.setting, entry.device, entry.ranks), []).append(entry)
    for (setting, device, ranks), group in groups.items():
        console.print(_table(f"{setting}; {device}, {ranks} worker{'s' if ranks > 1 else ''}", group))
        for method, reason in sorted({item for entry in group for item in entry.extra["skipped"].items()}):
            console.print(f"  {method}: not measured, {reason}")
        console.print()


def _table(title: str, group: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for column in ("s per epoch", "accuracy %", "hybridpar is faster by [95 %]", "published", "seeds"):
        table.add_column(column, justify="right")
    for method in cells.METHODS:
        own = [entry for entry in group if (entry.method, entry.baseline) == (method, cells.ONE)]
        if not own:
            continue
        over = [entry for entry in group if (entry.method, entry.baseline) == (cells.OURS, method)]
        published = next((entry.extra["published_speedup"] for entry in over), None)
        table.add_row(
            method if method != cells.OURS else f"{method}: {layout_words(own[-1])}",
            f"{statistics.median(entry.extra['epoch_s'] for entry in own):.3g}",
            spread([100 * entry.extra["accuracy"] for entry in own]),
            faster_by(over) if method != cells.OURS else "",
            f"{published:g}" if published is not None else "",
            str(len(own)),
        )
    return table


def layout_words(entry: Row) -> str:
    """The layout that a row of hybridpar was measured with."""
    layout = entry.extra["layout"]
    graphs = ", CUDA graphs" if layout["cuda_graph"] else ""
    return f"{layout['stages']} x {layout['replicas']}, {layout['micro_batches']} micro-batches{graphs}"


def spread(values: Sequence[float]) -> str:
    """Mean, and standard deviation where there are several."""
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def faster_by(over: Sequence[Row]) -> str:
    """How many times as fast ours is, from rows of ours over one baseline: one over the ratio of times."""
    if not over:
        return ""
    middle = statistics.median(1 / entry.ratio for entry in over)
    low, high = min(1 / entry.ratio_high for entry in over), max(1 / entry.ratio_low for entry in over)
    busy = " (loaded)" if any(entry.verdict == "loaded" for entry in over) else ""
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]{busy}"
