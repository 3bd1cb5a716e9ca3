"""Options of recipes: settings that together train with less communication, and the rules that they must keep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hybridpar.errors import UsageError

#: Part of the run that is trained in full precision before it is compressed: 24 of 309 hours of speech in the paper.
WARM_PART = 0.08

#: Learning rate where `--lr` is not given. AdaGrad and late gradients need a lower rate: at that of plain SGD, late
#: ones cost ResNet-18 on digits ten points of accuracy (trainings.csv).
RATE = 1e-2


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """Recipes that train with less communication."""

    recipe: Literal["none", "onebit-sgd"] = "none"
    """`onebit-sgd`: 1-bit SGD, AdaGrad, momentum at owners of stripes."""
    double_buffer: Literal["off", "delay", "half"] = "off"
    """Send gradients while the next ones are computed, and apply them late: by a step (`delay`), or by half a batch
    (`half`)."""
    warm_start_steps: int | None = None
    """First steps in full precision with a recipe, and with all gradients exchanged with --sync outer:H. Default: 8 %
    of the run with a recipe; 0 with outer:H and local:H."""


def warm_steps(config: RecipeConfig, total: int | None) -> int:
    """Number of first steps in full precision."""
    if config.warm_start_steps is not None:
        return config.warm_start_steps
    if config.recipe == "none":
        return 0
    if total is None:
        raise UsageError(
            f"the recipe {config.recipe} without a number of first steps",
            f"It spends {WARM_PART:.0%} of the run in full precision, and how long the run is is not known.",
            "Give total_steps to the Trainer, or set warm_start_steps (--warm-start-steps).",
        )
    return math.ceil(WARM_PART * total)


def refuse(one: str, other: str, why: str) -> UsageError:
    """The error for two options that contradict each other."""
    return UsageError(f"{one} with {other}", why, "Leave out one of them.")
