"""Losses by name: cross-entropy, and binary cross-entropy of each class.

Both take class numbers or soft targets (n, classes), as mixup makes them, and return the mean over the samples, so that
micro-batches of different sizes can be weighed by their samples.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpar.config import OptimizerConfig


class BinaryCrossEntropy(nn.Module):
    """Binary cross-entropy of each class, as timm has it (Wightman et al. 2021, "ResNet strikes back", section 2.1)."""

    def __init__(self, smoothing: float = 0.0, threshold: float | None = None, smooth_dense: bool = False) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.threshold = threshold
        self.smooth_dense = smooth_dense

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over samples and classes."""
        if targets.shape != outputs.shape:
            targets = soft_targets(targets, outputs.shape[-1], self.smoothing, outputs.dtype)
        elif self.smooth_dense and self.smoothing:
            targets = targets * (1.0 - self.smoothing) + 0.5 * self.smoothing
        if self.threshold is not None:
            targets = targets.gt(self.threshold).to(outputs.dtype)
        return functional.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))


def soft_targets(labels: Tensor, classes: int, smoothing: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
    """Class numbers as a target for each class: 1 - smoothing + smoothing/classes, and smoothing/classes for others."""
    off = smoothing / classes
    filled = torch.full((len(labels), classes), off, device=labels.device, dtype=dtype or torch.float32)
    return filled.scatter_(1, labels.long().view(-1, 1), 1.0 - smoothing + off)


def make_loss(config: OptimizerConfig, *, several_labels: bool = False, mixed: bool = False) -> nn.Module:
    """The loss that options name."""
    smoothing = 0.0 if mixed else config.label_smoothing
    if config.loss == "bce" or (config.loss == "auto" and several_labels):
        return BinaryCrossEntropy(smoothing, config.bce_threshold, smooth_dense=several_labels)
    return nn.CrossEntropyLoss(label_smoothing=smoothing)
