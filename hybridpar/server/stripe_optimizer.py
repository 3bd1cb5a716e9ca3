"""The optimizer of a stripe, equal element by element to the optimizer of a plain run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybridpar.config import OptimizerConfig
from hybridpar.optim.build import parameter_groups
from hybridpar.server.shard import OptimizerOf
from hybridpar.server.stripes import trained_parameters


def optimizer_of(config: OptimizerConfig) -> OptimizerOf:
    """What makes the optimizer of a stripe: SGD or AdamW, as `hybridpar.optim.build` makes it of a model.

    Args:
        config: Options of the run.
    """

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        ready = [
            {"params": group["params"], "weight_decay": config.weight_decay if group["decays"] else 0.0}
            for group in groups
        ]
        if config.optimizer == "sgd":
            return torch.optim.SGD(ready, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True)
        return torch.optim.AdamW(ready, lr=config.lr, fused=True)

    return make


def described_parameters(model: nn.Module) -> list[tuple[str, tuple[int, ...], bool]]:
    """Name, shape, and whether weight decay applies, of each trained parameter; see `cut_model`.

    Args:
        model: The model.
    """
    decaying = {
        id(parameter)
        for group in parameter_groups(model, 1.0)
        if group["weight_decay"] > 0
        for parameter in group["params"]
    }
    return [
        (name, tuple(parameter.shape), id(parameter) in decaying)
        for name, parameter in trained_parameters(model).items()
    ]
