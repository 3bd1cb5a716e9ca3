"""The report at the end of a run: accuracy, speed, and where the time went.

Everything shown comes from the summary, so the screen and `summary.json` cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridpar.observe.records import PREDICTED_FIGURES, STEP_PARTS
from hybridpar.observe.summary import step_without_data_ms
from hybridpar.observe.text import UNITS, counted, format_accuracy, format_bytes, format_duration, format_rate

#: Differences of less milliseconds, or of less of a step, are not shown as a percentage of next to nothing.
_SMALL_MS, _SMALL_PART = 1.0, 0.01


def print_report(summary: Mapping[str, Any], files: Sequence[Path] = (), console: Console | None = None) -> None:
    """Print the final table of a run."""
    console = Console() if console is None else console
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=13)
    grid.add_column(overflow="fold")
    for rows in (_run_rows, _test_rows, _step_rows, _prediction_rows, _fact_rows):
        for label, text in rows(summary):
            style = "bold" if label in ("run", "test accuracy", "speed") else ""
            grid.add_row(label, Text(text, style="yellow" if label == "skipped" else style))
    console.print()
    console.print(grid)
    for number, path in enumerate(files):  # in one piece each, to be copied
        console.print(Text.assemble((f"{'' if number else 'written':15}", "dim"), str(path)), soft_wrap=True)


def _run_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Label and text of the rows on a run; an empty label goes on with the last. So do the next functions."""
    steps, seconds = counted(summary["steps"], "step"), format_duration(summary["train_seconds"])
    resumed = "" if summary["resumed_from"] is None else f", resumed from step {summary['resumed_from']:,}"
    yield "run", f"{summary['model']} on {summary['data']}"
    yield "", f"{counted(summary['workers'], 'worker')} on {summary['device']}, batch {summary['batch_size']:,}"
    yield "", f"{summary['exit']} after {steps} in {seconds}{resumed}"


def _test_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    accuracy, highest, best = (summary[key] for key in ("test_accuracy", "best_test_accuracy", "best"))
    if accuracy is not None:
        higher = best is None and highest is not None and highest > accuracy
        yield "test accuracy", format_accuracy(accuracy) + (f"  (best {format_accuracy(highest)})" if higher else "")
    if summary["ema_test_accuracy"] is not None:
        yield "of the average", format_accuracy(summary["ema_test_accuracy"])
    if best is not None:
        text = "not tested" if best["test_accuracy"] is None else format_accuracy(best["test_accuracy"])
        text += "" if best["metric"] == "test_accuracy" else f", by {best['metric']},"
        yield "best", f"{text} after step {best['step']:,}, kept in {best['checkpoint']}"


def _step_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if summary["images_per_second"] is not None:
        yield "speed", format_rate(summary["images_per_second"])
    if parts := step_parts(summary):
        yield "step", f"{summary['step_ms_median']:9.2f} ms  (median)"
        for name, value, share in parts:
            yield "", f"{value:9.2f} ms  {share:3}%  {name}"


