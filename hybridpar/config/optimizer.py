"""Options of a run: optimizer, learning-rate schedule, and length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridpar.config.rule import Rule


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning-rate schedule, and length of the run."""

    epochs: int = 10
    """Number of epochs."""
    steps: int | None = None
    """Stop after this many steps in all, whatever --epochs says."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer."""
    lr: float = 0.02
    """Peak learning rate."""
    lr_per_sample: float | None = None
    """Learning rate per sample, in place of --lr: --lr becomes this times --batch-size."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    weight_decay: float = 5e-4
    """Weight decay; never applied to biases and normalisation layers."""
    lr_schedule: Literal["cosine", "step", "constant"] = "cosine"
    """Learning-rate schedule after the warm-up."""
    step_epochs: tuple[float, ...] = (0.5, 0.75)
    """Fractions of the run at which `--lr-schedule step` divides the rate by ten."""
    warmup_epochs: float = 1.0
    """Epochs of linear warm-up from zero."""
    label_smoothing: float = 0.0
    """Label smoothing of the cross-entropy."""
    clip_norm: float | None = None
    """Clip gradients to this global norm."""
    select_batch: int = 0
    """Every so many epochs, compare batch sizes on a small part of the data, and go on with the largest that learns as
    well; 0: never."""


def optimizer_rules(config: OptimizerConfig) -> list[Rule]:
    """What the values of these options must be.

    Args:
        config: The options.

    Returns:
        The rules, each with whether it holds.
    """
    return [
        Rule("--epochs", config.epochs, config.epochs >= 1, "at least 1"),
        Rule("--steps", config.steps, config.steps is None or config.steps >= 1, "at least 1"),
        Rule("--lr", config.lr, config.lr > 0, "greater than 0"),
        Rule("--momentum", config.momentum, 0 <= config.momentum < 1, "at least 0 and less than 1"),
        Rule("--weight-decay", config.weight_decay, config.weight_decay >= 0, "at least 0"),
        Rule("--warmup-epochs", config.warmup_epochs, config.warmup_epochs >= 0, "at least 0"),
        Rule(
            "--step-epochs", config.step_epochs, all(0 < f < 1 for f in config.step_epochs), "fractions between 0 and 1"
        ),
        Rule(
            "--label-smoothing", config.label_smoothing, 0 <= config.label_smoothing < 1, "at least 0 and less than 1"
        ),
        Rule("--clip-norm", config.clip_norm, config.clip_norm is None or config.clip_norm > 0, "greater than 0"),
    ]
