"""The optimizer of a stripe, equal to the optimizer of a plain run on the parameters that the stripe holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hybridpar.config import OptimizerConfig
from hybridpar.config.optimizer import TIMM
from hybridpar.optim.build import optimizer_by_name, parameter_groups, undecayed_names
from hybridpar.server.shard import OptimizerOf
from hybridpar.server.stripes import trained_parameters


def optimizer_of(config: OptimizerConfig) -> OptimizerOf:
    """What makes the optimizer of a stripe, as `hybridpar.optim.build` makes it of a model.

    Args:
        config: Options of the run.
    """

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        ready = [
            {
                "params": group["params"],
                "weight_decay": config.weight_decay if group["decays"] else 0.0,
                "lr": config.peak_lr * group["scale"],
            }
            for group in groups
        ]
        return optimizer_by_name(ready, config)

    return make


def needs_whole_parameters(config: OptimizerConfig) -> bool:
    """Whether a part of a parameter cannot be updated without the rest of it.

    Torch's optimizers are elementwise but for two. Many of timm's scale by norms of a parameter, as adaptive clipping
    does, or take it as a matrix.
    """
    adaptive = config.clip_norm is not None and config.clip_mode == "agc"
    return adaptive or config.optimizer in ("adafactor", "muon") or config.optimizer.startswith(TIMM)


def described_parameters(model: nn.Module, no_decay: Sequence[str] = ()) -> list[tuple[str, tuple[int, ...], bool]]:
    """Name, shape, and whether weight decay applies, of each trained parameter; see `cut_model`.

    Args:
        model: The model.
        no_decay: Patterns of names without weight decay.
    """
    decaying = {
        id(parameter)
        for group in parameter_groups(model, 1.0, no_decay=undecayed_names(model, no_decay))
        if group["weight_decay"] > 0
        for parameter in group["params"]
    }
    return [
        (name, tuple(parameter.shape), id(parameter) in decaying)
        for name, parameter in trained_parameters(model).items()
    ]
