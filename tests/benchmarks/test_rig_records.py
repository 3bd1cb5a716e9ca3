"""Rows come back as they were written, a table that is there keeps its columns, and several may write."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.rig.records import append_dicts, read_dicts, read_records, write_dicts


@dataclass(frozen=True)
class Run:
    method: str
    seed: int
    loss: float
    loaded: bool = False


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    file, rows = tmp_path / "new" / "rows.csv", [Run("a,b", 1, 0.25), Run("c", 2, float("inf"), True)]
    for row in rows:
        append_dicts(file, [asdict(row) | {"commit": "unknown"}])
    assert read_records(Run, file) == rows
    assert read_records(Run, tmp_path / "absent.csv") == []


def test_rows_are_added_to_an_older_table_in_its_columns(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("seed,older\n1,2\n")
    append_dicts(file, [{"method": "new", "seed": 2}])
    assert read_dicts(file) == [{"seed": "1", "older": "2"}, {"seed": "2", "older": ""}]


def test_a_table_that_is_written_anew_has_the_columns_of_all_rows(tmp_path: Path) -> None:
    for _ in range(2):
        write_dicts(tmp_path / "t.csv", [{"a": 1, "b": "x,y"}, {"a": 2, "c": None}])
    assert (tmp_path / "t.csv").read_text() == 'a,b,c\n1,"x,y",\n2,,\n'
