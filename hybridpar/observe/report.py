"""The report at the end of a run: what it came to, and what was predicted of that.

Everything shown comes from the summary, so the screen and `summary.json` cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridpar.errors import counted
from hybridpar.observe.records import LISTED_FIGURES, STEP_ALONE, STEP_PARTS
from hybridpar.observe.summary import step_without_data_ms

#: A part of a step that was predicted with less milliseconds of error is not shown as a percentage of next to nothing.
_SMALL_MS = 1.0


def print_report(summary: Mapping[str, Any], files: Sequence[Path] = (), console: Console | None = None) -> None:
    """Print the final table of a run."""
    console = Console() if console is None else console
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for title, text in report_rows(summary):
        grid.add_row(title, Text(text))
    console.print()
    console.print(grid)
    for path in files:  # in one piece each, to be copied
        console.print(Text.assemble(("written  ", "dim"), str(path)), soft_wrap=True)


def report_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and text of each row."""
    yield "run", f"{summary['model']} on {summary['data']}"
    yield "", f"{counted(summary['workers'], 'worker')} on {summary['device']}, batch {summary['batch_size']:,}"
    predicted = {row.name: summary.get(f"predicted_{row.name}") for row in LISTED_FIGURES}
    alone = step_without_data_ms(summary) if predicted[STEP_ALONE.name] is not None else None
    for row in LISTED_FIGURES:
        value = alone if row is STEP_ALONE else summary[row.name]
        expected = predicted[row.name]
        if value is None or (value == row.usual and not expected):
            continue
        text = row.text(value)
        if row.name in STEP_PARTS and summary["step_ms_median"]:
            text = f"{text:<10}{value / summary['step_ms_median']:>4.0%}"
        if expected is not None:
            text = f"{text:<14}  predicted {row.text(expected)}"
            is_small = row.unit == "part" or (row.name in STEP_PARTS and abs(value - expected) < _SMALL_MS)
            text += f", {100 * (value / expected - 1):+.0f}%" if expected and not is_small else ""
        yield row.title, text
