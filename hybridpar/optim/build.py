"""Makes the optimizer of a run: torch's and timm's by name, with groups for weight decay and rates.

Optimizer state is saved by parameter name and not by position, so it survives another grouping or another order.

Also expands the recipe `onebit-sgd` into ordinary options.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hybridpar.config import OptimizerConfig, TrainConfig
from hybridpar.config.optimizer import TIMM, TORCH_OPTIMIZERS, Groups, check_optimizer
from hybridpar.config.sync import OneBit
from hybridpar.errors import CheckpointError, UsageError, check, nearest
from hybridpar.models import learning_rate_scales
from hybridpar.spec import split_fields, split_name, with_options

#: Optimizers of torch whose fused form can be told on a GPU not to step.
_FUSED = ("sgd", "adam", "adamw")

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


def parameter_groups(model: nn.Module, weight_decay: float, groups: Groups, *, lr: float = 1.0) -> list[dict[str, Any]]:
    """Trainable and frozen parameters in groups: those with weight decay and those without, by scale of their rate.

    Biases and everything inside a normalisation layer do not decay (Goyal et al. 2017, section 5.3; He et al. 2019,
    section 3.1), unless `groups` asks for all; nor do those that `groups` or the model's `no_weight_decay` names.
    """
    listed = getattr(model, "no_weight_decay", None)
    patterns = [*groups.no_decay, *(listed() if callable(listed) else ())]

    def decays(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
        if any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns):
            return False
        is_bias = name.rpartition(".")[2] == "bias"
        return groups.decay_all or not (isinstance(module, _NORMS) or is_bias or parameter.ndim <= 1)

    exempt = {
        id(parameter)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module.named_parameters(path, recurse=False, remove_duplicate=False)
        if not decays(module, name, parameter)
    }
    scales = learning_rate_scales(model, groups.layer_decay, groups.head_lr) if groups.scales_rates else {}
    members: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        members.setdefault((id(parameter) in exempt, scales.get(name, 1.0)), []).append(parameter)
    return [
        {"params": members[key], "weight_decay": 0.0 if key[0] else weight_decay, "lr": lr * key[1]}
        for key in sorted(members, key=lambda key: key[0])
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that options name, of the parameters of a model."""
    groups = parameter_groups(model, config.weight_decay, config.optim.groups, lr=config.peak_lr)
    return optimizer_by_name(groups, config)


