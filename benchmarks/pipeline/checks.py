"""Rows for results that are no ratio of two methods (predictions, hidden time, memory): value, rule, verdict."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.rig.records import append_dicts
from benchmarks.rig.rows import commit, device, now
from benchmarks.rig.table import wide_console


@dataclass(frozen=True, kw_only=True)
class Check:
    """One number that was measured, and what was promised of it.

    Attributes:
        setting: Model, input and batch, in words.
        link: The link between workers.
        what: What the number is.
        value: The number; the median where there are several repetitions.
        low: The lowest of them.
        high: The highest.
        at_most: What was promised that it is at most; None where nothing was.
        at_least: What was promised that it is at least.
        extra: What else there is to say.
    """

    setting: str
    link: str
    what: str
    value: float
    low: float
    high: float
    at_most: float | None = None
    at_least: float | None = None
    extra: str = ""

    @property
    def verdict(self) -> str:
        """`met`, `missed`, or nothing where nothing was promised."""
        if self.at_most is None and self.at_least is None:
            return ""
        above = self.at_most is None or self.value <= self.at_most
        below = self.at_least is None or self.value >= self.at_least
        return "met" if above and below else "missed"


def write_checks(checks: Sequence[Check], output: str | None, title: str = "pipeline") -> None:
    """Print checks under a title, and add them to a table where one is named."""
    print_checks(checks, title)
    if output is not None:
        append_checks(checks, Path(output))


def print_checks(checks: Sequence[Check], title: str) -> None:
    """Print checks for people."""
    table = Table(title=title, title_justify="left")
    for column in ("setting", "link", "what", "value [lowest, highest]", "promised", "verdict", "extra"):
        table.add_column(column)
    for check in checks:
        at_most = "" if check.at_most is None else f"<= {check.at_most:g}"
        at_least = "" if check.at_least is None else f">= {check.at_least:g}"
        table.add_row(
            check.setting,
            check.link,
            check.what,
            f"{check.value:.4g} [{check.low:.4g}, {check.high:.4g}]",
            at_most or at_least,
            check.verdict,
            check.extra,
        )
    wide_console().print(table)


def append_checks(checks: Sequence[Check], path: Path) -> None:
    """Add checks to a table; folder and table are made where they are missing."""
    before = {"date": now(), "commit": commit()}
    after = {"device": device(), "torch": torch.__version__, "python": platform.python_version()}
    rows = []
    for check in checks:
        cells = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in asdict(check).items()}
        rows.append(before | cells | {"verdict": check.verdict} | after)
    append_dicts(path, rows)
