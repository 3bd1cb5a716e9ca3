"""Writes, validates and prints the CSV tables of all benchmarks."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rig.network import bits_per_second
from benchmarks.rig.paired import FOREIGN_LOAD, LEAST_ROUNDS
from benchmarks.rig.rows import COLUMNS, Row
from benchmarks.rig.stats import VERDICTS, Ratio, verdict
from hybridpar.errors import DataError, UsageError


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a table, all of them or none.

    The new table is written aside and renamed, under a lock on the folder, so that neither a crash nor a second writer
    leaves half a row. Folder and table are made where they are missing.

    Raises:
        DataError: The table that is there has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if path.exists():
            before = path.read_text()
            _check_header(path, next(csv.reader(io.StringIO(before)), []))
            text.write(before if before.endswith("\n") else before + "\n")
        else:
            writer.writerow(COLUMNS)
        writer.writerows([[_cell(value) for value in vars(entry).values()] for entry in rows])
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as aside:
            try:
                aside.write(text.getvalue())
                aside.flush()
                os.fsync(aside.fileno())
                os.chmod(aside.name, 0o644)
                os.replace(aside.name, path)
            except BaseException:
                os.unlink(aside.name)
                raise
    finally:
        os.close(folder)


def check_csv(path: Path) -> list[Row]:
    """Read a table and check every row.

    Returns:
        The rows, in the table's order.

    Raises:
        DataError: With line, column, value and rule of the first thing that is wrong: other columns, a value of the
            wrong kind, too few rounds, a ratio outside its interval, or a verdict that the numbers do not bear out.
    """
    with path.open(newline="") as file:
        reader = csv.reader(file)
        _check_header(path, next(reader, []))
        return [_parse(path, reader.line_num, cells) for cells in reader]


def wide_console(quiet: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for a table where the output goes to a file.

    Args:
        quiet: Print nothing; for ranks other than 0.
    """
    return Console(quiet=quiet, width=None if sys.stdout.isatty() else 150)


def print_rows(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print rows for people, one table per claim, setting and link."""
    console = console or wide_console()
    groups: dict[tuple[str, str, str, int], list[Row]] = {}
    for entry in rows:
        groups.setdefault((entry.claim, entry.setting, entry.link, entry.ranks), []).append(entry)
    for (claim, setting, link, ranks), group in groups.items():
        where = f"{ranks} {'rank' if ranks == 1 else 'ranks'}, link {link}"
        table = Table(title=f"{claim}: {setting}, {where}", title_justify="left")
        for column in ("method", "over"):
            table.add_column(column)
        for column in ("median ms", "min ms", "ratio [95 %]", "target", "rounds (dropped)", "load"):
            table.add_column(column, justify="right")
        table.add_column("verdict")
        for entry in group:
            own = entry.method == entry.baseline
            table.add_row(
                entry.method,
                "" if own else entry.baseline,
                f"{entry.median_ms:.4g}",
                f"{entry.min_ms:.4g}",
                "" if own else str(Ratio(entry.ratio, entry.ratio_low, entry.ratio_high)),
                "" if entry.target is None else f"{entry.target:g}",
                f"{entry.rounds} ({entry.dropped})",
                f"{entry.load:.2f}",
                entry.verdict,
            )
        console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _check_header(path: Path, header: Sequence[str]) -> None:
    if tuple(header) != COLUMNS:
        raise DataError(
            f"{path}: the columns are {','.join(header) or '(none)'}",
            f"They must be {','.join(COLUMNS)}",
            "Move the old table away, or measure it anew.",
        )


def _extra(cell: str) -> Mapping[str, Any]:
    value = json.loads(cell)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "str": (str, "text"),
    "int": (int, "an integer"),
    "float": (float, "a number"),
    "float | None": (lambda cell: float(cell) if cell else None, "a number or empty"),
    "Mapping[str, Any]": (_extra, "a JSON object"),
}


def _parse(path: Path, line: int, cells: Sequence[str]) -> Row:
    def wrong(column: str, value: object, rule: str) -> DataError:
        return DataError(f"{path}, line {line}, column {column}: {value!r}", f"It must be {rule}.")

    if len(cells) != len(COLUMNS):
        raise wrong("(all)", f"{len(cells)} cells", f"{len(COLUMNS)} cells")
    values: dict[str, Any] = {}
    for column, cell in zip(fields(Row), cells, strict=True):
        parse, kind = _PARSERS[str(column.type)]
        try:
            values[column.name] = parse(cell)
        except ValueError as error:
            raise wrong(column.name, cell, kind) from error
    entry = Row(**values)
    for name, holds, rule in _rules(entry):
        if not holds:
            raise wrong(name, values[name], rule)
    return entry


def _rules(entry: Row) -> list[tuple[str, bool, str]]:
    """Column, whether it holds, and the rule."""
    numbers = [name for name, value in vars(entry).items() if isinstance(value, float)]
    texts = ("claim", "setting", "method", "baseline", "device", "torch", "python")
    own = entry.method == entry.baseline
    ratio = Ratio(entry.ratio, entry.ratio_low, entry.ratio_high)
    expected = "baseline" if own else verdict(ratio, entry.target, loaded=entry.load > FOREIGN_LOAD)
    return [
        *((name, bool(vars(entry)[name].strip()), "text that is not empty") for name in texts),
        *((name, math.isfinite(vars(entry)[name]), "finite") for name in numbers),
        ("date", bool(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", entry.date)), "UTC, as 2025-01-31T12:00:00Z"),
        ("commit", bool(re.fullmatch(r"unknown|[0-9a-f]{4,40}(-dirty)?", entry.commit)), "a hash or 'unknown'"),
        ("link", _is_link(entry.link), "none, loopback, or a rate like 1gbit"),
        ("ranks", entry.ranks >= 1, "at least 1"),
        ("rounds", entry.rounds >= LEAST_ROUNDS, f"at least {LEAST_ROUNDS}"),
        ("dropped", entry.dropped >= 0, "at least 0"),
        ("load", entry.load >= 0, "at least 0"),
        ("min_ms", 0 < entry.min_ms <= entry.median_ms, "positive and at most median_ms"),
        ("ratio_low", 0 < entry.ratio_low <= entry.ratio, "positive and at most ratio"),
        ("ratio_high", entry.ratio_high >= entry.ratio, "at least ratio"),
        ("ratio", not own or entry.ratio == 1, "1 in the baseline's own row"),
        ("target", entry.target is None or (entry.target > 0 and not own), "positive, and empty for a baseline"),
        ("cores", entry.cores >= 1, "at least 1"),
        ("threads", entry.threads >= 1, "at least 1"),
        ("verdict", entry.verdict in VERDICTS, f"one of {', '.join(VERDICTS)}"),
        ("verdict", entry.verdict == expected, f"{expected!r} for these numbers"),
    ]


def _is_link(link: str) -> bool:
    try:
        return link == "none" or bits_per_second(link) != 0
    except UsageError:
        return False
