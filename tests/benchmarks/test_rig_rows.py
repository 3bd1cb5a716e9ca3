"""Tests the CSV tables of the benchmark rig: rows are read as they were written, and wrong rows are refused.

Tables are read long after the run that made them.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rig.paired import Paired
from benchmarks.rig.rows import COLUMNS, Row, append_rows, read_rows, row
from hybridpar.errors import DataError

ROOT = Path(__file__).parents[2]


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
    append_rows(path, rows[:1])
    append_rows(path, rows[1:])
    assert read_rows(path) == rows
    assert [entry.verdict for entry in rows] == ["baseline", "met", "slower"]
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert [file.name for file in path.parent.iterdir()] == ["table.csv"]


def test_a_busy_machine_proves_nothing(tmp_path: Path) -> None:
    rows = rows_of(result_of(load=0.4, loaded=True))
    assert [entry.verdict for entry in rows] == ["baseline", "loaded", "loaded"]
    append_rows(tmp_path / "table.csv", rows)
    read_rows(tmp_path / "table.csv")


def test_a_table_with_other_columns_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("method,ms\nours,1\n")
    with pytest.raises(DataError, match="method,ms"):
        append_rows(path, rows_of(result_of()))
    with pytest.raises(DataError, match="columns"):
        read_rows(path)
    assert path.read_text() == "method,ms\nours,1\n"


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("date", "yesterday", "date"),
        ("commit", "v1.0", "commit"),
        ("claim", " ", "claim"),
        ("link", "fast", "rate like 1gbit"),
        ("ranks", "two", "a valid integer"),
        ("rounds", "19", "greater than or equal to 20"),
        ("median_ms", "nan", "a finite number"),
        ("min_ms", "1e6", "min_ms is at most median_ms"),
        ("ratio_low", "0.9", "between ratio_low and ratio_high"),
        ("target", "-1", "greater than 0"),
        ("verdict", "great", "verdict"),
        ("verdict", "faster", "'met' for these numbers"),
        ("load", "0.5", "'loaded' for these numbers"),
        ("extra", "[1]", "a valid dictionary"),
    ],
)
def test_every_wrong_value_is_named_with_its_line_and_rule(tmp_path: Path, column: str, value: str, rule: str) -> None:
    path = tmp_path / "table.csv"
    append_rows(path, rows_of(result_of()))
    lines = list(csv.reader(io.StringIO(path.read_text())))
    lines[2][COLUMNS.index(column)] = value
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    with pytest.raises(DataError, match="line 3") as caught:
        read_rows(path)
    assert rule in str(caught.value)


def test_committed_tables_hold_to_the_rules() -> None:
    tables = [
        path
        for path in ROOT.glob("benchmarks/*/results/*.csv")
        if path.open().readline().startswith("date,commit,claim")
    ]
    assert len(tables) >= 8
    for path in tables:
        assert {entry.claim for entry in read_rows(path)} == {path.parts[-3]}
