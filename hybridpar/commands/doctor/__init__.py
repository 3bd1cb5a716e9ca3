"""`hybridpar doctor`: shows what this machine offers and hybridpar will use, or where a run stands still."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridpar.commands import register_command
from hybridpar.spec import Options


class Doctor(Options):
    """Show what this machine offers, what hybridpar will use, and how to mend what is missing; or where a run hangs.

    Attributes:
        fresh: Measure again instead of using cached figures.
        hang: Directory of a run that stands still: list what every worker is in, and what it did last.
    """

    fresh: bool = False
    hang: Path | None = None


@register_command(
    "doctor",
    "Show what this machine offers, and how to mend what is missing; or where a run hangs (--hang RUN).",
    Doctor,
)
def _run(command: Doctor, arguments: Sequence[str]) -> int:
    if command.hang is not None:
        from hybridpar.commands.doctor.hang import run_hang

        return run_hang(command.hang)
    from hybridpar.commands.doctor.diagnosis import run_doctor

    return run_doctor(command.fresh, arguments)
