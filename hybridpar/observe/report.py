"""The report at the end of a run: accuracy, speed, and where the time went.

Everything shown comes from the summary, so the screen and `summary.json` cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridpar.observe.records import PREDICTED_FIGURES, STEP_PARTS
from hybridpar.observe.summary import step_without_data_ms
from hybridpar.observe.text import UNITS, counted, format_accuracy, format_bytes, format_duration, format_rate

#: Differences of less milliseconds, or of less of a step, are not told as a percentage of next to nothing.
_SMALL_MS, _SMALL_PART = 1.0, 0.01


_SYNC_PARTS = (("encode_ms", "encode"), ("wire_ms", "wire"), ("decode_ms", "decode"))


def print_report(summary: Mapping[str, Any], files: Sequence[Path] = (), console: Console | None = None) -> None:
    """Print the final table of a run."""
    console = Console() if console is None else console
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    rows = _rows(summary)
    for label, text, style in rows:
        grid.add_row(label, Text(text, style=style))
    console.print()
    console.print(grid)
    width = max(len(label) for label, _, _ in rows) + 2
    for number, path in enumerate(files):  # in one piece each, to be copied
        label = "" if number else "written"
        console.print(Text.assemble((label.ljust(width), "dim"), str(path)), soft_wrap=True)


def _rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Label, text and style of each row; what was not measured has no row."""
    finished = summary["exit"] == "finished"
    ending = (
        f"{summary['exit']} after {counted(summary['steps'], 'step')} in {format_duration(summary['train_seconds'])}"
    )
    if summary["resumed_from"] is not None:
        ending += f", resumed from step {summary['resumed_from']:,}"
    rows = [
        ("run", f"{summary['model']} on {summary['data']}", "bold"),
        ("", f"{counted(summary['workers'], 'worker')} on {summary['device']}, batch {summary['batch_size']:,}", ""),
        ("", ending, "" if finished else "yellow"),
    ]
    if summary["test_accuracy"] is not None:
        shown = format_accuracy(summary["test_accuracy"])
        if summary.get("best") is None and summary["best_test_accuracy"] > summary["test_accuracy"]:
            shown += f"  (best {format_accuracy(summary['best_test_accuracy'])})"
        rows.append(("test accuracy", shown, "bold"))
    if (averaged := summary.get("ema_test_accuracy")) is not None:
        rows.append(("of the average", format_accuracy(averaged), ""))
    if (best := summary.get("best")) is not None:
        metric = best["metric"]
        known = "not tested" if best["test_accuracy"] is None else format_accuracy(best["test_accuracy"])
        text = known + f", by {metric}," * (metric != "test_accuracy")
        text += f" after step {best['step']:,}, kept in {best['checkpoint']}"
        rows.append(("best", text, ""))
    if summary["images_per_second"] is not None:
        rows.append(("speed", format_rate(summary["images_per_second"]), "bold"))
    rows += _step_rows(summary)
    rows += _prediction_rows(summary)
    return rows + _fact_rows(summary)


def _fact_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Label, text and style of rows on pipeline, kernels, servers and gradients; an empty label goes on
    with the last.
    """
    rows = _pipeline_rows(summary) + _kernel_rows(summary)
    if summary["bytes_sent_per_step"] is not None and _exchanges(summary):
        rows.append(("sent", f"{format_bytes(summary['bytes_sent_per_step'])} per worker and step", ""))
    rows += _server_rows(summary)
    rows += _sync_rows(summary)
    if summary["skipped_steps"]:
        rows.append(("skipped", f"{counted(summary['skipped_steps'], 'step')} with non-finite gradients", "yellow"))
    return rows


def _exchanges(summary: Mapping[str, Any]) -> bool:
    """Whether the run had anything to exchange: a single worker has not, but with parameter servers."""
    return summary["workers"] > 1 or bool(summary["bytes_sent_per_step"])


def _step_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    parts = step_parts(summary)
    if parts is None:
        return []
    return [
        ("step", f"{summary['step_ms_median']:9.2f} ms  (median)", ""),
        *(("", f"{value:9.2f} ms  {share:3}%  {name}", "") for name, value, share in parts),
    ]


def step_parts(summary: Mapping[str, Any]) -> list[tuple[str, float, int]] | None:
    """Where the time of a step went: name, milliseconds and per cent of each part, which add up to 100 %."""
    step_ms = summary["step_ms_median"]
    if not step_ms:
        return None
    shown = [key for key in STEP_PARTS if key != "exposed_sync_ms" or _exchanges(summary)]
    parts = [(STEP_PARTS[key], summary[key]) for key in shown if summary[key] is not None]
    if parts and (rest := step_ms - sum(value for _, value in parts)) >= 0.005:
        parts.append(("other", rest))
    shares = percentages([value for _, value in parts])
    return [(name, value, share) for (name, value), share in zip(parts, shares, strict=True)]


def percentages(values: Sequence[float]) -> list[int]:
    """Shares of a whole in whole per cent, rounded so that they add up to 100."""
    whole = sum(values)
    exact = [100 * value / whole if whole else 0.0 for value in values]
    rounded = [int(share) for share in exact]
    missing = (100 if whole else 0) - sum(rounded)
    for index in sorted(range(len(rounded)), key=lambda index: rounded[index] - exact[index])[:missing]:
        rounded[index] += 1
    return rounded


def _apart(predicted: float, measured: float, step_ms: float | None = None) -> str:
    """By how much a measured value missed its prediction, as a percentage; empty where that would say nothing."""
    if not predicted or (step_ms is not None and abs(measured - predicted) < max(_SMALL_MS, _SMALL_PART * step_ms)):
        return ""
    percent = 100 * (measured / predicted - 1)
    return f"{percent:+.0f}%" if abs(percent) < 1000 else ""


def _kernel_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What only a run with tuned kernels has to tell."""
    kernels = summary.get("kernels")
    if kernels is None:
        return []
    text = f"{kernels['tuned']} of {kernels['tuned'] + kernels['stock']} operations on kernels"
    if kernels["saved_ms"] is not None:
        text += f", {kernels['saved_ms']:.2f} ms a step less than torch"
    return [("kernels", text, "")]


