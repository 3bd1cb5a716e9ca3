"""How far a run is, as its checkpoints say it: the position in the data, and the results of epochs.

Which epochs are the best, and for how long none was better, follows from `best`, `by` and `stop` of `--checkpoints`.
Torch is not imported: commands that only read runs use this, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from hybridpar.config import TrainConfig
from hybridpar.config.data import samples_of
from hybridpar.config.train import Checkpoints
from hybridpar.errors import CheckpointError, check
from hybridpar.formats.checkpoint_files import step_of
from hybridpar.observe.records import EpochRecord


@dataclass
class RunningMean:
    """Mean of a value over samples; non-finite values are left out."""

    sum: float = 0.0
    weight: int = 0

    def add(self, value: float, weight: int) -> None:
        """Take a value for `weight` samples into account."""
        if math.isfinite(value):
            self.sum, self.weight = self.sum + value * weight, self.weight + weight

    @property
    def value(self) -> float:
        """The mean so far; NaN before the first finite value."""
        return self.sum / self.weight if self.weight else math.nan


@dataclass
class RunState:
    """How far a run is, as one worker knows it.

    Attributes:
        epoch: The epoch that comes next, or is under way.
        epoch_step: Steps of it that are done.
        losses: The mean loss of these.
        seconds: What these took before the run went on.
        began: When this process began with them; None before it has.
        tested: The ends of epochs.
        resumed_from: Step that the run last went on from; None for a new one.
    """

    epoch: int = 0
    epoch_step: int = 0
    losses: RunningMean = field(default_factory=RunningMean)
    seconds: float = 0.0
    began: float | None = None
    tested: list[EpochRecord] = field(default_factory=list)
    resumed_from: int | None = None

    @property
    def elapsed(self) -> float:
        """Seconds of the epoch that is under way."""
        return self.seconds + (0.0 if self.began is None else time.monotonic() - self.began)

    def end_epoch(self, end: EpochRecord) -> None:
        """Note the end of an epoch, or of the run within it; what follows is measured anew."""
        self.losses, self.seconds, self.began = RunningMean(), 0.0, None
        self.tested.append(end)

    def to_extra(self, config: TrainConfig) -> dict[str, Any]:
        """What a checkpoint of a run holds besides the trainer's own state."""
        return {
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "losses": astuple(self.losses),
            "seconds": self.elapsed,
            "tested": [astuple(end) for end in self.tested],
            "options": _decisive(config),
        }

    def go_on_from(self, extra: Mapping[str, Any], config: TrainConfig, checkpoint: Path) -> None:
        """Take over what `to_extra` of a checkpoint says."""
        if "epoch_step" not in extra:
            raise CheckpointError(
                f"the checkpoint {checkpoint} does not say where in the data it was made",
                "Only a checkpoint of `hybridpar train` does; one that a script saved with Trainer.save does not.",
                "Go on from it in the script, with Trainer.load.",
            )
        for option, now in _decisive(config).items():
            saved, name = extra["options"].get(option), "--" + option.replace("_", "-")
            check(
                saved == now,
                f"the checkpoint was made with {name} {saved}, this run has {now}",
                "A resumed run goes on at the same place in the same order of samples.",
                f"Resume with {name} {saved}; for another start, name the checkpoint with --weights.",
            )
        self.epoch, self.epoch_step, self.seconds = int(extra["epoch"]), int(extra["epoch_step"]), extra["seconds"]
        self.losses, self.tested = RunningMean(*extra["losses"]), [EpochRecord(*row) for row in extra["tested"]]


def _decisive(config: TrainConfig) -> dict[str, Any]:
    """What decides which samples a step sees; a resumed run must not change it."""
    options = {name: getattr(config, name) for name in ("batch_size", "seed")}
    return {"data": samples_of(config.data), "image_size": config.images.size, **options}


# ------------------------------------------------------------------------------------------------- the best epochs


def ranked(rule: Checkpoints, tested: Sequence[EpochRecord]) -> list[EpochRecord]:
    """Epochs from the best to the worst, of equal ones the earlier first; those without the figure are left out."""
    sign = -1.0 if rule.by.endswith("accuracy") else 1.0
    figures = [(getattr(end, rule.by), end) for end in tested]
    known = [(sign * value, end) for value, end in figures if value is not None and math.isfinite(value)]
    return [end for _, end in sorted(known, key=lambda pair: pair[0])]  # a stable sort


def best_epochs(rule: Checkpoints, tested: Sequence[EpochRecord]) -> list[EpochRecord]:
    """The epochs whose checkpoints stay for being the best."""
    return ranked(rule, tested)[: rule.best]


def best_checkpoints(
    rule: Checkpoints, tested: Sequence[EpochRecord], checkpoints: Sequence[Path]
) -> list[tuple[EpochRecord, Path]]:
    """The epochs of which there is a checkpoint, with that, from the best on."""
    pairs = []
    for end in ranked(rule, tested):
        # With parameter servers it may come some steps after the test.
        next_step = min((other.step for other in tested if other.step > end.step), default=math.inf)
        pairs += [(end, path) for path in checkpoints if end.step <= step_of(path) < next_step][:1]
    return pairs


def why_over(rule: Checkpoints, tested: Sequence[EpochRecord]) -> str | None:
    """Why training should end, where the last epochs were no better than one before; else None."""
    known = [end for end in tested if getattr(end, rule.by) is not None]
    best = next(iter(ranked(rule, known)), None)
    if rule.stop is None or best is None or (since := len(known) - 1 - known.index(best)) < rule.stop:
        return None
    epochs = f"the {since:,} epochs" if since > 1 else "the epoch"
    reached = f"{getattr(best, rule.by):.4f} of epoch {best.epoch + 1}"
    return f"stopped early: no better {rule.by} than {reached} in {epochs} since"
