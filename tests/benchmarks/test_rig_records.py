"""Rows come back as they were written, a table that is there keeps its columns, and several may write."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.rig.records import append_dicts, read_records


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
