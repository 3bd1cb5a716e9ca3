"""How far a run is, as its checkpoints say it: the place in the data, and the best result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridpar.config import TrainConfig
from hybridpar.errors import CheckpointError, UsageError

#: Options that decide which samples a step sees; a resumed run must not change them.
POSITION_OPTIONS = ("data", "batch_size", "seed", "image_size", "synthetic_samples")


#: Keys of `Standing.to_extra`.
_POSITION_KEYS = {"epoch", "epoch_step", "best_accuracy", "best_step", "options"}


@dataclass
class Standing:
    """How far a run is, as one worker knows it.

    Attributes:
        directory: The run directory.
        epoch: The epoch that comes next, or is under way.
        epoch_step: Steps of it that are done.
        best: Best test accuracy, and the step after which it was measured.
        resumed_from: Step that the run last went on from; None for a new one.
        step: With parameter servers, steps that these have done.
        own_steps: With parameter servers, batches that this worker has computed.
    """

    directory: Path = field(default_factory=Path)
    epoch: int = 0
    epoch_step: int = 0
    best: tuple[float, int] | None = None
    resumed_from: int | None = None
    step: int = 0
    own_steps: int = 0

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.directory / "checkpoints"

    def to_extra(self, config: TrainConfig) -> dict[str, Any]:
        """What a checkpoint of a run holds besides the trainer's own state.

        Args:
            config: Options of the run.
        """
        return {
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "best_accuracy": self.best[0] if self.best else None,
            "best_step": self.best[1] if self.best else None,
            "options": {option: getattr(config, option) for option in POSITION_OPTIONS},
        }

    def go_on_from(self, extra: Mapping[str, Any], config: TrainConfig, checkpoint: Path) -> None:
        """Take over what `to_extra` of a checkpoint says.

        Args:
            extra: What the checkpoint holds besides the trainer's state.
            config: Options of the run that goes on.
            checkpoint: Its directory.

        Raises:
            CheckpointError: It does not say where it was made.
            UsageError: An option that decides on samples was another one.
        """
        if not extra.keys() >= _POSITION_KEYS:
            raise CheckpointError(
                f"the checkpoint {checkpoint} does not say where in the data it was made",
                "Only a checkpoint of `hybridpar train` does; one that a script saved with Trainer.save does not.",
                "Go on from it in the script, with Trainer.load.",
            )
        for option in POSITION_OPTIONS:
            saved, now = extra["options"].get(option), getattr(config, option)
            if saved != now:
                name = "--" + option.replace("_", "-")
                raise UsageError(
                    f"the checkpoint was made with {name} {saved}, this run has {now}",
                    "A resumed run goes on at the same place in the same order of samples.",
                    f"Resume with {name} {saved}; for another start, load the checkpoint's model.pt in a script.",
                )
        self.epoch, self.epoch_step = int(extra["epoch"]), int(extra["epoch_step"])
        self.best = (extra["best_accuracy"], extra["best_step"]) if extra["best_step"] is not None else None
