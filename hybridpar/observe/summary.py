"""`summary.json`, the figures of a run, and the table of them that is printed at its end.

`SUMMARY_FIGURES` has every key with its unit, and docs/figures.md what each means. The summary is computed from
`metrics.jsonl`, so it covers the whole of a run that was resumed, and can be computed again.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridpar.errors import RunDirectoryError, counted
from hybridpar.formats.file_reader import read_json
from hybridpar.formats.output_files import replace_file
from hybridpar.observe.metrics import MetricsTable
from hybridpar.observe.records import LISTED_FIGURES, STEP_ALONE, STEP_FIGURES, STEP_PARTS, SUMMARY_FIGURES

#: Name of the file in the run directory.
SUMMARY_FILE = "summary.json"

#: Steps at the start of a process that say nothing about its speed: caches fill, kernels are chosen and compiled.
WARM_UP_STEPS = 3

#: A part of a step that was predicted with less milliseconds of error is not shown as a percentage of next to nothing.
_SMALL_MS = 1.0


def summarize(
    facts: Mapping[str, Any],
    table: MetricsTable,
    *,
    ended: Literal["finished", "interrupted"],
    resumed_from: int | None = None,
    versions: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Put a run in numbers, with the keys and units of `SUMMARY_FIGURES`; `facts` are what was known at its start."""
    steps = table.steps
    steady = _steady(steps["step"], resumed_from)
    of_steps = {
        row.key: row.reduced(steps[row.name] if row.reduce == "sum" else steps[row.name][steady])
        for row in STEP_FIGURES
        if row.reduce not in ("", "part")
    }
    parts = np.stack([steps[key][steady] for key in STEP_PARTS], axis=1)
    sent = float(np.nansum(steps["bytes_after"]))
    installed = {"python": platform.python_version()}
    for package in ("hybridpar", "torch", "torchvision"):
        with contextlib.suppress(metadata.PackageNotFoundError):  # run from a source tree
            installed[package] = metadata.version(package)
    return {
        **{row.name: None for row in SUMMARY_FIGURES},  # what metrics.jsonl does not hold; the run adds it
        **facts,
        "exit": ended,
        "steps": table.last_step or resumed_from or 0,
        "resumed_from": resumed_from,
        **tests_of(table),
        "train_seconds": round(float(np.nansum(steps["step_ms"])) / 1000, 3),
        **of_steps,
        **divided_step(of_steps["step_ms_median"], [step_shares(parts, steps["step_ms"][steady])]),
        "compression_ratio": round(float(np.nansum(steps["bytes_before"])) / sent, 3) if sent > 0 else None,
        "shares": "equal",
        "final_batch_size": facts["batch_size"],
        "staleness": _ages(steps["staleness"]),
        "versions": installed | dict(versions or {}),
    }


def tests_of(table: MetricsTable) -> dict[str, float | None]:
    """What the tests of a run came to: the last of each figure, and the best accuracy."""
    names = ("test_accuracy", "ema_test_accuracy", "test_loss", "train_loss")
    last = {name: values[-1] if (values := table.tested(name)) else None for name in names}
    return last | {"best_test_accuracy": max(table.tested("test_accuracy"), default=None)}


