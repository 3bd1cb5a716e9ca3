"""Numbers and lines in the form in which displays and reports show them.

The lines are ASCII, so that they survive any log collector.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridpar.observe.records import EpochRecord, RunInfo


def format_duration(seconds: float) -> str:
    """Seconds as `3.2 s`, `52 s`, `12:03` or `26:00:05`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_bytes(count: float) -> str:
    """Bytes with three significant digits in decimal units: `640 B`, `12.3 MB`, `1.20 GB`."""
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    exponent = 0
    while count >= 999.5 and exponent < len(units) - 1:
        count /= 1000
        exponent += 1
    if exponent == 0:
        return f"{count:.0f} B"
    digits = 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{count:.{digits}f} {units[exponent]}"


def format_rate(per_second: float) -> str:
    """Images per second, with a decimal only where it says something."""
    return f"{per_second:.1f} images/s" if per_second < 99.95 else f"{per_second:,.0f} images/s"


def format_accuracy(fraction: float) -> str:
    """A fraction as a percentage with two decimals, as papers give it."""
    return f"{100 * fraction:.2f}%"


@dataclass(frozen=True)
class Unit:
    """What a figure is measured in.

    Attributes:
        kind: The type of a value.
        text: How a value is told.
        least: No value is smaller.
        most: No value is larger.
    """

    kind: type
    text: Callable[[Any], str] = str
    least: float = 0.0
    most: float = math.inf


#: The units of the table of figures.
UNITS = {
    "text": Unit(str),
    "object": Unit(dict),
    "flag": Unit(bool),
    "number": Unit(float, least=-math.inf),
    "count": Unit(int, "{:,}".format),
    "bytes": Unit(int, format_bytes),
    "ms": Unit(float, "{:.2f} ms".format),
    "s": Unit(float, format_duration),
    "images/s": Unit(float, format_rate),
    "accuracy": Unit(float, format_accuracy, most=1.0),
    "part": Unit(float, "{:.0%}".format, most=1.0),
    "loss": Unit(float, "{:.4f}".format, least=-math.inf),
    "rate": Unit(float, "{:.3g}".format),
    "norm": Unit(float, "{:.4g}".format),
    "ratio": Unit(float, "{:.1f}".format),
    "updates": Unit(float, "{:.2f}".format),
    "gradients": Unit(float, "{:.2f}".format),
}


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 worker`, `2 micro-batches`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('batch') else 's'}"


def describe_run(info: RunInfo) -> list[tuple[str, str]]:
    """The start screen as label and text, without the notes."""
    whole = info.steps_total == info.epochs * info.steps_per_epoch
    epochs = f"{counted(info.epochs, 'epoch')} of {info.steps_per_epoch:,}"
    batch = f"{info.batch_size:,} samples per step"
    if info.replicas > 1 and not any(note.startswith("shares") for note in info.notes):
        least, left = divmod(info.batch_size, info.replicas)
        batch += f", {least:,}{f' or {least + 1:,}' if left else ''} on each of {info.replicas} replicas"
    return [
        ("model", f"{info.model}, {info.parameters:,} parameters"),
        ("data", info.data_line or info.data),
        ("workers", f"{info.workers} on {info.device}"),
        ("batch", f"{batch}{info.batch_line and f' (auto: {info.batch_line})'}"),
        ("steps", f"{info.steps_total:,} ({epochs if whole else f'{info.steps_per_epoch:,} per epoch'})"),
        ("run dir", str(info.run_dir)),
    ]


def epoch_line(record: EpochRecord, epochs: int) -> str:
    """One line about an epoch that ended."""
    parts = [f"epoch {record.epoch + 1}/{epochs} done"]
    if not math.isnan(record.train_loss):  # of a resumed run that had only the test of the epoch left to do
        parts.append(f"train loss {record.train_loss:.4f}")
    if record.test_loss is not None:
        parts.append(f"test loss {record.test_loss:.4f}")
    if record.test_accuracy is not None:
        parts.append(f"test accuracy {format_accuracy(record.test_accuracy)}")
    if record.ema_test_accuracy is not None:
        parts.append(f"of the average {format_accuracy(record.ema_test_accuracy)}")
    return "  ".join([*parts, format_duration(record.seconds)])
