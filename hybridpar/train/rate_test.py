"""The learning-rate range test: some steps at growing learning rates, after which everything is as it was before.

Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3, with rates that grow exponentially, a
smoothed loss, and an end where that diverges, as in fastai's learning-rate finder.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybridpar.config import OptimizerConfig
from hybridpar.errors import TrainingError, UsageError
from hybridpar.optim.schedule import Pace
from hybridpar.train.trainer import MicroBatches, Trainer

#: The test ends where the smoothed loss is this many times the lowest one.
DIVERGED = 4.0

#: Part that the mean of the losses before keeps in each step; corrected for its start as in Adam.
SMOOTHING = 0.9

#: Part of the rate with the lowest smoothed loss that is suggested.
BELOW_LOWEST = 0.1

#: Fewest steps of a test.
FEWEST_STEPS = 10


@dataclass(frozen=True)
class RateTest:
    """What a range test found.

    Attributes:
        rates: Learning rate of each step.
        losses: Loss of each step.
        smoothed: The running mean of the losses after each step.
        diverged: Whether the test ended because the loss grew.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    diverged: bool

    @property
    def lowest(self) -> int | None:
        """The step with the lowest smoothed loss; None where it never fell."""
        known = [number for number, loss in enumerate(self.smoothed) if math.isfinite(loss)]
        best = min(known, key=lambda number: self.smoothed[number], default=0)
        return best or None

    @property
    def suggestion(self) -> float | None:
        """A tenth of the rate at which the smoothed loss was lowest; None where it never fell."""
        return None if self.lowest is None else BELOW_LOWEST * self.rates[self.lowest]

    def table(self, rows: int = 20, width: int = 40) -> list[str]:
        """Rates and smoothed losses as lines of text, with a bar for each loss.

        Args:
            rows: Number of lines at most, besides the head.
            width: Characters of the longest bar.

        Returns:
            The lines.
        """
        count = len(self.rates)
        chosen = {round(place * (count - 1) / max(1, rows - 2)) for place in range(rows - 1)}
        finite = [loss for loss in self.smoothed if math.isfinite(loss)]
        low, high = min(finite, default=0.0), min(max(finite, default=1.0), 2 * max(self.smoothed[0], 1e-12))
        lines = [f"{'rate':>9}  {'loss':>8}"]
        for number in sorted(chosen | ({self.lowest} if self.lowest is not None else set())):
            loss = self.smoothed[number]
            part = (loss - low) / (high - low) if high > low and math.isfinite(loss) else 1.0
            bar = "#" * max(1, round(width * min(1.0, part)))
            lines.append(f"{self.rates[number]:9.2e}  {loss:8.4f}  {bar}" + "  lowest" * (number == self.lowest))
        return lines


@dataclass
class _Sweep(Pace):
    """Has every step take a given learning rate.

    Attributes:
        part: The rate as a part of the peak rate.
    """

    part: float = field(default=0.0)

    def factor(self, step: int, config: OptimizerConfig) -> float:
        return self.part

    def first_steps(self, step: int) -> float:
        return step


def check_range(lowest: float, highest: float, steps: int) -> None:
    """Refuse what is no range of learning rates.

    Args:
        lowest: Learning rate of the first step.
        highest: That of the last.
        steps: Number of steps.

    Raises:
        UsageError: The rates do not grow, or there are too few steps.
    """
    if not 0 < lowest < highest < math.inf:
        raise UsageError(f"learning rates from {lowest:g} to {highest:g}", "They must be above 0, and grow.")
    if steps < FEWEST_STEPS:
        raise UsageError(f"a range test of {steps} steps", f"It needs {FEWEST_STEPS} or more.")


def range_test(
    trainer: Trainer,
    batches: Callable[[int], Iterable[tuple[Tensor, Tensor] | MicroBatches]],
    *,
    lowest: float = 1e-6,
    highest: float = 10.0,
    steps: int = 100,
    on_step: Callable[[int, float], Any] | None = None,
) -> RateTest:
    """Train some steps at growing learning rates, and put everything back; a collective of all workers.

    Args:
        trainer: What trains; a model that is not cut into stages. Weights, optimizer, codecs and random numbers are
            afterwards as before.
        batches: Called with the number of an epoch, returns this worker's batches of it.
        lowest: Learning rate of the first step.
        highest: That of the last.
        steps: Number of steps.
        on_step: Called after every step with its number, from 1, and the smoothed loss.

    Returns:
        What was found.

    Raises:
        UsageError: The rates do not grow, there are too few steps, no batch, or stages.
    """
    check_range(lowest, highest, steps)
    if trainer.plan.is_staged:
        raise UsageError(
            "a range test of a pipeline", "Its state cannot be put back.", "Test the model without stages."
        )
    pace, sweep = trainer.pace, _Sweep(1)
    rates, losses, smoothed, mean, diverged = list[float](), list[float](), list[float](), 0.0, False
    try:
        trainer.pace = sweep
        with trainer.on_trial():
            for number, batch in enumerate(itertools.islice(_endless(batches), steps)):
                rate = lowest * (highest / lowest) ** (number / (steps - 1))
                sweep.part = rate / trainer.peak_rate
                try:
                    loss = trainer.step(batch).loss
                except TrainingError:  # gradients were not finite in several steps
                    diverged = True
                    break
                mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
                rates.append(rate)
                losses.append(loss)
                smoothed.append(mean / (1 - SMOOTHING ** (number + 1)))
                if on_step is not None:
                    on_step(number + 1, smoothed[-1])
                diverged = not math.isfinite(loss) or smoothed[-1] > DIVERGED * min(smoothed)
                if diverged:
                    break
    finally:
        trainer.pace = pace
    return RateTest(tuple(rates), tuple(losses), tuple(smoothed), diverged)


def _endless(
    batches: Callable[[int], Iterable[tuple[Tensor, Tensor] | MicroBatches]],
) -> Iterable[tuple[Tensor, Tensor] | MicroBatches]:
    for epoch in itertools.count():
        before = True
        for batch in batches(epoch):
            before = False
            yield batch
        if before:
            raise UsageError("a range test without a batch", "There must be something to train on.")
