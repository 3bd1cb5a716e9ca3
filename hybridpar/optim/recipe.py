"""Expands a recipe, such as `onebit-sgd`, into ordinary options and an optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import nn

from hybridpar.compress import Codec, ErrorFeedback, parse_codec
from hybridpar.compress.codecs.onebit_adam import OneBitAdam
from hybridpar.compress.codecs.onebit_sgd import OneBitSgd
from hybridpar.compress.owner import OwnerRule
from hybridpar.config import TrainConfig
from hybridpar.config.recipe import RATES, warm_steps
from hybridpar.optim.adagrad_sgd import AdaGradSGD
from hybridpar.optim.build import optimizer_by_name, parameter_groups, undecayed_names
from hybridpar.optim.onebit_adam import FrozenAdam


def expand(config: TrainConfig, *, total_steps: int | None, replicas: int) -> TrainConfig:
    """The options that a recipe stands for, without the recipe.

    Args:
        config: As users give it.
        total_steps: Steps of the run, where they are known.
        replicas: Workers that exchange gradients; one exchanges nothing and compresses nothing.

    Raises:
        UsageError: Options contradict each other, or the length of the run is needed and not known.
    """
    if config.lr_per_sample is not None:
        config = replace(config, lr=config.lr_per_sample * config.batch_size, lr_per_sample=None)
    if config.recipe == "none":
        return config
    buffering = config.double_buffer
    codec = "none" if replicas == 1 else codec_text(config, total_steps)
    lr = RATES[config.recipe] if config.lr == TrainConfig.lr else config.lr
    if config.recipe == "onebit-adam":
        return replace(config, recipe="none", compress=codec, lr=lr, warm_start_steps=None)
    if buffering is None:
        buffering = "off" if config.cuda_graph or config.amp == "fp16" else "auto"
    return replace(
        config,
        recipe="none",
        compress=codec,
        lr=lr,
        momentum=0.0,
        # Not part of the owners' momentum, which would have added it up.
        weight_decay=config.weight_decay / (1 - _rule(config).momentum),
        double_buffer=buffering,
        warm_start_steps=None,
    )


def codec_text(config: TrainConfig, total_steps: int | None) -> str:
    """The codec of a recipe, as text; what `--compress` says of it goes before what other options say.

    Args:
        config: Options with a recipe.
        total_steps: Steps of the run; None where they are not known.
    """
    name, _, options = config.compress.strip().partition(":")
    given = dict(part.partition("=")[::2] for part in options.split(",") if part)
    codec = config.recipe.replace("-", "_")
    given = {option.strip(): value for option, value in given.items()} if name == codec else {}
    given.setdefault("warm", str(warm_steps(config, total_steps)))
    if config.recipe == "onebit-sgd":
        given.setdefault("momentum", f"{config.momentum:g}")
    return f"{codec}:" + ",".join(f"{option}={value}" for option, value in given.items())


def make_optimizer(
    module: nn.Module,
    config: TrainConfig,
    expanded: TrainConfig,
    *,
    total_steps: int | None,
    replicas: int,
    no_decay: Collection[str] | None = None,
    scales: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of a model, or of a stage of it.

    Args:
        module: The model.
        config: As users give it.
        expanded: What `expand` made of it.
        total_steps: As of `expand`.
        replicas: As of `expand`.
        no_decay: Names of parameters without weight decay; default: what `undecayed_names` says of the module.
        scales: What the learning rate of a parameter is multiplied with, by name.
    """
    names = undecayed_names(module, config.no_decay) if no_decay is None else no_decay
    groups = parameter_groups(module, expanded.weight_decay, no_decay=names, lr=expanded.lr, scales=scales)
    if config.recipe == "onebit-adam":
        codec = _core(codec_text(config, total_steps))
        assert isinstance(codec, OneBitAdam)
        betas = codec.beta, 0.999
        return FrozenAdam(groups, expanded.lr, betas, freeze_steps=codec.warm, momentum_arrives=replicas > 1)
    if config.recipe == "onebit-sgd" and replicas == 1:
        return AdaGradSGD(groups, expanded.lr, _rule(config))
    return optimizer_by_name(groups, expanded)


def _rule(config: TrainConfig) -> OwnerRule:
    """What owners of stripes do in the recipe `onebit-sgd`, however long the run is."""
    codec = _core(codec_text(config, 0))
    assert isinstance(codec, OneBitSgd)
    return OwnerRule(codec.adagrad, codec.momentum, codec.memory, codec.level)


def _core(text: str) -> Codec:
    """The codec that a text names, without error feedback around it."""
    codec = parse_codec(text)
    return codec.inner if isinstance(codec, ErrorFeedback) else codec
