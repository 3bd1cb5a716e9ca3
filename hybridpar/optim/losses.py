"""Losses by name: cross-entropy, and binary cross-entropy of each class.

Both take class numbers or soft targets (n, classes), as mixup makes them, and return the mean over the samples, so that
micro-batches of different sizes can be weighed by their samples. A loss that is no such mean returns a sum, and its
`count` what the sums of all micro-batches are divided by.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpar.config import OptimizerConfig
from hybridpar.config.optimizer import Binary
from hybridpar.models.outputs import OutputLoss

_log = logging.getLogger(__name__)


class BinaryCrossEntropy(nn.Module):
    """Binary cross-entropy of each class, as timm has it (Wightman et al. 2021, "ResNet strikes back", section 2.1)."""

    def __init__(self, smoothing: float = 0.0, threshold: float | None = None, smooth_dense: bool = False) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.threshold = threshold
        self.smooth_dense = smooth_dense

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over samples and classes."""
        if targets.shape != outputs.shape or self.smooth_dense:
            dtype = torch.promote_types(outputs.dtype, torch.float32)
            targets = soft_targets(targets, outputs.shape[-1], self.smoothing, dtype)
        if self.threshold is not None:
            targets = targets.gt(self.threshold).to(outputs.dtype)
        return functional.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))


def soft_targets(targets: Tensor, classes: int, smoothing: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Targets of each class, (n, classes).

    Of class numbers: 1 - smoothing + smoothing / classes, and smoothing / classes for the others. Of several labels,
    which have a 0 or a 1 for each class, smoothing moves them towards 1/2.
    """
    if targets.ndim == 2 and targets.shape[1] == classes:
        return targets.to(dtype) * (1.0 - smoothing) + 0.5 * smoothing
    off = smoothing / classes
    filled = torch.full((len(targets), classes), off, device=targets.device, dtype=dtype)
    return filled.scatter_(1, targets.long().view(-1, 1), 1.0 - smoothing + off)


def make_loss(config: OptimizerConfig, *, several_labels: bool = False, mixed: bool = False) -> nn.Module:
    """The loss that options name."""
    asked = config.criterion
    smoothing = 0.0 if mixed else asked.smoothing
    if isinstance(asked, Binary) and asked.of_each_class(several_labels):
        return BinaryCrossEntropy(smoothing, asked.threshold, smooth_dense=several_labels)
    return nn.CrossEntropyLoss(label_smoothing=smoothing)


class SummedLoss:
    """A loss of torch that is a mean over the targets that count, by their weights, as a sum and what it is over."""

    def __init__(self, loss: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        self._loss = copy.copy(loss)
        self._loss.reduction = "sum"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum."""
        total: Tensor = self._loss(outputs, targets)
        return total

    def count(self, targets: Tensor) -> Tensor | float:
        """What the mean divides by; where targets are probabilities, torch counts all of them."""
        if targets.is_floating_point():
            return targets.numel() / targets.shape[1]
        counts = targets != self._loss.ignore_index
        weight = self._loss.weight
        return (counts if weight is None else weight[targets.where(counts, 0)] * counts).sum()


def as_sum(loss: Any) -> Any:
    """A loss of torch that leaves targets out or weighs them, as a sum; any other loss as it is."""
    if isinstance(loss, OutputLoss):
        return OutputLoss(as_sum(loss.loss), loss.auxiliary)
    if not isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or loss.reduction != "mean" or hasattr(loss, "count"):
        return loss
    if loss.weight is None and loss.ignore_index == nn.CrossEntropyLoss().ignore_index:
        return loss
    if type(loss).forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward):
        return SummedLoss(loss)
    _log.warning(
        "the loss %s leaves targets out or weighs them, and micro-batches are weighed by their samples: let it return "
        "a sum, and its method `count(targets)` what that is divided by",
        type(loss).__name__,
    )
    return loss


def ignored_label(loss: Any) -> int | None:
    """The label that a loss of torch leaves out, though its mean over a micro-batch is weighed by all samples."""
    loss = loss.loss if isinstance(loss, OutputLoss) else loss
    weighed = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) and loss.reduction == "mean"
    return loss.ignore_index if weighed else None
