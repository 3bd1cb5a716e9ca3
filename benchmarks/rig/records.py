"""Reads and writes CSV tables, whose columns are the fields of a dataclass or the keys of rows."""

from __future__ import annotations

import csv
import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

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
        _write(lines, rows, names or list(rows[0]), header=names is None)


def write_dicts(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write a table anew; a row may lack columns that others have."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as lines:
        _write(lines, rows, list(dict.fromkeys(name for row in rows for name in row)), header=True)


def _write(lines: Any, rows: Sequence[Mapping[str, object]], names: Sequence[str], header: bool) -> None:
    writer = csv.DictWriter(lines, names, extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)


@contextmanager
def claimed(path: Path, key: Sequence[object]) -> Iterator[bool]:
    """Whether no other process makes the row of this key for this table at the moment."""
    lock = Path(f"{path}.{'-'.join(map(str, key)).replace(':', '_').replace('/', '_')}.lock")
    with lock.open("w") as file:  # the lock goes with its process
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            lock.unlink(missing_ok=True)


def wide_console(quiet: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for a table where the output goes to a file."""
    return Console(quiet=quiet, width=None if sys.stdout.isatty() else 150)


def print_markdown(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows as a table of Markdown."""
    for cells in (titles, ["---"] * len(titles), *rows):
        print("|", " | ".join(map(str, cells)), "|")
