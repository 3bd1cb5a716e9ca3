"""The optimizer of a stripe, equal element by element to the optimizer of a plain run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hybridpar.config import OptimizerConfig
from hybridpar.optim.build import optimizer_by_name, parameter_groups, undecayed_names
from hybridpar.server.shard import OptimizerOf
from hybridpar.server.stripes import trained_parameters


def optimizer_of(config: OptimizerConfig) -> OptimizerOf:
    """What makes the optimizer of a stripe: SGD or AdamW, as `hybridpar.optim.build` makes it of a model.

    Args:
        config: Options of the run.
    """

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        ready = [
            {
                "params": group["params"],
                "weight_decay": config.weight_decay if group["decays"] else 0.0,
                "lr": config.lr * group["scale"],
            }
            for group in groups
        ]
        return optimizer_by_name(ready, config)

    return make


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
