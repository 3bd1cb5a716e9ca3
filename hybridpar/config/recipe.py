"""Options of recipes: settings that together train with less communication, and the rules that they must keep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hybridpar.errors import UsageError

#: Part of the run that each recipe trains in full precision before it compresses. 1-bit SGD: 24 of 309 hours of
#: speech, 7.8 %; 1-bit Adam: 15 to 25 % of the steps.
WARM_PARTS = {"onebit-sgd": 0.08, "onebit-adam": 0.2}

#: Learning rates where `--lr` has its default. 1-bit Adam: that of Adam. 1-bit SGD: AdaGrad and late gradients need
#: a lower rate: at that of plain SGD, late ones cost ResNet-18 on digits ten points of accuracy (trainings.csv).
RATES = {"onebit-sgd": 1e-2, "onebit-adam": 1e-3}


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """Recipes that train with less communication."""

    recipe: Literal["none", "onebit-sgd", "onebit-adam"] = "none"
    """`onebit-sgd`: 1-bit gradients, AdaGrad and momentum at the owners of stripes;
    `onebit-adam`: Adam, then 1-bit momentum with a fixed variance."""
    double_buffer: Literal["off", "delay", "half"] = "off"
    """Send gradients while the next ones are computed, and apply them late: by a step (`delay`), or by half a batch
    (`half`)."""
    warm_start_steps: int | None = None
    """First steps in full precision with a recipe, and with all gradients exchanged with --sync outer:H. Default: 8 %
    (onebit-sgd) or 20 % (onebit-adam) of the run; 0 with outer:H and local:H."""


def warm_steps(config: RecipeConfig, total: int | None) -> int:
    """Number of first steps in full precision.

    Args:
        config: Options.
        total: Steps of the run; None if not known.

    Returns:
        The number of steps; 0 without a recipe, unless the options say otherwise.

    Raises:
        UsageError: It depends on the length of the run, which is not known.
    """
    least = 1 if config.recipe == "onebit-adam" else 0  # the variance comes from these steps
    if config.warm_start_steps is not None:
        return max(least, config.warm_start_steps)
    part = WARM_PARTS.get(config.recipe)
    if part is None:
        return 0
    if total is None:
        raise UsageError(
            f"the recipe {config.recipe} without a number of first steps",
            f"It spends {part:.0%} of the run in full precision, and how long the run is is not known.",
            "Give total_steps to the Trainer, or set warm_start_steps (--warm-start-steps).",
        )
    return max(least, math.ceil(part * total))


def refuse(one: str, other: str, why: str) -> UsageError:
    """The error for two options that contradict each other.

    Args:
        one: An option with its value.
        other: The other one.
        why: The rule that forbids the pair.

    Returns:
        The error, for the caller to raise.
    """
    return UsageError(f"{one} with {other}", why, "Leave out one of them.")