def step_shares(
    parts: NDArray[np.float64] | Sequence[Sequence[float]], step_ms: NDArray[np.float64] | None = None
) -> tuple[float, ...] | None:
    """Where the time of one worker's steps went.

    The mean over the half of the steps whose time is nearest to the median: a pause of a single step, such as the wait
    for the first batch of an epoch, does not count, and the shares add up, which medians of the parts do not.
    """
    rows = np.asarray(parts, dtype=np.float64).reshape(-1, len(STEP_PARTS))
    wall = rows.sum(axis=1) if step_ms is None else np.maximum(rows.sum(axis=1), step_ms)
    rows, wall = rows[np.isfinite(wall)], wall[np.isfinite(wall)]
    middle = np.argsort(wall, kind="stable")[len(wall) // 4 : len(wall) - len(wall) // 4]
    total = float(wall[middle].sum())
    return tuple((rows[middle].sum(axis=0) / total).tolist()) if total > 0 else None


def divided_step(step_ms: float | None, workers: Sequence[tuple[float, ...] | None]) -> dict[str, float | None]:
    """The parts of a step, which add up to it; what is left, if anything, is something else."""
    known = [shares for shares in workers if shares is not None]
    if step_ms is None or not known:
        return dict.fromkeys(STEP_PARTS)
    means = (sum(values) / len(known) for values in zip(*known, strict=True))
    return {key: round(step_ms * mean, 3) for key, mean in zip(STEP_PARTS, means, strict=True)}


def step_without_data_ms(summary: Mapping[str, Any]) -> float | None:
    """A step of a run less what it waited for data, which nothing predicts; None without a step.

    It is the median, and in an outer loop, of whose steps few wait for an exchange, the mean.
    """
    step = summary.get("step_ms_mean") or summary["step_ms_median"]
    return None if step is None else max(0.0, float(step) - (summary["data_ms"] or 0.0))


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a run; None where there is none, a damaged one, or one of another version."""
    try:
        summary = read_json(Path(run_dir) / SUMMARY_FILE, "the summary", RunDirectoryError)
    except RunDirectoryError:
        return None
    keys = {row.name for row in SUMMARY_FIGURES}
    return summary if isinstance(summary, dict) and summary.keys() >= keys else None


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write a summary to `summary.json`, as a whole or not at all."""
    path = Path(run_dir) / SUMMARY_FILE
    replace_file(path, [json.dumps(dict(summary), indent=2, allow_nan=False).encode() + b"\n"])
    return path


def _ages(values: NDArray[np.float64]) -> dict[str, Any] | None:
    """How late the gradients of steps were, by the mean of each; None where they never are."""
    known = values[np.isfinite(values)]
    if not known.size:
        return None
    return {"mean": round(float(known.mean()), 4), "most": round(float(known.max()))}


def _steady(step: NDArray[np.float64], resumed_from: int | None) -> NDArray[np.bool_]:
    """Which steps to take medians over: all but the warm-up, or all where hardly any others are left."""
    keep = np.ones(len(step), dtype=bool)
    for start in {float(step[0]) - 1 if len(step) else 0.0, float(resumed_from or 0)}:
        keep &= (step <= start) | (step > start + WARM_UP_STEPS)
    return keep if keep.sum() >= WARM_UP_STEPS else np.ones(len(step), dtype=bool)


# ---------------------------------------------------------------------------------------------- the table at the end


def print_report(summary: Mapping[str, Any], files: Sequence[Path] = (), console: Console | None = None) -> None:
    """Print the final table of a run."""
    console = Console() if console is None else console
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for title, text in report_rows(summary):
        grid.add_row(title, Text(text))
    console.print()
    console.print(grid)
    for path in files:  # in one piece each, to be copied
        console.print(Text.assemble(("written  ", "dim"), str(path)), soft_wrap=True)


def report_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and text of each row."""
    yield "run", f"{summary['model']} on {summary['data']}"
    yield "", f"{counted(summary['workers'], 'worker')} on {summary['device']}, batch {summary['batch_size']:,}"
    predicted = {row.name: summary.get(f"predicted_{row.name}") for row in LISTED_FIGURES}
    alone = step_without_data_ms(summary) if predicted[STEP_ALONE.name] is not None else None
    for row in LISTED_FIGURES:
        value = alone if row is STEP_ALONE else summary[row.name]
        expected = predicted[row.name]
        if value is None or (value == row.usual and not expected):
            continue
        text = row.text(value)
        if row.name in STEP_PARTS and summary["step_ms_median"]:
            text = f"{text:<10} {value / summary['step_ms_median']:>3.0%}"
        if expected is not None:
            text = f"{text:<14}  predicted {row.text(expected)}"
            is_small = row.unit == "part" or (row.name in STEP_PARTS and abs(value - expected) < _SMALL_MS)
            text += f", {100 * (value / expected - 1):+.0f}%" if expected and not is_small else ""
        yield row.title, text
