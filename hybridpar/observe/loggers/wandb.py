"""Weights & Biases runs.

`WANDB_PROJECT`, `WANDB_ENTITY` and `WANDB_MODE` are obeyed. Without an API key, or where the server cannot be reached,
the run is written to `wandb/` in the run directory, from where `wandb sync` uploads it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any, ClassVar

from hybridpar.errors import shortened
from hybridpar.observe.logger import LOGGERS, Ending, Line, LoggedRun, Logger

#: Project where `WANDB_PROJECT` names none.
PROJECT = "hybridpar"


@LOGGERS.register("wandb", "a run of Weights & Biases")
class WandbLogger(Logger):
    """A run with the options as its configuration; a resumed run goes on in the same one."""

    package: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # the terminal is the display's
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def start(self, run: LoggedRun) -> str | None:
        """Begin a run, or go on with the one that this run began."""
        offline = self._why_offline()
        given = run.recall("wandb") or secrets.token_hex(4)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.directory.name,
            id=given,
            resume="allow",
            reinit="create_new",
            dir=str(run.directory),
            config=dict(run.options),
            mode=None if offline is None else "offline",
            settings=self._wandb.Settings(console="off"),
        )
        run.remember("wandb", given)
        if self._run.url:
            return str(self._run.url)
        reason = "" if offline is None else f"{offline}, so it is "
        return f"{reason}written offline; upload it with: wandb sync {os.path.dirname(self._run.dir)}"

    def _why_offline(self) -> str | None:
        """Why nothing can be sent, where it is to be."""
        if os.environ.get("WANDB_MODE", "online") != "online":
            return None
        try:
            return None if self._wandb.login(prompt=False) else "there is no API key (`wandb login`)"
        except Exception as error:
            return shortened(str(error).strip().partition("\n")[0].rstrip("."))

    def write(self, lines: Sequence[Line]) -> None:
        """Log each line at its step; wandb drops those of steps that it has."""
        for line in lines:
            self._run.log(line.figures, step=line.step)

    def close(self, ending: Ending) -> None:
        """End the run, which uploads what is left."""
        self._run.finish(exit_code=0 if ending == "finished" else 1)
