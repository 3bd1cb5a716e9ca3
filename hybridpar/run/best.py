"""The options --keep-best and --stop-early: which epochs are the best by a figure, and for how long none was better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError, nearest
from hybridpar.observe.records import EpochRecord
from hybridpar.train.checkpoint_files import list_checkpoints, step_of

#: Figures of an epoch that can be followed; True where the larger is the better.
METRICS = {
    "test_accuracy": True,
    "test_loss": False,
    "train_loss": False,
    "ema_test_accuracy": True,
    "ema_test_loss": False,
}


@dataclass(frozen=True)
class MetricRule:
    """A figure of an epoch, and a number.

    Attributes:
        metric: Name of the figure, as `metrics.jsonl` has it.
        count: How many of the best epochs, or how many epochs without a better one.
    """

    metric: str
    count: int

    @classmethod
    def parse(cls, option: str, text: str, *, average: bool) -> MetricRule:
        """Read `N` or `METRIC:N`."""
        metric, colon, number = text.strip().rpartition(":")
        metric = metric.strip() if colon else "test_accuracy"
        if metric not in METRICS:
            raise UsageError(f"{option} {text}: there is no figure {metric!r}", nearest(metric, METRICS))
        if not number.strip().isdigit() or int(number) < 1:
            raise UsageError(
                f"{option} is {text!r}",
                "It must be a number from 1 on, or a figure and such a number.",
                f"Write {option} 3, or {option} test_loss:3.",
            )
        if metric.startswith("ema_") and not average:
            raise UsageError(
                f"{option} {text} without --model-ema",
                "There is no moving average to test.",
                "Add for instance --model-ema 0.9998.",
            )
        return cls(metric, int(number))

    def ranked(self, tested: Sequence[EpochRecord]) -> list[EpochRecord]:
        """Epochs from the best to the worst, of equal ones the earlier first; those without the figure are left out."""
        sign = -1.0 if METRICS[self.metric] else 1.0
        known = [record for record in tested if (value := self.value(record)) is not None and math.isfinite(value)]
        return sorted(known, key=lambda record: sign * float(self.value(record) or 0.0))  # a stable sort

    def best(self, tested: Sequence[EpochRecord]) -> list[EpochRecord]:
        """The `count` best epochs."""
        return self.ranked(tested)[: self.count]

    def over(self, tested: Sequence[EpochRecord]) -> str | None:
        """Why training should end, where the last `count` epochs were no better than one before; else None."""
        ranked = self.ranked(tested)
        if not ranked or len(tested) - 1 - tested.index(ranked[0]) < self.count:
            return None
        since = len(tested) - 1 - tested.index(ranked[0])
        epochs = f"the {since:,} epochs" if since > 1 else "the epoch"
        best = f"{self.value(ranked[0]):.4f} of epoch {ranked[0].epoch + 1}"
        return f"stopped early: no better {self.metric} than {best} in {epochs} since"

    def value(self, record: EpochRecord) -> float | None:
        """The figure of an epoch."""
        value: float | None = getattr(record, self.metric)
        return value


def best_checkpoint(run: Path, tested: Sequence[EpochRecord], rule: MetricRule) -> tuple[EpochRecord, Path] | None:
    """The best epoch of a run of which there is a checkpoint; with parameter servers that may come some steps later."""
    checkpoints, ends = list_checkpoints(run / "checkpoints"), [record.step for record in tested]
    for record in rule.ranked(tested):
        next_end = min((step for step in ends if step > record.step), default=math.inf)
        for path in checkpoints:
            if record.step <= step_of(path) < next_end:
                return record, path
    return None


def keep_rule(config: TrainConfig) -> MetricRule:
    """Which checkpoints are kept for being the best: `--keep-best`."""
    return MetricRule.parse("--keep-best", config.keep_best, average=config.model_ema is not None)


def stop_rule(config: TrainConfig) -> MetricRule | None:
    """When the run ends before its time: `--stop-early`."""
    if config.stop_early is None:
        return None
    return MetricRule.parse("--stop-early", config.stop_early, average=config.model_ema is not None)
