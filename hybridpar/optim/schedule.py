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
from typing import Any

import torch

from hybridpar.config import OptimizerConfig

#: Part of the stable and the last phase of `wsd` that the way down takes (Hägele et al. 2024, section 3).
_WAY_DOWN = 0.2


def rate_factor(step: float, total: int, steps_per_epoch: int, config: OptimizerConfig) -> float:
    """Learning rate of a step as a fraction of the peak rate, `config.lr`.

    A linear warm-up over `warmup_epochs` (at most half of the run), then what `lr_schedule` says. With `t` counted from
    the end of the warm-up (from the start of the run without `warmup_prefix`), `T` the length from there to the
    cool-down, `low` the rate `min_lr` and `high` the peak:

    - `cosine`: low + (high - low) (1 + cos(pi t / T)) / 2 (Loshchilov and Hutter 2017, equation 5);
    - `poly`: low + (high - low) (1 - t / T)^lr_power;
    - `wsd`: high, then at the end low + (high - low) (1 - sqrt(progress)) (Hägele et al. 2024, equation 1);
    - `step`: high decay_rate^floor(t / decay_epochs), or a fall at each fraction of the run in `step_epochs`;
    - `multistep`: high decay_rate^(milestones that have passed), as torch's MultiStepLR;
    - `exp`: high decay_rate^(t / decay_epochs);
    - `plateau` and `constant`: high.

    Args:
        step: Number of the step, from 0; between two steps where batches have changed their size.
        total: Steps in the whole run.
        steps_per_epoch: Steps in an epoch.
        config: The schedule.
    """
    epoch: float = steps_per_epoch  # in units of what the rate changes with
    if config.lr_update == "epoch":
        step, total, epoch = math.floor(step / steps_per_epoch), math.ceil(total / steps_per_epoch), 1.0
    warmup = warmup_length(total, epoch, config)
    if step < warmup:
        if config.warmup_lr is None:
            return (step + 1) / warmup
        start = config.warmup_lr / config.lr
        return start + step * (1.0 - start) / warmup
    low = config.min_lr / config.lr
    since = step - warmup if config.warmup_prefix else step
    if config.lr_schedule in ("cosine", "poly", "wsd"):
        end = total - round(config.cooldown_epochs * epoch)
        if config.lr_schedule == "wsd":
            return low + (1.0 - low) * _stable_then_down(step - warmup, end - warmup, epoch, config.decay_epochs)
        progress = min(1.0, since / max(1, end - (warmup if config.warmup_prefix else 0)))
        if config.lr_schedule == "poly":
            return low + (1.0 - low) * math.pow(1.0 - progress, config.lr_power)
        return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return max(low, math.pow(config.decay_rate, _falls(step, since, total, epoch, config)))


def warmup_length(total: int, epoch: float, config: OptimizerConfig) -> int:
    """Length of the warm-up: at most half of the run.

    Args:
        total: Length of the run, in steps or epochs.
        epoch: Length of an epoch, likewise.
        config: The schedule.
    """
    return min(round(config.warmup_epochs * epoch), total // 2)


def _stable_then_down(since: float, length: float, epoch: float, decay_epochs: float | None) -> float:
    decay = _WAY_DOWN if decay_epochs is None else decay_epochs
    down = round(decay * length if decay < 1 else decay * epoch)
    progress = (since - (length - down)) / max(1, down)
    return 1.0 - math.sqrt(min(1.0, max(0.0, progress)))


def _falls(step: float, since: float, total: int, epoch: float, config: OptimizerConfig) -> float:
    """How often the rate has been multiplied with `decay_rate`."""
    if config.lr_schedule == "exp":
        return since / ((config.decay_epochs or 1.0) * epoch)
    if config.lr_schedule == "multistep":
        return sum(since >= milestone * epoch for milestone in config.milestones)
    if config.lr_schedule == "step":
        if config.decay_epochs is not None:
            return since // (config.decay_epochs * epoch)
        return sum(step >= fraction * total for fraction in config.step_epochs)
    return 0


class Plateau:
    """Lowers the learning rate when a metric has stopped rising: torch's ReduceLROnPlateau without an optimizer.

    Args:
        config: `decay_rate`, `patience_epochs`, `min_lr` and `lr`.

    Attributes:
        factor: The learning rate as a fraction of the peak rate.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._peak = config.lr
        self._holder = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.lr)
        self._scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self._holder,
            mode="max",
            factor=config.decay_rate,
            patience=config.patience_epochs,
            min_lr=config.min_lr,
        )

    @property
    def factor(self) -> float:
        """The learning rate as a fraction of the peak rate."""
        return float(self._holder.param_groups[0]["lr"]) / self._peak

    def step(self, metric: float) -> None:
        """Take a result into account; the larger, the better.

        Args:
            metric: Such as the accuracy after an epoch.
        """
        self._scheduler.step(metric)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, in plain values."""
        kept = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
        return {"lr": self._holder.param_groups[0]["lr"], **{key: getattr(self._scheduler, key) for key in kept}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Args:
            state: It.
        """
        self._holder.param_groups[0]["lr"] = float(state["lr"])
        for key in state.keys() - {"lr"}:
            setattr(self._scheduler, key, state[key])


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
