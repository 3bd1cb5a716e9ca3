"""Gives a model's layers tuned kernels (`optimize`), and gives the model back as it was (`restore`).

A layer is swapped by giving it another class: parameters, names, hooks, state dict and every reference to it stay,
those in a traced graph or a pipeline's stage too. So it does not matter whether a model is swapped before or after it
is partitioned, and plans and checkpoints fit both.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, fx, nn

from hybridpar.codegen.cache import wanted
from hybridpar.tvm_kernels.choice import Choices, active_choices, use_choices
from hybridpar.tvm_kernels.confirm import confirm_kernels
from hybridpar.tvm_kernels.database import Database, default_database, read_database
from hybridpar.tvm_kernels.layers import is_depthwise, number_padding, step_keys
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.norm_swap import fuse_norms, fused_norms, unfuse_norms
from hybridpar.tvm_kernels.op import depthwise_conv2d, layout_of
from hybridpar.tvm_kernels.shapes import Layout

_log = logging.getLogger(__name__)

_Model = TypeVar("_Model", bound=nn.Module)

fx.wrap("depthwise_conv2d")  # one node wherever a tracer goes into the layer


class DepthwiseConv2d(nn.Conv2d):
    """A depthwise `nn.Conv2d` that runs tuned kernels where they are faster; `optimize` makes layers into it."""

    #: Tracers that know it keep the layer whole, as they keep `nn.Conv2d`, so that its unit is called the same.
    fx_leaf = True

    @property
    def kernel_variant(self) -> str:
        """What times of this layer depend on besides torch: which records there are."""
        choices = active_choices()
        return "" if choices is None else choices.digest

    def forward(self, input: Tensor) -> Tensor:
        """The convolution, as `nn.Conv2d` computes it.

        Args:
            input: (N, C, H, W).

        Returns:
            (N, C, OH, OW).
        """
        return depthwise_conv2d(input, self.weight, self.bias, self.stride, number_padding(self), self.dilation)


def optimize(
    model: _Model,
    database: str | Path | Database | None = None,
    report: bool = False,
    example: Tensor | None = None,
) -> _Model:
    """Let a model's depthwise convolutions run tuned kernels, wherever a record says that they are faster.

    BatchNorm layers and the activations behind them run as one operation where there are kernels for them.

    The database is used by the whole process from then on.

    Args:
        model: Any module; changed in place.
        database: A file that `hybridpar tune` wrote, or what was read from it; default: what comes with the package and
            what was tuned on this machine.
        report: Log a line at level WARNING, so that it is seen, that says how many layers were swapped.
        example: A batch of float32 images on the CPU, as the model will be trained on, without a `database`: what this
            CPU has no record of is first timed for up to half a minute, and recorded; a line at level WARNING says so.

    Returns:
        The model itself.

    Raises:
        UsageError: The database cannot be read, or the model does not run on the example.
    """
    if database is None:
        database = default_database()
        if example is not None:
            layout = layout_of(example) or Layout.CONTIGUOUS
            keys = step_keys(model, example.shape, layout, torch.get_num_threads(), cpu_fingerprint())
            if line := confirm_kernels(keys, database):
                _log.warning("%s", line)
                database = default_database()
    elif not isinstance(database, Database):
        database = read_database(database)
    use_choices(Choices(database))
    if wanted():
        fuse_norms(model)
    layers = [module for module in model.modules() if is_depthwise(module)]
    for layer in layers:
        layer.__class__ = DepthwiseConv2d
    if report:
        text = "%d depthwise convolution(s) choose from %d record(s), and %d BatchNorm layer(s) are fused"
        _log.warning(text, len(layers), len(database.records), len(fused_norms(model)))
    return model


def has_tuned_kernels(model: nn.Module) -> bool:
    """Whether a model has layers for which there may be tuned kernels, where the user has not switched them off."""
    return wanted() and any(map(is_depthwise, model.modules())) and len(default_database()) > 0


def restore(model: _Model) -> _Model:
    """Undo `optimize`: all layers are what they were.

    Args:
        model: What `optimize` was given, or any model.

    Returns:
        The model itself.

    Raises:
        UsageError: A norm was given yet another class since, and still has it; nothing was changed.
    """
    unfuse_norms(model)
    for module in model.modules():
        if type(module) is DepthwiseConv2d:
            module.__class__ = nn.Conv2d  # type: ignore[assignment]
    return model
