"""Why: a recipe is many knobs at once, and a knob that says otherwise must be met before anything starts.

What a recipe sets is plain data, decided from the options and the length of the run alone, so all workers decide alike
without a word. Options that contradict each other are one error that names both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hybridpar.errors import UsageError

#: What each recipe spends in full precision before it compresses, as a part of the run. 1-bit SGD: 24 of 309 hours of
#: speech, 7.8 %; 1-bit Adam: 15 to 25 % of the steps.
WARM_PARTS = {"onebit-sgd": 0.08, "onebit-adam": 0.2}

#: Learning rates where `--lr` is left alone. 1-bit Adam: that of Adam. 1-bit SGD: AdaGrad and gradients that come late
#: bear less than plain SGD does; late ones cost ResNet-18 on digits ten points at its rate (trainings.csv).
RATES = {"onebit-sgd": 1e-2, "onebit-adam": 1e-3}

#: Forms of double buffering in which gradients are applied late.
LATE = ("half", "delay", "auto")


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """Ways to train with less communication, as a whole."""

    recipe: Literal["none", "onebit-sgd", "onebit-adam"] = "none"
    """`onebit-sgd`: 1-bit gradients, AdaGrad and momentum at the owners of stripes, double buffering where it gains;
    `onebit-adam`: Adam, then 1-bit momentum with the variance as it was."""
    double_buffer: Literal["off", "delay", "half", "auto"] | None = None
    """Apply gradients late, so that they travel while the next ones are computed: by a whole step (`delay`), by half a
    batch (`half`), or by a step where that is predicted to gain (`auto`). Default: off; auto with --recipe onebit-sgd.
    """
    warm_start_steps: int | None = None
    """First steps that a recipe takes in full precision, and --sync local:H with all gradients exchanged. Default: a
    part of the run with a recipe, 8 % or 20 %; none with local:H."""
    lr_per_sample: float | None = None
    """Learning rate per sample, in place of --lr, which is this times --batch-size."""
    select_batch: int = 0
    """Every so many epochs, train on a small part of the data at several batch sizes, and go on with the largest that
    learns as well; 0: never."""


def warm_steps(config: RecipeConfig, total: int | None) -> int:
    """First steps in full precision.

    Args:
        config: The options.
        total: Steps of the run; None where nobody knows.

    Raises:
        UsageError: It depends on the length of the run, which is not known.
    """
    least = 1 if config.recipe == "onebit-adam" else 0  # without a step there is no variance to go on with
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
    """The error of two options that contradict each other."""
    return UsageError(f"{one} with {other}", why, "Leave out one of them.")