def optimizer_by_name(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """An optimizer of torch, in its fused form where that can be told not to step, or of timm."""
    check_optimizer(config)
    name = config.optim.name
    options: dict[str, Any] = {"lr": config.peak_lr, "weight_decay": config.weight_decay, **config.optim.arguments}
    if name == "sgd" or name.startswith(TIMM):
        options.setdefault("momentum", config.optim.momentum)
    try:
        if name.startswith(TIMM):
            timm = importlib.import_module("timm.optim")
            timms = name.removeprefix(TIMM)
            if timms not in (names := timm.list_optimizers()):
                raise UsageError(f"unknown optimizer {name!r}", fix=nearest(name, [TIMM + known for known in names]))
            if timm.get_optimizer_info(timms).second_order:
                raise UsageError(f"the optimizer {name}", "It needs second derivatives, which no step has.")
            _check_arguments(config, timm.get_optimizer_class(timms, bind_defaults=False))
            # It adds what timm has as defaults for the name.
            made: torch.optim.Optimizer = timm.create_optimizer_v2(groups, timms, **options)
            return made
        kind = getattr(torch.optim, TORCH_OPTIMIZERS[name])
        _check_arguments(config, kind)
        are_complex = any(parameter.is_complex() for group in groups for parameter in group["params"])
        if name in _FUSED and not are_complex and not options.keys() & {"foreach", "differentiable"}:
            options.setdefault("fused", True)
        return kind(groups, **options)  # type: ignore[no-any-return]
    except (AttributeError, ImportError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"the optimizer {config.optimizer} cannot be made: {error or type(error).__name__}",
            "It is made with --lr, --weight-decay and what --optimizer says behind its name.",
            "Use timm/muon, which trains everything but matrices with AdamW."
            if name == "muon"
            else "Mend the arguments, or choose another optimizer.",
        ) from error


def state_copies(config: OptimizerConfig) -> int:
    """Tensors of a parameter's size that are kept for it, as a step shows; its moving average is one of them."""
    weight = nn.Parameter(torch.zeros(64, 64))
    weight.grad = torch.ones_like(weight)
    with torch.random.fork_rng(devices=[]):
        optimizer = optimizer_by_name([{"params": [weight]}], config)
        optimizer.step()
    elements: int = sum(value.numel() for value in optimizer.state[weight].values() if getattr(value, "ndim", 0))
    return round(elements / weight.numel()) + (config.model_ema is not None)


def part_of(
    optimizer: torch.optim.Optimizer, ids: Collection[int], made: dict[int, Any] | None = None
) -> torch.optim.Optimizer:
    """An optimizer of those parameters of another one whose ids are given, with their options and state, and its hooks.

    Groups that have none of them are left out. An optimizer that wraps others shares what it shares with them.
    """
    made = {} if made is None else made
    part: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            value = part_of(value, ids, made)
        elif name == "param_groups":
            parts = [_group_of(group, ids) for group in value]
            value = made.setdefault(id(value), [group for group in parts if group["params"]])
        elif name == "state":
            state = {key: item for key, item in value.items() if not isinstance(key, torch.Tensor) or id(key) in ids}
            value = made.setdefault(id(value), defaultdict(dict, state))
        elif isinstance(value, random.Random):
            value = copy.copy(value)
        vars(part)[name] = value
    vars(part).pop("step", None)  # a scheduler's wrapper, which would step the whole one
    return part


def _group_of(group: Mapping[str, Any], ids: Collection[int]) -> dict[str, Any]:
    """A group of parameters without those of others."""
    is_in = [id(parameter) in ids for parameter in group["params"]]
    lists = {key: list(compress(group[key], is_in)) for key in ("params", "param_names") if key in group}
    return copy.deepcopy({key: value for key, value in group.items() if key not in lists}) | lists


def _check_arguments(config: OptimizerConfig, kind: Callable[..., Any]) -> None:
    """Refuse arguments that an optimizer does not take, and those of another kind than its defaults."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    accepted = defaults.keys() - {"params", "lr", "weight_decay"}
    for argument, value in config.optim.arguments.items():
        if argument not in accepted:
            raise UsageError(
                f"the optimizer {config.optim.name} has no argument {argument!r}",
                fix=nearest(argument, accepted),
            )
        if isinstance(default := defaults[argument], int | float):
            wanted, word = (bool, "on or off") if isinstance(default, bool) else ((int, float), "a number")
            if not isinstance(value, wanted) or (isinstance(value, bool) and not isinstance(default, bool)):
                raise UsageError(f"the optimizer {config.optim.name} with {argument}={value}", f"It must be {word}.")


def fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that join late the momentum of zero that the others once started from.

    Torch's fused SGD refuses a step in which some parameters have a momentum buffer and others have none, as happens
    after thawing a layer or the first use of a branch. Starting from zero gives the same first update, m = g.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    # To look each parameter up, torch hashes it in Python, so that is done only while some have no momentum.
    having = [entry.get("momentum_buffer") is not None for entry in optimizer.state.values()]
    if sum(having) == sum([len(group["params"]) for group in optimizer.param_groups]):
        return
    for group in optimizer.param_groups:
        if not group.get("fused") or group["momentum"] == 0:
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class Rates:
    """Sets the learning rates of an optimizer's groups to fractions of what they were at first, their peaks.

    Where steps are of another number of samples than the options are for, also momentum and weight decay.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device | None = None) -> None:
        self._groups = optimizer.param_groups
        self._given = [{**group, "lr": float(group["lr"])} for group in self._groups]
        if device is not None and all(group.get("fused") for group in self._groups):
            for group, given in zip(self._groups, self._given, strict=True):  # where fused kernels read them
                group["lr"] = torch.tensor(given["lr"], dtype=torch.float32, device=device)

    def set(self, factor: float) -> None:
        """Set all rates to a fraction of their peaks; on a device, in the order of the current stream."""
        for group, given in zip(self._groups, self._given, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(given["lr"] * factor)
            else:
                group["lr"] = given["lr"] * factor

    def scale(self, momentum_power: float, decay_factor: float) -> None:
        """Raise momentum to a power of what it was at first, and multiply weight decay."""
        for group, given in zip(self._groups, self._given, strict=False):
            if given.get("momentum"):
                group["momentum"] = given["momentum"] ** momentum_power
            if given.get("weight_decay"):
                group["weight_decay"] = given["weight_decay"] * decay_factor


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """State of an optimizer, and its counters by group, with parameters called by their names in the model.

    Holds only tensors and plain values, so that `torch.load(weights_only=True)` reads it.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        "kind": type(optimizer).__name__,
        "groups": [
            {"names": [names[id(parameter)] for parameter in group["params"]], **counters_of(group)}
            for group in optimizer.param_groups
        ],
        "state": {names[id(key)]: dict(values) for key, values in optimizer.state.items() if id(key) in names},
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Any], *, take: bool = False
) -> None:
    """Put saved state back by name; what is not in it has none afterwards. The optimizer's own grouping stays."""
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved['kind']}, this run uses {kind}",
            "Optimizer state is of use to the same kind of optimizer only.",
            f"Resume with {saved['kind']}, or start a new run with the checkpoint as --weights.",
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        members = {names[id(parameter)]: parameter for parameter in group["params"]}
        put_counters(group, next((other for other in saved["groups"] if members.keys() & other["names"]), {}))
        counts_on_device = bool(group.get("fused") or group.get("capturable"))
        for name, parameter in members.items():
            if name in saved["state"]:
                optimizer.state[parameter] = {
                    key: _fitted(value, parameter, counts_on_device, take) if isinstance(value, torch.Tensor) else value
                    for key, value in saved["state"][name].items()
                }


