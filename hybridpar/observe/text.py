"""Numbers in the form in which displays and reports show them, in ASCII, which survives any log collector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def format_duration(seconds: float) -> str:
    """Seconds as `3.2 s`, `52 s`, `12:03` or `26:00:05`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    minutes, rest = divmod(rounded, 60)
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
}


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 worker`, `2 micro-batches`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('batch') else 's'}"
