"""Rows of paired runs: one method against one baseline, with the machine, the number of rounds and the spread.

One form for all claims. A row that breaks a rule of the table cannot be made, neither from a run nor from a file.
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from rich.table import Table

from benchmarks.rig.network import bits_per_second
from benchmarks.rig.paired import FOREIGN_LOAD, LEAST_ROUNDS, Paired
from benchmarks.rig.records import append_dicts, wide_console
from benchmarks.rig.stats import Ratio, verdict
from hybridpar.errors import DataError, UsageError

_ROOT = Path(__file__).parents[2]


def _link(text: str) -> str:
    if text != "none":
        try:
            bits_per_second(text)
        except UsageError as error:
            raise ValueError("none, loopback, or a rate like 1gbit") from error
    return text


def _object(cell: Any) -> Any:
    return json.loads(cell) if isinstance(cell, str) else cell


Text = Annotated[str, Field(pattern=r"\S")]


class Row(BaseModel):
    """One method against one baseline. Times are milliseconds per step, of the slowest rank.

    Attributes:
        date: When the row was made, UTC, as 2025-01-31T12:00:00Z.
        commit: Short hash of the code; with "-dirty" where Python files differed from it; or "unknown".
        claim: The claim that the row is for: the name of its folder under benchmarks/.
        setting: Model, input and batch, in words.
        link: "loopback", a shaped rate, or "none" where nothing is sent.
        ranks: Number of processes.
        method: What was measured.
        baseline: What it was measured against; the method itself in the baseline's own row.
        rounds: Rounds kept.
        dropped: Rounds dropped because the machine was busy.
        load: Foreign load during the kept rounds at its highest, in cores.
        median_ms: Median over the rounds.
        min_ms: Shortest round.
        ratio: Median of the per-round ratios, method over baseline.
        ratio_low: Lower end of its 95 % interval.
        ratio_high: Upper end.
        target: What the ratio was promised to be at most, or None.
        verdict: The word of `stats.verdict`; "baseline" in the baseline's own row.
        device: Processor and its number of cores.
        cores: Cores that the ranks might use together.
        threads: Threads per rank.
        torch: Version.
        python: Version.
        extra: What else the claim needs: bytes, losses, options.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    commit: Annotated[str, Field(pattern=r"^(unknown|[0-9a-f]{4,40}(-dirty)?)$")]
    claim: Text
    setting: Text
    link: Annotated[str, AfterValidator(_link)]
    ranks: PositiveInt
    method: Text
    baseline: Text
    rounds: Annotated[int, Field(ge=LEAST_ROUNDS)]
    dropped: NonNegativeInt
    load: Annotated[NonNegativeFloat, Field(allow_inf_nan=False)]
    median_ms: Annotated[PositiveFloat, Field(allow_inf_nan=False)]
    min_ms: PositiveFloat
    ratio: Annotated[PositiveFloat, Field(allow_inf_nan=False)]
    ratio_low: PositiveFloat
    ratio_high: Annotated[PositiveFloat, Field(allow_inf_nan=False)]
    target: Annotated[PositiveFloat | None, BeforeValidator(lambda cell: None if cell == "" else cell)]
    verdict: Literal["met", "missed", "faster", "slower", "parity", "unclear", "loaded", "baseline"]
    device: Text
    cores: PositiveInt
    threads: PositiveInt
    torch: Text
    python: Text
    extra: Annotated[dict[str, Any], BeforeValidator(_object)]

    @model_validator(mode="after")
    def _numbers_agree(self) -> Row:
        is_baseline = self.method == self.baseline
        ratio = Ratio(self.ratio, self.ratio_low, self.ratio_high)
        word = "baseline" if is_baseline else verdict(ratio, self.target, loaded=self.load > FOREIGN_LOAD)
        rules = {
            "min_ms is at most median_ms": self.min_ms <= self.median_ms,
            "ratio lies between ratio_low and ratio_high": self.ratio_low <= self.ratio <= self.ratio_high,
            "a baseline has ratio 1 and no target": not is_baseline or (self.ratio == 1 and self.target is None),
            f"verdict is {word!r} for these numbers": self.verdict == word,
        }
        for rule, holds in rules.items():
            if not holds:
                raise ValueError(rule)
        return self


