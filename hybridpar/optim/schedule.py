"""Learning-rate schedules: the rate as a function of the step's number.

The rate is computed from the step number alone and never stored, so a resumed run cannot drift from it. The one
exception is `Plateau`, which follows a test metric and has a state.

Also adapts the learning rate where the batch size changes during a run.

A run is made of legs, each of which has one batch size from a step on. What a step means is counted in steps of the
first batch size: the schedule is the same function of the samples whatever the sizes, and the rate of a step is
proportional to its samples. Nothing but the legs is stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hybridpar.config import OptimizerConfig
from hybridpar.config.optimizer import Falling, Moment, OnPlateau


def rate_factor(step: float, total: int, steps_per_epoch: int, config: OptimizerConfig) -> float:
    """Learning rate of a step as a fraction of the peak rate, `config.peak_lr`.

    A linear warm-up (at most half of the run), then what `lr_schedule` says: `factor` of its class.
    """
    schedule = config.rate_schedule
    epoch: float = steps_per_epoch  # in units of what the rate changes with
    if schedule.update == "epoch":
        step, total, epoch = math.floor(step / steps_per_epoch), math.ceil(total / steps_per_epoch), 1.0
    warmup = warmup_length(total, epoch, config)
    if step >= warmup:
        low = schedule.min / config.peak_lr if isinstance(schedule, Falling) else 0.0
        return schedule.factor(Moment(step, total, epoch, warmup, low))
    if schedule.warmup_lr is None:
        return (step + 1) / warmup
    start = schedule.warmup_lr / config.peak_lr
    return start + step * (1.0 - start) / warmup


def warmup_length(total: int, epoch: float, config: OptimizerConfig) -> int:
    """Length of the warm-up: at most half of the run."""
    return min(round(config.rate_schedule.warmup * epoch), total // 2)


class Plateau:
    """Lowers the learning rate when a metric has stopped rising: torch's ReduceLROnPlateau without an optimizer."""

    def __init__(self, peak: float, schedule: OnPlateau) -> None:
        self._peak = peak
        self._holder = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
        self._scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self._holder, mode="max", factor=schedule.rate, patience=schedule.patience, min_lr=schedule.min
        )

    @property
    def factor(self) -> float:
        """The learning rate as a fraction of the peak rate."""
        return float(self._holder.param_groups[0]["lr"]) / self._peak

    def step(self, metric: float) -> None:
        """Take a result into account; the larger, the better."""
        self._scheduler.step(metric)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, in plain values."""
        keys = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
        return {"lr": self._holder.param_groups[0]["lr"], **{key: getattr(self._scheduler, key) for key in keys}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._holder.param_groups[0]["lr"] = float(state["lr"])
        for key in state.keys() - {"lr"}:
            setattr(self._scheduler, key, state[key])


class Leg(NamedTuple):
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
        """The leg of a step, from 0."""
        return next(leg for leg in reversed(self.legs) if leg.step <= step)

    def first_steps(self, step: int) -> float:
        """Steps of the first batch size after which as many epochs have passed as after these steps."""
        leg = self.leg_of(step)
        return (leg.epoch + (step - leg.step) / leg.steps_per_epoch) * self.legs[0].steps_per_epoch

    def total_steps(self) -> int:
        """Steps of the whole run, if the batch size stays as it is."""
        leg = self.legs[-1]
        return leg.step + (self.epochs - leg.epoch) * leg.steps_per_epoch

    def factor(self, step: int, config: OptimizerConfig) -> float:
        """Learning rate of a step as a fraction of the peak rate, which is that of the first batch size."""
        first = self.legs[0]
        total = self.epochs * first.steps_per_epoch
        samples = self.leg_of(step).batch_size / first.batch_size
        return samples * rate_factor(self.first_steps(step), total, first.steps_per_epoch, config)

    def begin(self, leg: Leg) -> None:
        """Go on with another batch size; a leg that begins where the last one began takes its place."""
        while self.legs and self.legs[-1].step >= leg.step:
            self.legs.pop()
        self.legs.append(leg)

    def plain(self) -> list[list[int]]:
        """The legs as plain values, for a checkpoint."""
        return [[*leg] for leg in self.legs]

    @classmethod
    def of(cls, epochs: int, plain: Sequence[Sequence[int]]) -> Pace:
        """What `plain` said."""
        return cls(epochs, [Leg(*row) for row in plain])
