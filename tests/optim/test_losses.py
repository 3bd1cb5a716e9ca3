"""Losses against those of timm and torch."""

from __future__ import annotations

import pytest
import torch
from timm.loss import BinaryCrossEntropy as TimmBinaryCrossEntropy
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn

from hybridpar.config import OptimizerConfig
from hybridpar.optim.losses import BinaryCrossEntropy, make_loss, soft_targets

torch.manual_seed(0)
OUTPUTS, LABELS = torch.randn(6, 5), torch.randint(0, 5, (6,))
SOFT = torch.rand(6, 5).softmax(1)
SEVERAL = (torch.rand(6, 5) > 0.6).float()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("targets", [LABELS, SOFT, SEVERAL], ids=["labels", "soft", "several"])
def test_binary_cross_entropy_is_timms(smoothing, threshold, dense, targets):
    mine = BinaryCrossEntropy(smoothing, threshold, dense)(OUTPUTS, targets)
    timms = TimmBinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold, smooth_dense=dense)
    torch.testing.assert_close(mine, timms(OUTPUTS, targets), rtol=1e-6, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_timms(smoothing):
    loss = make_loss(OptimizerConfig(loss=f"ce:smoothing={smoothing}"))
    torch.testing.assert_close(loss(OUTPUTS, LABELS), LabelSmoothingCrossEntropy(smoothing)(OUTPUTS, LABELS))
    mixed = make_loss(OptimizerConfig(loss=f"ce:smoothing={smoothing}"), mixed=True)
    torch.testing.assert_close(mixed(OUTPUTS, SOFT), SoftTargetCrossEntropy()(OUTPUTS, SOFT))


def test_smoothed_targets_give_the_smoothed_loss():
    smoothed = nn.functional.cross_entropy(OUTPUTS, soft_targets(LABELS, 5, 0.1))
    torch.testing.assert_close(smoothed, nn.functional.cross_entropy(OUTPUTS, LABELS, label_smoothing=0.1))


def test_the_loss_follows_the_labels_unless_it_is_named():
    assert isinstance(make_loss(OptimizerConfig()), nn.CrossEntropyLoss)
    assert isinstance(make_loss(OptimizerConfig(), several_labels=True), BinaryCrossEntropy)
    assert isinstance(make_loss(OptimizerConfig(loss="bce")), BinaryCrossEntropy)
    assert isinstance(make_loss(OptimizerConfig(loss="ce"), several_labels=True), nn.CrossEntropyLoss)


@pytest.mark.parametrize("loss", ["ce", "bce"])
def test_micro_batches_weighed_by_their_samples_give_the_loss_of_the_batch(loss):
    function = make_loss(OptimizerConfig(loss=f"{loss}:smoothing=0.1"))
    parts = [(slice(0, 2), 2 / 6), (slice(2, 6), 4 / 6)]
    total = sum(function(OUTPUTS[part], LABELS[part]) * weight for part, weight in parts)
    torch.testing.assert_close(total, function(OUTPUTS, LABELS))
