"""The option --checkpoint-every: when to write checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridpar.errors import UsageError


@dataclass(frozen=True)
class SaveRule:
    """When to write checkpoints: `--checkpoint-every`.

    Attributes:
        epoch: After each epoch.
        steps: After so many steps.
        seconds: After so many seconds.
    """

    epoch: bool = False
    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> SaveRule:
        """Read `epoch`, `200`, `60s`, several joined by commas, or `never`."""
        rule: dict[str, Any] = {}
        for part in text.split(","):
            part = part.strip()
            if part == "epoch":
                rule["epoch"] = True
            elif part.isdigit() and int(part) > 0:
                rule["steps"] = int(part)
            elif part.endswith("s") and part[:-1].isdigit() and int(part[:-1]) > 0:
                rule["seconds"] = float(part[:-1])
            elif part != "never" or "," in text:
                raise UsageError(
                    f"--checkpoint-every is {text!r}",
                    "It must be `epoch`, a number of steps like 200, seconds like 60s, several of these joined by "
                    "commas, or `never`.",
                )
        return cls(**rule)