def counters_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What optimizers of timm such as LAMB count per group of parameters, their steps, copied."""
    return copy.deepcopy({key: group[key] for key in ("step",) if key in group})


def put_counters(group: dict[str, Any], counters: Mapping[str, Any]) -> None:
    """Give a group of parameters the counters that `counters_of` returned, and no others."""
    group.pop("step", None)
    group.update(counters_of(counters))


def _fitted(value: torch.Tensor, parameter: nn.Parameter, count_on_device: bool, take: bool) -> torch.Tensor:
    """A tensor of an optimizer's state on the device, and in the memory format, in which the optimizer wants it."""
    if value.shape != parameter.shape:
        # A step counter. Only fused and capturable optimizers want it where the parameter is, others on the host.
        # What has dimensions is part of the state, as the row and column sums of Adafactor.
        return value.to(parameter.device if count_on_device or value.ndim else "cpu", copy=True)
    if take and (value.device, value.stride()) == (parameter.device, parameter.stride()):
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def expand(config: TrainConfig, *, total_steps: int | None, replicas: int) -> TrainConfig:
    """The options that a recipe stands for, without the recipe."""
    config = replace(config, lr=config.peak_lr)
    if not isinstance(config.exchange, OneBit):
        return config
    from hybridpar.compress import parse_codec

    check(
        replicas > 1,
        f"--sync {config.sync} with one replica",
        "AdaGrad and momentum steps are taken where the gradients of replicas meet, and one replica sends none.",
        "Leave it out, or ask for more replicas: --replicas 2 or --nproc 2.",
    )
    name, text = split_name(config.compress)
    codec = config.compress.strip() if name == "onebit_sgd" else "onebit_sgd"
    given = split_fields(f"--compress {codec}", text, flags=None) if name == "onebit_sgd" else {}
    check(
        parse_codec(codec).feedback,
        f"--sync {config.sync} with --compress {codec}",
        "Error feedback is a part of 1-bit SGD, and its warm-up sends the first steps in full precision.",
        "Leave feedback=off out, or name the codec without --sync onebit-sgd.",
    )
    # What --compress says goes before what other options say.
    momentum, warm = f"{config.optim.momentum:g}", config.exchange.warm_steps(total_steps)
    rule: dict[str, object] = {"warmup": warm, "momentum": momentum, **given}
    return replace(
        config,
        sync=with_options(config.sync.replace("onebit-sgd", "allreduce", 1), warm=None),
        compress=with_options(codec, **rule),
        optimizer=with_options(config.optimizer, momentum=0),
        # Not part of the owners' momentum, which would have added it up.
        weight_decay=config.weight_decay / (1 - float(str(rule["momentum"]))),
    )
