"""Why: a run goes on at the place in the data where its checkpoint was made, so both must mean the same samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridpar.config import TrainConfig
from hybridpar.errors import CheckpointError, UsageError

#: Options that decide which samples a step sees; a resumed run must not change them.
POSITION_OPTIONS = ("data", "batch_size", "seed", "image_size", "synthetic_samples")

#: What a checkpoint of a run holds besides the trainer's own state.
_POSITION_KEYS = {"epoch", "epoch_step", "best_accuracy", "best_step", "options"}


def check_position(extra: Mapping[str, Any], config: TrainConfig, checkpoint: Path) -> None:
    """Refuse to go on from a checkpoint of which the place in the data is not known, or is another one here.

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
