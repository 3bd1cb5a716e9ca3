"""Reads and writes CSV tables whose columns are a benchmark's own: the fields of a dataclass, or the keys of rows."""

from __future__ import annotations

import csv
import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

Record = TypeVar("Record")

_PARSERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: text == "True",
}


def read_dicts(path: Path) -> list[dict[str, str]]:
    """All rows of a table, none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def read_records(kind: type[Record], path: Path) -> list[Record]:
    """All rows of a table as instances of a dataclass of texts, numbers and truth values; its columns may be more."""
    parsers = {column.name: _PARSERS[str(column.type)] for column in fields(kind)}  # type: ignore[arg-type]
    return [kind(**{name: parse(row[name]) for name, parse in parsers.items()}) for row in read_dicts(path)]


def append_dicts(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Add rows; several processes may. A table that is there keeps its columns; a new one has the first row's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="", encoding="utf-8") as lines:
        fcntl.flock(lines, fcntl.LOCK_EX)
        lines.seek(0)
        names = next(csv.reader(lines), None)
        lines.seek(0, os.SEEK_END)
        writer = csv.DictWriter(lines, names or list(rows[0]), extrasaction="ignore", lineterminator="\n")
        if names is None:
            writer.writeheader()
        writer.writerows(rows)


def write_dicts(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write a table anew; a row may lack columns that others have."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as lines:
        names = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(lines, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
