"""`hybridpar doctor`: shows what this machine offers and hybridpar will use, or where a run stands still."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridpar.commands import register_command


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show what this machine offers, what hybridpar will use, and how to mend what is missing; or where a run hangs."""

    fresh: bool = False
    """Measure again instead of using cached figures."""
    json: bool = False
    """Print JSON."""
    hang: Path | None = None
    """Directory of a run that stands still: list what every worker is in, and what it did last."""


@register_command(
    "doctor",
    "Show what this machine offers, and how to mend what is missing; or where a run hangs (--hang RUN).",
    Doctor,
)
def _run(command: Doctor, _: Sequence[str]) -> int:
    if command.hang is not None:
        from hybridpar.commands.doctor.hang import run_hang

        return run_hang(command.hang, command.json)
    from hybridpar.commands.doctor.diagnosis import run_doctor

    return run_doctor(command.fresh, command.json)
