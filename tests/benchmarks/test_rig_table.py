"""Tests the CSV tables of the benchmark rig: rows are read as they were written, and wrong rows are refused.

Tables are read long after the run that made them.
"""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rig.paired import Paired
from benchmarks.rig.rows import COLUMNS, Row, row
from benchmarks.rig.table import append_rows, check_csv
from hybridpar.errors import DataError


def result_of(*, load: float = 0.02, loaded: bool = False) -> Paired:
    generator = np.random.default_rng(7)
    mood = generator.uniform(1, 1.2, 20)
    times = {"fp32": 450 * mood, "ours": 130 * mood * generator.uniform(0.98, 1.02, 20), "worse": 500 * mood}
    return Paired({name: tuple(map(float, values)) for name, values in times.items()}, 3, load, loaded)


def rows_of(result: Paired) -> list[Row]:
    def make(method: str, target: float | None = None, extra: dict[str, object] | None = None) -> Row:
        return row(
            result,
            method,
            "fp32",
            claim="sync",
            setting='ResNet-18, "small", 32x32',
            link="1gbit",
            ranks=2,
            target=target,
            extra=extra,
        )

    return [make("fp32"), make("ours", 1 / 3, {"bytes": 1460000, "loss": [0.1, 0.2]}), make("worse")]


def test_rows_come_back_from_the_table_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "results" / "table.csv"
    rows = rows_of(result_of())
    rows = [replace(entry, target=entry.target and round(entry.target, 3)) for entry in rows]
    append_rows(path, rows[:1])
    append_rows(path, rows[1:])
    assert check_csv(path) == rows
    assert [entry.verdict for entry in rows] == ["baseline", "met", "slower"]
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert [file.name for file in path.parent.iterdir()] == ["table.csv"]


def test_a_busy_machine_proves_nothing(tmp_path: Path) -> None:
    rows = rows_of(result_of(load=0.4, loaded=True))
    assert [entry.verdict for entry in rows] == ["baseline", "loaded", "loaded"]
    append_rows(tmp_path / "table.csv", rows)
    check_csv(tmp_path / "table.csv")


def test_a_table_with_other_columns_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("method,ms\nours,1\n")
    with pytest.raises(DataError, match="method,ms"):
        append_rows(path, rows_of(result_of()))
    with pytest.raises(DataError, match="columns"):
        check_csv(path)
    assert path.read_text() == "method,ms\nours,1\n"


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("date", "yesterday", "UTC"),
        ("commit", "v1.0", "hash"),
        ("claim", " ", "not empty"),
        ("link", "fast", "rate like 1gbit"),
        ("ranks", "two", "an integer"),
        ("rounds", "19", "at least 20"),
        ("median_ms", "nan", "finite"),
        ("min_ms", "1e6", "at most median_ms"),
        ("ratio_low", "0.9", "at most ratio"),
        ("target", "-1", "positive"),
        ("verdict", "great", "one of"),
        ("verdict", "faster", "'met' for these numbers"),
        ("load", "0.5", None),
        ("extra", "[1]", "a JSON object"),
    ],
)
def test_every_wrong_value_is_named_with_its_line_and_rule(
    tmp_path: Path, column: str, value: str, rule: str | None
) -> None:
    path = tmp_path / "table.csv"
    append_rows(path, rows_of(result_of()))
    lines = list(csv.reader(io.StringIO(path.read_text())))
    lines[2][COLUMNS.index(column)] = value
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    # A load that is too high makes no wrong load, but a wrong verdict.
    named = "verdict" if rule is None else column
    with pytest.raises(DataError, match=f"line 3, column {named}.*") as caught:
        check_csv(path)
    assert (rule or "'loaded'") in str(caught.value)
