"""How far a run is, as its checkpoints say it: the position in the data, and the results of epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from hybridpar.config import TrainConfig
from hybridpar.config.data import samples_of
from hybridpar.errors import CheckpointError, UsageError
from hybridpar.observe.records import EpochRecord
from hybridpar.run.timings import RunningMean

#: Keys of `RunState.to_extra`.
_POSITION_KEYS = {"epoch", "epoch_step", "losses", "tested", "options"}


@dataclass
class RunState:
    """How far a run is, as one worker knows it.

    Attributes:
        epoch: The epoch that comes next, or is under way.
        epoch_step: Steps of it that are done.
        losses: The mean loss of these.
        tested: The ends of epochs.
        resumed_from: Step that the run last went on from; None for a new one.
    """

    epoch: int = 0
    epoch_step: int = 0
    losses: RunningMean = field(default_factory=RunningMean)
    tested: list[EpochRecord] = field(default_factory=list)
    resumed_from: int | None = None

    def to_extra(self, config: TrainConfig) -> dict[str, Any]:
        """What a checkpoint of a run holds besides the trainer's own state."""
        return {
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "losses": astuple(self.losses),
            "tested": plain_tests(self.tested),
            "options": _decisive(config),
        }

    def go_on_from(self, extra: Mapping[str, Any], config: TrainConfig, checkpoint: Path) -> None:
        """Take over what `to_extra` of a checkpoint says."""
        if not extra.keys() >= _POSITION_KEYS:
            raise CheckpointError(
                f"the checkpoint {checkpoint} does not say where in the data it was made",
                "Only a checkpoint of `hybridpar train` does; one that a script saved with Trainer.save does not.",
                "Go on from it in the script, with Trainer.load.",
            )
        for option, now in _decisive(config).items():
            saved = extra["options"].get(option)
            if saved != now:
                name = "--" + option.replace("_", "-")
                raise UsageError(
                    f"the checkpoint was made with {name} {saved}, this run has {now}",
                    "A resumed run goes on at the same place in the same order of samples.",
                    f"Resume with {name} {saved}; for another start, name the checkpoint with --weights.",
                )
        self.epoch, self.epoch_step = int(extra["epoch"]), int(extra["epoch_step"])
        self.losses, self.tested = RunningMean(*extra["losses"]), read_tests(extra["tested"])


def _decisive(config: TrainConfig) -> dict[str, Any]:
    """What decides which samples a step sees; a resumed run must not change it."""
    return {
        "data": samples_of(config.data),
        "batch_size": config.batch_size,
        "seed": config.seed,
        "image_size": config.images.size,
    }


def plain_tests(tested: Iterable[EpochRecord]) -> list[list[float | None]]:
    """The ends of epochs as plain values, a row for each; numbers that are not finite are None."""
    return [[None if value is None or not math.isfinite(value) else value for value in astuple(end)] for end in tested]


def read_tests(rows: Iterable[Iterable[Any]]) -> list[EpochRecord]:
    """What `plain_tests` returned."""
    tested = []
    for epoch, step, accuracy, loss, train_loss, *rest in rows:
        tested.append(EpochRecord(epoch, step, accuracy, loss, math.nan if train_loss is None else train_loss, *rest))
    return tested
