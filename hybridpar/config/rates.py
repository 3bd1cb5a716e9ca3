"""Learning rates, their schedules, and moving averages: what `--lr`, `--lr-schedule` and `--model-ema` stand for."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpar.errors import UsageError, shortened
from hybridpar.spec import (
    AT_LEAST_0,
    AT_LEAST_1,
    AT_MOST_1,
    BELOW_1,
    BETWEEN_0_AND_1,
    FINITE,
    POSITIVE,
    read_choice,
    read_fields,
)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`constant`: the peak rate after the warm-up; and what all schedules have.

    Attributes:
        warmup: Epochs of linear warm-up, at most half of the run.
        warmup_lr: Learning rate of the first step; None: the first of equal steps from zero to the peak rate.
        update: Change the rate before every step, or between epochs only, as timm and torchvision do by default.
    """

    warmup: Annotated[float, AT_LEAST_0] = 1.0
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
class Ending(Counted):
    """What schedules have that end where the run does.

    Attributes:
        cooldown: Last epochs of the run, at the rate `min`.
    """

    cooldown: Annotated[float, AT_LEAST_0] = 0.0


@dataclass(frozen=True, kw_only=True)
class Cosine(Ending):
    """`cosine`: half a period of a cosine, or several with warm restarts.

    Attributes:
        cycle: Epochs of the first half period, after which the rate starts again at its peak; None: no restarts.
        grow: What the length of a cycle is multiplied with for the next one.
        decay: What the peak rate is multiplied with for the next cycle.
    """

    cycle: Annotated[float | None, POSITIVE] = None
    grow: Annotated[float, AT_LEAST_1] = 1.0
    decay: Annotated[float, AT_MOST_1] = 1.0


@dataclass(frozen=True, kw_only=True)
class Poly(Ending):
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


@dataclass(frozen=True)
class LearningRate:
    """`0.1`, or `0.1/256`: for so many samples per step, and in proportion for others (Goyal et al. 2017).

    Attributes:
        value: The rate.
        samples: Samples per step that it is for; None: for any number.
    """

    value: float
    samples: float | None = None


@functools.cache
def read_rate(text: str | float) -> LearningRate:
    """The peak learning rate that a value of `--lr` stands for."""
    try:
        numbers = [float(part) for part in str(text).split("/")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(FINITE.holds(number) for number in numbers):
        raise UsageError(
            f"--lr is {shortened(str(text))}",
            f"It must be {FINITE.text}, or such a rate and the samples per step that it is for.",
            "Write for instance --lr 0.1, or --lr 0.1/256.",
        )
    return LearningRate(*numbers)


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
