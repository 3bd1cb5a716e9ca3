"""Judges the targets for prediction errors and choices over all rows of a table, thus over all settings."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.rig.records import read_dicts

#: What is promised over all rows.
MEDIAN_AT_MOST, WORST_AT_MOST = 0.07, 0.15
#: How much slower the machine was, in a row's `extra`.
_SLOWER = re.compile(r"machine ([\d.]+) times as slow")


def write_promises(folder: Path) -> None:
    """Judge the tables of predictions that a folder has, and write the verdicts beside them."""
    rows = []
    for name, devices in (("predicted", ""), ("emulated", "4 emulated devices")):
        if (table := folder / f"{name}.csv").exists():
            rows += summarise(table, devices)
    (folder / "promises.csv").unlink(missing_ok=True)
    write_checks(rows, str(folder / "promises.csv"), "predicted, over all rows")


def summarise(table: Path, devices: str = "") -> list[Check]:
    """The promises over the rows of a table: median and worst error; of rows that were taken again the last counts.

    A plan that ran before it was predicted counts in neither.

    Args:
        table: Its file.
        devices: What the plans ran on, where that is not the machine as it is.
    """
    rows = [row for row in read_dicts(table) if row["what"].startswith("error of the predicted")]
    newest = {(row["setting"], row["link"], row["what"]): row for row in rows}
    errors = sorted(abs(float(row["value"])) for row in newest.values())
    found = {key: _SLOWER.search(row["extra"]) for key, row in newest.items()}
    steady = sorted(
        abs((1 + float(row["value"])) * (1.0 if (slower := found[key]) is None else float(slower[1])) - 1)
        for key, row in newest.items()
    )
    links = ", ".join(dict.fromkeys(row["link"] for row in rows))

    def check(what: str, value: float, at_most: float | None, errors: list[float]) -> Check:
        return Check(
            setting=f"{len(errors)} plans" + (f", {devices}" if devices else ""),
            link=links,
            what=what,
            value=value,
            low=errors[0],
            high=errors[-1],
            at_most=at_most,
        )

    judged = [
        check("median absolute error of the predicted step", statistics.median(errors), MEDIAN_AT_MOST, errors),
        check("worst absolute error of the predicted step", errors[-1], WORST_AT_MOST, errors),
    ]
    if not any(found.values()):
        return judged
    return [
        *judged,
        check("median, had the machine kept its speed", statistics.median(steady), None, steady),
        check("worst, had the machine kept its speed", steady[-1], None, steady),
    ]
