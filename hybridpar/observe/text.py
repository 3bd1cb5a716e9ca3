"""Numbers in the form in which displays and reports show them, in ASCII, which survives any log collector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from rich.filesize import decimal


def format_duration(seconds: float) -> str:
    """Seconds as `3.2 s`, `0:12:03` or `1 day, 2:00:05`."""
    return f"{seconds:.1f} s" if seconds < 59.95 else str(timedelta(seconds=round(seconds)))


def format_bytes(count: float) -> str:
    """Bytes in decimal units: `640 bytes`, `12.3 MB`."""
    return decimal(round(count))


def format_rate(per_second: float) -> str:
    """Images per second, with a decimal only where it says something."""
    return f"{per_second:.1f} images/s" if per_second < 99.95 else f"{per_second:,.0f} images/s"


def format_accuracy(fraction: float) -> str:
    """A fraction as a percentage with two decimals, as papers give it."""
    return f"{100 * fraction:.2f}%"


def _format_ages(ages: Mapping[str, Any]) -> str:
    """How late gradients were."""
    return f"mean {ages['mean']:.2f}, largest {ages['most']}"


def _format_kernels(kernels: Mapping[str, Any]) -> str:
    """Operations on kernels, and the time that they save."""
    text = f"{kernels['tuned']} of {kernels['tuned'] + kernels['stock']} operations"
    return text if kernels["saved_ms"] is None else f"{text}, {kernels['saved_ms']:.2f} ms a step less than torch"


#: How figures are shown, by their unit; figures of other units are not shown alone.
UNITS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": "{:,}".format,
    "bytes": format_bytes,
    "ms": "{:.2f} ms".format,
    "s": format_duration,
    "images/s": format_rate,
    "accuracy": format_accuracy,
    "part": "{:.0%}".format,
    "loss": "{:.4f}".format,
    "ratio": "{:.1f}x".format,
    "gradients": "{:.1f} gradients".format,
    "ages": _format_ages,
    "kernels": _format_kernels,
    "checkpoint": "{0[checkpoint]}, by {0[metric]}".format,
}
