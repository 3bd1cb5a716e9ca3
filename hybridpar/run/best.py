"""Which epochs are the best, and for how long none was better: `best`, `by` and `stop` of `--checkpoints`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from hybridpar.config.train import Checkpoints
from hybridpar.observe.records import EpochRecord
from hybridpar.train.checkpoint_files import list_checkpoints, step_of


def ranked(rule: Checkpoints, tested: Sequence[EpochRecord]) -> list[EpochRecord]:
    """Epochs from the best to the worst, of equal ones the earlier first; those without the figure are left out."""
    sign = -1.0 if rule.by.endswith("accuracy") else 1.0
    known = [end for end in tested if (value := figure(rule, end)) is not None and math.isfinite(value)]
    return sorted(known, key=lambda end: sign * float(figure(rule, end) or 0.0))  # a stable sort


def best_epochs(rule: Checkpoints, tested: Sequence[EpochRecord]) -> list[EpochRecord]:
    """The epochs whose checkpoints stay for being the best."""
    return ranked(rule, tested)[: rule.best]


def best_checkpoint(run: Path, tested: Sequence[EpochRecord], rule: Checkpoints) -> tuple[EpochRecord, Path] | None:
    """The best epoch of a run of which there is a checkpoint."""
    checkpoints = list_checkpoints(run / "checkpoints")
    for end in ranked(rule, tested):
        if (path := checkpoint_of(end, tested, checkpoints)) is not None:
            return end, path
    return None


def checkpoints_of_best(rule: Checkpoints, tested: Sequence[EpochRecord], checkpoints: Sequence[Path]) -> list[Path]:
    """Those of the checkpoints that stay for being of the best epochs."""
    paths = (checkpoint_of(end, tested, checkpoints) for end in best_epochs(rule, tested))
    return [path for path in paths if path is not None]


def checkpoint_of(end: EpochRecord, tested: Sequence[EpochRecord], checkpoints: Sequence[Path]) -> Path | None:
    """The checkpoint of an epoch's end; with parameter servers it may come some steps after the test."""
    next_step = min((other.step for other in tested if other.step > end.step), default=math.inf)
    return next((path for path in checkpoints if end.step <= step_of(path) < next_step), None)


def why_over(rule: Checkpoints, tested: Sequence[EpochRecord]) -> str | None:
    """Why training should end, where the last epochs were no better than one before; else None."""
    known = [end for end in tested if figure(rule, end) is not None]
    best = next(iter(ranked(rule, known)), None)
    if rule.stop is None or best is None or (since := len(known) - 1 - known.index(best)) < rule.stop:
        return None
    epochs = f"the {since:,} epochs" if since > 1 else "the epoch"
    return (
        f"stopped early: no better {rule.by} than {figure(rule, best):.4f} of epoch {best.epoch + 1} in {epochs} since"
    )


def figure(rule: Checkpoints, end: EpochRecord) -> float | None:
    """The figure of an epoch that a rule follows."""
    value: float | None = getattr(end, rule.by)
    return value
