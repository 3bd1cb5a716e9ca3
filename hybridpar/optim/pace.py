"""Adapts the learning rate where the batch size changes during a run.

A run is made of legs, each of which has one batch size from a step on. What a step means is counted in steps of the
first batch size: the schedule is the same function of the samples whatever the sizes, and the rate of a step is
proportional to its samples. Nothing but the legs is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridpar.config import OptimizerConfig
from hybridpar.optim.schedule import rate_factor


@dataclass(frozen=True)
class Leg:
    """A part of a run with one batch size.

    Attributes:
        step: Steps done when it begins.
        epoch: The epoch that it begins with.
        batch_size: Samples of a step over all workers.
        steps_per_epoch: Steps of each of its epochs.
    """

    step: int
    epoch: int
    batch_size: int
    steps_per_epoch: int


@dataclass
class Pace:
    """What a step's number means in a run of several batch sizes.

    Attributes:
        epochs: Epochs of the run.
        legs: In order; the first begins with step 0.
    """

    epochs: int
    legs: list[Leg] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        """Samples of a step now."""
        return self.legs[-1].batch_size

    @property
    def samples(self) -> float:
        """Samples of a step now, as a multiple of those of the first leg's."""
        return self.legs[-1].batch_size / self.legs[0].batch_size

    def leg_of(self, step: int) -> Leg:
        """The leg of a step, from 0.

        Args:
            step: The step.
        """
        return next(leg for leg in reversed(self.legs) if leg.step <= step)

    def first_steps(self, step: int) -> float:
        """Steps of the first batch size after which as many epochs have passed as after these steps.

        Args:
            step: Steps that are done.
        """
        leg = self.leg_of(step)
        return (leg.epoch + (step - leg.step) / leg.steps_per_epoch) * self.legs[0].steps_per_epoch

    def total_steps(self) -> int:
        """Steps of the whole run, if the batch size stays as it is."""
        leg = self.legs[-1]
        return leg.step + (self.epochs - leg.epoch) * leg.steps_per_epoch

    def factor(self, step: int, config: OptimizerConfig) -> float:
        """Learning rate of a step as a fraction of the peak rate, which is that of the first batch size.

        Args:
            step: Steps done before it.
            config: The schedule.
        """
        first = self.legs[0]
        total = self.epochs * first.steps_per_epoch
        samples = self.leg_of(step).batch_size / first.batch_size
        return samples * rate_factor(self.first_steps(step), total, first.steps_per_epoch, config)

    def begin(self, leg: Leg) -> None:
        """Go on with another batch size; a leg that begins where the last one began takes its place.

        Args:
            leg: What comes next.
        """
        while self.legs and self.legs[-1].step >= leg.step:
            self.legs.pop()
        self.legs.append(leg)

    def plain(self) -> list[list[int]]:
        """The legs as plain values, for a checkpoint."""
        return [[leg.step, leg.epoch, leg.batch_size, leg.steps_per_epoch] for leg in self.legs]

    @classmethod
    def of(cls, epochs: int, plain: Sequence[Sequence[int]]) -> Pace:
        """What `plain` said.

        Args:
            epochs: Epochs of the run.
            plain: What `plain` returned.
        """
        return cls(epochs, [Leg(*row) for row in plain])