def _server_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What only a run with parameter servers has to tell."""
    ages = summary.get("staleness")
    if ages is None or ages["mean"] is None:
        return []
    where = counted(summary["servers"], "server") if summary["servers"] else "the workers"
    rows = [("sync", f"{summary['sync']} at {where}", "")]
    if summary["bytes_pulled_per_step"] is not None:
        rows.append(("", f"{format_bytes(summary['bytes_pulled_per_step'])} pulled per worker and step", ""))
    rows.append(("staleness", f"mean {ages['mean']:.2f}, largest {ages['most']}", ""))
    return rows


def _sync_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What only a run that compresses gradients has to tell."""
    rows = []
    if summary["codec"] != "none" and _exchanges(summary):
        codec = summary["codec"] if ";" not in summary["codec"] else f"{summary['codec'].count(';') + 1} rules"
        saved = f", {summary['compression_ratio']:.1f}x less" if summary["compression_ratio"] else ""
        rows.append(("gradients", f"as {codec}{saved}", ""))
        parts = [(key, name) for key, name in _SYNC_PARTS if summary[key] is not None]
        if parts:
            rows.append(("", ", ".join(f"{name} {summary[key]:.2f} ms" for key, name in parts), ""))
    return rows


def _pipeline_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What only a run with stages has to tell."""
    if summary["stages"] == 1:
        return []
    rows = []
    replicas = f" x {summary['replicas']} replicas" if summary["replicas"] > 1 else ""
    parts = [
        f"{counted(summary['stages'], 'stage')}{replicas}",
        counted(summary["micro_batches"], "micro-batch"),
        summary["schedule"],
    ]
    rows.append(("pipeline", ", ".join(parts), ""))
    parts = []
    if summary["bubble"] is not None:
        parts.append(f"bubble {100 * summary['bubble']:.0f}%")
    if summary["overlap"] is not None:
        parts.append(f"{100 * summary['overlap']:.0f}% of sums hidden")
    if summary["peak_saved_bytes"]:
        parts.append(f"{format_bytes(summary['peak_saved_bytes'])} kept for backward")
    if parts:
        rows.append(("", ", ".join(parts), ""))
    return rows


def _prediction_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What was predicted, beside what was measured of it; empty where no step was predicted."""
    if summary.get("predicted_step_ms") is None:
        return []
    measured = {**summary, "step_ms": step_without_data_ms(summary) or None}
    rows: list[tuple[str, str, str]] = []
    for row in PREDICTED_FIGURES:
        predicted, value = summary.get(f"predicted_{row.name}"), measured.get(row.name)
        of_exchange = row.name in ("exposed_sync_ms", "bytes_sent_per_step")
        if predicted is None or value is None or (of_exchange and not _exchanges(summary)):
            continue
        step_ms = measured["step_ms"] if row.name in STEP_PARTS else None
        apart = "" if row.unit == "part" else _apart(predicted, value, step_ms)
        text = UNITS[row.unit].text
        beside = f"{text(predicted):>9}  measured {text(value):>9}  {apart:>5}  {row.predicted}"
        rows.append(("" if rows else "predicted", beside, ""))
    return rows
