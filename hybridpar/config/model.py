"""Options of a run: how its model is built, what it starts from, and what of it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from hybridpar.config.rule import Rule


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model: what is handed to its builder, the weights that it starts from, and what stays as it is."""

    model_arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Argument of the model's builder or factory, as key=value; may be repeated. A value is read as TOML or Python."""
    drop_rate: float | None = None
    """Dropout before the last layer; default: that of the model."""
    drop_path_rate: float | None = None
    """Stochastic depth; default: that of the model."""
    weights: str | None = None
    """Start from published weights (`default`, or a name of torchvision's or timm's), hf-hub:OWNER/NAME, a .pt or
    .safetensors file, or a checkpoint; the head is new where classes differ."""
    freeze: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Do not train what this pattern names, modules or parameters, as layer[12] or *.bias; may be repeated."""


def model_rules(config: ModelConfig) -> list[Rule]:
    """What the values of these options must be.

    Args:
        config: The options.

    Returns:
        The rules, each with whether it holds.
    """
    part = "at least 0 and less than 1"
    return [
        Rule("--drop-rate", config.drop_rate, 0 <= (config.drop_rate or 0) < 1, part),
        Rule("--drop-path-rate", config.drop_path_rate, 0 <= (config.drop_path_rate or 0) < 1, part),
    ]
