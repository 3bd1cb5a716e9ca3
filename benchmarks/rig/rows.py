"""Defines a row of a table: the measured value, the baseline, the machine, the number of rounds and the spread.

One schema for all claims. A row is one method against one baseline in one paired run.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.rig.paired import FOREIGN_LOAD, Paired
from benchmarks.rig.stats import Ratio, verdict
from hybridpar.errors import UsageError

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method against one baseline. Times are milliseconds per step, of the slowest rank.

    Args:
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

    date: str
    commit: str
    claim: str
    setting: str
    link: str
    ranks: int
    method: str
    baseline: str
    rounds: int
    dropped: int
    load: float
    median_ms: float
    min_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    target: float | None
    verdict: str
    device: str
    cores: int
    threads: int
    torch: str
    python: str
    extra: Mapping[str, Any] = field(default_factory=dict)


COLUMNS = tuple(column.name for column in fields(Row))


def row(
    result: Paired,
    method: str,
    baseline: str,
    *,
    claim: str,
    setting: str,
    link: str = "none",
    ranks: int = 1,
    threads: int | None = None,
    target: float | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Row:
    """The row of a method in a paired run.

    Args:
        result: The run.
        method: Whose row it is.
        baseline: The method to compare with; the same for the baseline's own row.
        claim: See `Row`.
        setting: See `Row`.
        link: See `Row`.
        ranks: See `Row`.
        threads: Threads per rank; default: what torch uses now.
        target: What the ratio was promised to be at most.
        extra: See `Row`.

    Raises:
        UsageError: One of the two was not measured, or the baseline was promised something against itself.
    """
    own = method == baseline
    if own and target is not None:
        raise UsageError(f"a target for {method!r} against itself", "The ratio is 1.", "Leave the target away.")
    measured = result.ratio(method, baseline)
    ratio = Ratio(_rounded(measured.median), _rounded(measured.low), _rounded(measured.high))
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
        verdict="baseline" if own else verdict(ratio, target, loaded=result.load > FOREIGN_LOAD),
        device=device(),
        cores=len(os.sched_getaffinity(0)),
        threads=threads if threads is not None else torch.get_num_threads(),
        torch=importlib.metadata.version("torch"),
        python=platform.python_version(),
        extra=dict(extra or {}),
    )


def now() -> str:
    """The time, UTC, as 2025-01-31T12:00:00Z."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit() -> str:
    """Short hash of the code that runs, "-dirty" behind it where Python files differ, or "unknown" without git."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True)

    try:
        head = git("rev-parse", "--short", "HEAD")
        if head.returncode != 0:
            return "unknown"
        # Tables and pages change with every measurement; only code says what was measured.
        changed = git("status", "--porcelain", "--", "*.py").stdout.strip()
    except FileNotFoundError:
        return "unknown"
    return head.stdout.strip() + ("-dirty" if changed else "")


def device() -> str:
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
