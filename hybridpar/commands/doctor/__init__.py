"""`hybridpar doctor`: shows what this machine offers, what hybridpar will use, and how to mend what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridpar.commands import register_command


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show what this machine offers, what hybridpar will use, and how to mend what is missing."""

    fresh: bool = False
    """Measure again instead of using cached figures."""
    json: bool = False
    """Print JSON."""


@register_command(
    "doctor", "Show what this machine offers, what hybridpar will use, and how to mend what is missing.", Doctor
)
def _run(command: Doctor, _: Sequence[str]) -> int:
    from hybridpar.commands.doctor.diagnosis import run_doctor

    return run_doctor(command.fresh, command.json)
