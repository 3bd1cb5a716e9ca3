"""Learning-rate schedules, and moving averages of the weights: what `--lr-schedule` and `--model-ema` stand for."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpar.spec import (
    AT_LEAST_0,
    AT_LEAST_1,
    AT_MOST_1,
    BELOW_1,
    BETWEEN_0_AND_1,
    POSITIVE,
    read_choice,
    read_fields,
)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`constant`: the peak rate after the warm-up; and what all schedules have.

    Attributes:
        warmup_lr: Learning rate of the first step; None: the first of equal steps from zero to the peak rate.
        update: Change the rate before every step, or between epochs only, as timm and torchvision do by default.
    """

    warmup_lr: Annotated[float | None, AT_LEAST_0] = None
    update: Literal["step", "epoch"] = "step"


@dataclass(frozen=True, kw_only=True)
class Falling(Schedule):
    """What schedules have by which the rate falls.

    Attributes:
        min: Learning rate that they fall to, and not below.
    """

    min: Annotated[float, AT_LEAST_0] = 0.0


@dataclass(frozen=True, kw_only=True)
class Counted(Falling):
    """What schedules have that are counted in steps or epochs.

    Attributes:
        warmup_prefix: Whether they begin after the warm-up; else they are counted from the first epoch, the warm-up in
            place of their beginning, as timm's default.
    """

    warmup_prefix: bool = True


@dataclass(frozen=True, kw_only=True)
class Cosine(Counted):
    """`cosine`: half a period of a cosine.

    Attributes:
        cooldown: Last epochs of the run, at the rate `min`.
    """

    cooldown: Annotated[float, AT_LEAST_0] = 0.0


@dataclass(frozen=True, kw_only=True)
class Poly(Cosine):
    """`poly`: a power of what is left of the run.

    Attributes:
        power: The exponent.
    """

    power: Annotated[float, POSITIVE] = 1.0


@dataclass(frozen=True, kw_only=True)
class StableThenDown(Falling):
    """`wsd`: constant, then down.

    Attributes:
        cooldown: As that of `cosine`.
        decay: Epochs of the way down; below 1 a fraction of the run. 0.2: Hägele et al. 2024, section 3.
    """

    cooldown: Annotated[float, AT_LEAST_0] = 0.0
    decay: Annotated[float, POSITIVE] = 0.2


@dataclass(frozen=True, kw_only=True)
class Exponential(Counted):
    """`exp`: exponential decay.

    Attributes:
        every: Epochs in which the rate falls once by `rate`.
        rate: What the rate is multiplied with.
    """

    every: Annotated[float, POSITIVE] = 1.0
    rate: Annotated[float, AT_MOST_1] = 0.1


@dataclass(frozen=True, kw_only=True)
class Steps(Counted):
    """`step`: equal falls.

    Attributes:
        every: Epochs from one fall of the rate to the next; None: as `fractions` says.
        fractions: Of the run, at which the rate falls without `every`.
        rate: What the rate is multiplied with.
    """

    every: Annotated[float | None, POSITIVE] = None
    fractions: Annotated[tuple[float, ...], BETWEEN_0_AND_1] = (0.5, 0.75)
    rate: Annotated[float, AT_MOST_1] = 0.1


@dataclass(frozen=True, kw_only=True)
class MultiStep(Counted):
    """`multistep`: falls after named epochs.

    Attributes:
        at: The epochs.
        rate: What the rate is multiplied with.
    """

    at: Annotated[tuple[float, ...], POSITIVE]
    rate: Annotated[float, AT_MOST_1] = 0.1


@dataclass(frozen=True, kw_only=True)
class OnPlateau(Falling):
    """`plateau`: falls where the test accuracy does not rise.

    Attributes:
        patience: Epochs without a better test accuracy after which the rate falls.
        rate: What the rate is multiplied with.
    """

    patience: Annotated[int, AT_LEAST_0] = 10
    rate: Annotated[float, AT_MOST_1] = 0.1


_SCHEDULES: dict[str, type[Schedule]] = {
    "cosine": Cosine,
    "step": Steps,
    "multistep": MultiStep,
    "poly": Poly,
    "exp": Exponential,
    "wsd": StableThenDown,
    "plateau": OnPlateau,
    "constant": Schedule,
}


@dataclass(frozen=True, kw_only=True)
class Average:
    """`0.9998`: an exponential moving average of parameters and buffers.

    Attributes:
        decay: Part of the average that a step keeps.
        warmup: Let the decay grow from 0.
        every: Steps from one update of the average to the next.
    """

    decay: Annotated[float, BELOW_1]
    warmup: bool = False
    every: Annotated[int, AT_LEAST_1] = 1


@functools.cache
def read_schedule(text: str) -> Schedule:
    """The schedule that a value of `--lr-schedule` stands for.

    Args:
        text: Such as `cosine` or `step:every=30`.

    Raises:
        UsageError: It stands for nothing.
    """
    return read_choice("--lr-schedule", text, _SCHEDULES)


@functools.cache
def read_average(text: str) -> Average:
    """The average that a value of `--model-ema` stands for."""
    return read_fields(f"--model-ema {text}", str(text), Average)
