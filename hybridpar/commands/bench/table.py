"""Prints what was measured as a table, and writes it as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(console: Console, title: str, columns: Mapping[str, bool], rows: Sequence[Sequence[str]]) -> None:
    """Print a table.

    Args:
        console: Where it is printed.
        title: What stands above it.
        columns: Titles of the columns, and whether they hold text; other columns hold numbers.
        rows: Their cells.
    """
    table = Table(title=title, title_justify="left", padding=(0, 0, 0, 1))
    for column, text in columns.items():
        table.add_column(column, justify="left" if text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that have the same keys as CSV, with the keys as header.

    Args:
        path: The file.
        rows: Values by column, at least one row; None makes an empty cell.

    Raises:
        ValueError: There are no rows, so nothing says what the columns are.
    """
    if not rows:
        raise ValueError(f"no rows for {path}: the columns are the keys of the first row")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        for row in rows:
            writer.writerow(
                ["" if one is None else f"{one:.6g}" if isinstance(one, float) else one for one in row.values()]
            )
