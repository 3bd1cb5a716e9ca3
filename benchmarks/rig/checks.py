"""Checks: rows for results that are no ratio of two methods (predictions, hidden time): value, rule, verdict."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.rig.records import append_dicts, wide_console
from benchmarks.rig.rows import commit, now, processor


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


def check_of(
    setting: object,
    link: str,
    what: str,
    values: Sequence[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    extra: str = "",
) -> Check:
    """A check of several repetitions: their median, the lowest and the highest."""
    return Check(
        setting=str(setting),
        link=link,
        what=what,
        value=statistics.median(values),
        low=min(values),
        high=max(values),
        at_most=at_most,
        at_least=at_least,
        extra=extra,
    )


def write_checks(checks: Sequence[Check], output: str | Path | None, title: str) -> None:
    """Print checks under a title, and add them to a table where one is named."""
    table = Table(title=title, title_justify="left")
    for column in ("setting", "link", "what", "value [lowest, highest]", "promised", "verdict", "extra"):
        table.add_column(column)
    for check in checks:
        at_most = "" if check.at_most is None else f"<= {check.at_most:g}"
        at_least = "" if check.at_least is None else f">= {check.at_least:g}"
        interval = f"{check.value:.4g} [{check.low:.4g}, {check.high:.4g}]"
        promised = at_most or at_least
        table.add_row(check.setting, check.link, check.what, interval, promised, check.verdict, check.extra)
    wide_console().print(table)
    if output is not None:
        before = {"date": now(), "commit": commit()}
        after = {"device": processor(), "torch": torch.__version__, "python": platform.python_version()}
        append_dicts(Path(output), [before | _cells(check) | after for check in checks])


def _cells(check: Check) -> dict[str, object]:
    cells = asdict(check) | {"verdict": check.verdict}
    return {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in cells.items()}
