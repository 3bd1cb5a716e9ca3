"""Makes the optimizer and the learning-rate schedule of a run.

The rate is computed from the step number alone and never stored, so a resumed run cannot drift from it. Optimizer
state is saved by parameter name and not by position, so it survives another grouping or another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hybridpar.config import OptimizerConfig
from hybridpar.errors import CheckpointError

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable and frozen parameters in two groups: those with weight decay and those without.

    Biases and everything inside a normalisation layer do not decay (Goyal et al. 2017, section 5.3; He et al. 2019,
    section 3.1).
    """
    exempt = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(module, _NORMS) or name == "bias" or parameter.ndim <= 1
    }
    decay = [parameter for parameter in model.parameters() if id(parameter) not in exempt]
    plain = [parameter for parameter in model.parameters() if id(parameter) in exempt]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """SGD (Nesterov on request) or AdamW over `parameter_groups`, in torch's fused form."""
    groups = parameter_groups(model, config.weight_decay)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True)
    return torch.optim.AdamW(groups, lr=config.lr, fused=True)


def fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that join late the momentum of zero that the others once started from.

    Torch's fused SGD refuses a step in which some parameters have a momentum buffer and others have none, as happens
    after thawing a layer or the first use of a branch. Starting from zero gives the same first update, m = g.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group.get("fused") or group["momentum"] == 0:
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


@contextmanager
def scaled_options(optimizer: torch.optim.Optimizer, momentum_power: float, decay_factor: float) -> Iterator[None]:
    """Inside, every group's momentum is raised to a power and its weight decay multiplied, for one optimizer step.

    Afterwards the groups are as before: they are the user's, who reads, changes and saves them.

    Args:
        optimizer: The optimizer.
        momentum_power: What `momentum` is raised to; groups without it, or with none, are left alone.
        decay_factor: What `weight_decay` is multiplied with.
    """
    if momentum_power == decay_factor == 1.0:
        yield
        return
    scaled = [
        (group, key, group[key], group[key] ** momentum_power if key == "momentum" else group[key] * decay_factor)
        for group in optimizer.param_groups
        for key in ("momentum", "weight_decay")
        if group.get(key)
    ]
    for group, key, _, value in scaled:
        group[key] = value
    try:
        yield
    finally:
        for group, key, value, _ in scaled:
            group[key] = value


class Rates:
    """Sets the learning rates of an optimizer's groups to fractions of what they were at first, their peaks.

    Args:
        optimizer: The optimizer.
        device: Keep the rates there, as tensors that a captured step reads when it is replayed; None keeps numbers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device | None = None) -> None:
        self._groups = optimizer.param_groups
        self._peaks = [float(group["lr"]) for group in self._groups]
        self._on_device = device is not None
        if device is not None:
            for group, peak in zip(self._groups, self._peaks, strict=True):
                group["lr"] = torch.tensor(peak, dtype=torch.float32, device=device)  # what fused kernels read

    def set(self, factor: float) -> None:
        """Set all rates to a fraction of their peaks; on a device, in the order of the current stream."""
        for group, peak in zip(self._groups, self._peaks, strict=True):
            if self._on_device:
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor


def rate_factor(step: float, total: int, steps_per_epoch: int, config: OptimizerConfig) -> float:
    """Learning rate of a step as a fraction of the peak rate.

    A linear warm-up over `warmup_epochs` (at most half of the run), then half a cosine to zero, division by ten at
    each fraction in `step_epochs`, or a constant.

    Args:
        step: Number of the step, from 0; between two steps where batches have changed their size.
        total: Steps in the whole run.
        steps_per_epoch: Steps in an epoch.
        config: The schedule.
    """
    warmup = min(round(config.warmup_epochs * steps_per_epoch), total // 2)
    if step < warmup:
        return (step + 1) / warmup
    if config.lr_schedule == "constant":
        return 1.0
    if config.lr_schedule == "step":
        return math.prod(0.1 for fraction in config.step_epochs if step >= fraction * total)
    progress = (step - warmup) / max(1, total - warmup)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """State and options of an optimizer with parameters called by their names in the model.

    Holds only tensors and plain values, so that `torch.load(weights_only=True)` reads it.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        {
            "names": [names[id(parameter)] for parameter in group["params"]],
            **{key: value for key, value in group.items() if key != "params" and _plain(value)},
        }
        for group in optimizer.param_groups
    ]
    state = {
        names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items() if id(parameter) in names
    }
    return {"kind": type(optimizer).__name__, "groups": groups, "state": state}


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, saved: dict[str, Any]) -> None:
    """Put saved state back by name; what is not in it has none afterwards. The optimizer's own grouping stays.

    Raises:
        CheckpointError: The state belongs to another kind of optimizer.
    """
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved['kind']}, this run uses {kind}",
            "Optimizer state is of use to the same kind of optimizer only.",
            f"Resume with {saved['kind']}, or start a new run from the checkpoint's model.pt.",
        )
    by_name = dict(model.named_parameters())
    counting_on_device = {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    optimizer.state.clear()
    for name, values in saved["state"].items():
        if name not in by_name:
            continue
        parameter = by_name[name]
        optimizer.state[parameter] = {
            key: _place(value, parameter, id(parameter) in counting_on_device)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in values.items()
        }


def _place(value: torch.Tensor, parameter: nn.Parameter, count_on_device: bool) -> torch.Tensor:
    if value.shape != parameter.shape:
        # A step counter. Only fused and capturable optimizers want it where the parameter is, others on the host.
        return value.to(parameter.device if count_on_device else "cpu", copy=True)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