COLUMNS = tuple(Row.model_fields)


def row(
    result: Paired,
    method: str,
    baseline: str,
    *,
    claim: str,
    setting: str,
    link: str = "none",
    ranks: int = 1,
    target: float | None = None,
    device: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Row:
    """The row of a method in a paired run; what is not an argument is read from the run and the machine.

    The baseline has no target. `device` is by default this machine's processor.
    """
    measured = result.ratio(method, baseline)
    ratio = Ratio(_rounded(measured.median), _rounded(measured.low), _rounded(measured.high))
    is_baseline = method == baseline
    target = None if is_baseline or target is None else _rounded(target)
    return Row(
        date=now(),
        commit=commit(),
        claim=claim,
        setting=setting,
        link=link,
        ranks=ranks,
        method=method,
        baseline=baseline,
        rounds=result.rounds,
        dropped=result.dropped,
        load=_rounded(result.load),
        median_ms=_rounded(result.median_ms(method)),
        min_ms=_rounded(result.min_ms(method)),
        ratio=ratio.median,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        target=target,
        verdict="baseline" if is_baseline else verdict(ratio, target, loaded=result.load > FOREIGN_LOAD),
        device=device or processor(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        torch=importlib.metadata.version("torch"),
        python=platform.python_version(),
        extra=dict(extra or {}),
    )


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a table.

    Raises:
        DataError: The table that is there has other columns.
    """
    cells = [entry.model_dump() | {"extra": json.dumps(entry.extra, sort_keys=True)} for entry in rows]
    if path.exists():
        read_rows(path, check=False)
    append_dicts(path, cells)


def read_rows(path: Path, check: bool = True) -> list[Row]:
    """All rows of a table.

    Raises:
        DataError: With line, column and rule of the first thing that is wrong.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise DataError(
                f"{path}: the columns are {','.join(reader.fieldnames or ['(none)'])}",
                f"They must be {','.join(COLUMNS)}",
                "Move the old table away, or measure it anew.",
            )
        rows = []
        for cells in reader if check else ():
            try:
                rows.append(Row.model_validate(cells))
            except ValidationError as error:
                first = error.errors()[0]
                where = f"{path}, line {reader.line_num}, {'.'.join(map(str, first['loc'])) or 'all columns'}"
                raise DataError(f"{where}: {first['input']!r}", f"{first['msg']}.") from error
        return rows


def write_rows(rows: Sequence[Row], output: str | Path | None) -> None:
    """Print rows, and add them to a table where one is named."""
    print_rows(rows)
    if output is not None:
        append_rows(Path(output), rows)


def print_rows(rows: Sequence[Row]) -> None:
    """Print rows for people, one table per claim, setting and link."""
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
            is_baseline = entry.method == entry.baseline
            table.add_row(
                entry.method,
                "" if is_baseline else entry.baseline,
                f"{entry.median_ms:.4g}",
                f"{entry.min_ms:.4g}",
                "" if is_baseline else str(Ratio(entry.ratio, entry.ratio_low, entry.ratio_high)),
                "" if entry.target is None else f"{entry.target:g}",
                f"{entry.rounds} ({entry.dropped})",
                f"{entry.load:.2f}",
                entry.verdict,
            )
        wide_console().print(table)


def now() -> str:
    """The time, UTC, as 2025-01-31T12:00:00Z."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit() -> str:
    """Short hash of the code that runs, "-dirty" behind it where Python files differ, or "unknown" without git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # Tables and pages change with every measurement; only code says what was measured.
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain", "--", "*.py") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processor() -> str:
    """The processor's model and the machine's number of cores."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")), model)
        model = model.partition(":")[2].strip() or model
    return f"{model}, {os.cpu_count()} cores"


def _rounded(value: float) -> float:
    # Six digits are more than any timing has, and rows stay readable.
    return float(f"{value:.6g}")