def step_parts(summary: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """Where the time of a step went: name, milliseconds and per cent of each part, which add up to 100 %."""
    step_ms = summary["step_ms_median"]
    shown = [key for key in STEP_PARTS if key != "exposed_sync_ms" or _exchanges(summary)]
    parts = [(STEP_PARTS[key], summary[key]) for key in shown if summary[key] is not None]
    if not step_ms or not parts:
        return []
    if (rest := step_ms - sum(value for _, value in parts)) >= 0.005:
        parts.append(("other", rest))
    shares = percentages([value for _, value in parts])
    return [(name, value, share) for (name, value), share in zip(parts, shares, strict=True)]


def percentages(values: Sequence[float]) -> list[int]:
    """Shares of a sum in per cent, rounded so that they add up to 100."""
    total = sum(values)
    exact = [100 * value / total if total else 0.0 for value in values]
    rounded = [int(share) for share in exact]
    missing = (100 if total else 0) - sum(rounded)
    for index in sorted(range(len(rounded)), key=lambda index: rounded[index] - exact[index])[:missing]:
        rounded[index] += 1
    return rounded


def _exchanges(summary: Mapping[str, Any]) -> bool:
    """Whether the run had anything to exchange: a single worker has not, but with parameter servers."""
    return summary["workers"] > 1 or bool(summary["bytes_sent_per_step"])


def _prediction_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What was predicted, beside what was measured of it; nothing where no step was predicted."""
    if summary["predicted_step_ms"] is None:
        return
    measured = {**summary, "step_ms": step_without_data_ms(summary) or None}
    label = "predicted"
    for row in PREDICTED_FIGURES:
        predicted, value = summary[f"predicted_{row.name}"], measured[row.name]
        of_exchange = row.name in ("exposed_sync_ms", "bytes_sent_per_step")
        if predicted is None or value is None or (of_exchange and not _exchanges(summary)):
            continue
        is_small = row.name in STEP_PARTS and abs(value - predicted) < max(
            _SMALL_MS, _SMALL_PART * (measured["step_ms"] or 0.0)
        )
        percent = 100 * (value / predicted - 1) if predicted else 0.0
        tells = predicted and row.unit != "part" and not is_small and abs(percent) < 1000
        apart, text = f"{percent:+.0f}%" if tells else "", UNITS[row.unit]
        yield label, f"{text(predicted):>9}  measured {text(value):>9}  {apart:>5}  {row.predicted}"
        label = ""


def _fact_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pipeline, kernels, servers and gradients, where a run has them."""
    if summary["stages"] > 1:
        replicas = f" x {summary['replicas']} replicas" if summary["replicas"] > 1 else ""
        flow = f"{counted(summary['micro_batches'], 'micro-batch')}, {summary['schedule']}"
        yield "pipeline", f"{counted(summary['stages'], 'stage')}{replicas}, {flow}"
        known = [
            ("bubble", "bubble {:.0%}"),
            ("overlap", "{:.0%} of sums hidden"),
            ("peak_saved_bytes", f"{format_bytes(summary['peak_saved_bytes'] or 0)} kept for backward"),
        ]
        if parts := [text.format(summary[key]) for key, text in known if summary[key] is not None]:
            yield "", ", ".join(parts)
    if (kernels := summary["kernels"]) is not None:
        less = kernels["saved_ms"]
        text = f"{kernels['tuned']} of {kernels['tuned'] + kernels['stock']} operations on kernels"
        yield "kernels", text + ("" if less is None else f", {less:.2f} ms a step less than torch")
    if summary["bytes_sent_per_step"] is not None and _exchanges(summary):
        yield "sent", f"{format_bytes(summary['bytes_sent_per_step'])} per worker and step"
    if (ages := summary["staleness"]) is not None and ages["mean"] is not None:
        where = counted(summary["servers"], "server") if summary["servers"] else "the workers"
        yield "sync", f"{summary['sync']} at {where}"
        if summary["bytes_pulled_per_step"] is not None:
            yield "", f"{format_bytes(summary['bytes_pulled_per_step'])} pulled per worker and step"
        yield "staleness", f"mean {ages['mean']:.2f}, largest {ages['most']}"
    if summary["codec"] != "none" and _exchanges(summary):
        codec, ratio = summary["codec"], summary["compression_ratio"]
        named = codec if ";" not in codec else f"{codec.count(';') + 1} rules"
        yield "gradients", f"as {named}" + (f", {ratio:.1f}x less" if ratio else "")
        times = [(name, summary[f"{name}_ms"]) for name in ("encode", "wire", "decode")]
        if shown := [f"{name} {value:.2f} ms" for name, value in times if value is not None]:
            yield "", ", ".join(shown)
    if summary["skipped_steps"]:
        yield "skipped", f"{counted(summary['skipped_steps'], 'step')} with non-finite gradients"
