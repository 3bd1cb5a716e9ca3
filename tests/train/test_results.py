"""Every sample of a test set counts once; the way through a `Trainer` is in tests/train/test_trainer.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.train.results import evaluate


def test_a_target_per_pixel_counts_as_parts_of_its_sample() -> None:
    outputs = torch.zeros(3, 2, 4, 4)
    outputs[:, 1] = 1.0  # class 1 everywhere
    targets = torch.ones(3, 4, 4, dtype=torch.long)
    targets[0, :2] = 0
    result = evaluate(lambda inputs: inputs, nn.functional.cross_entropy, [(outputs, targets)], World())
    assert result.accuracy == pytest.approx(1 - 8 / 48)
    assert result.samples == 3


def test_targets_that_are_no_class_numbers_have_no_accuracy() -> None:
    outputs, targets = torch.zeros(3, 2), torch.full((3, 2), 0.5)
    result = evaluate(lambda inputs: inputs, nn.functional.cross_entropy, [(outputs, targets)], World())
    assert result.accuracy == 0.0
    assert result.loss == pytest.approx(torch.tensor(2.0).log().item())


def test_of_several_classes_all_must_be_right() -> None:
    targets = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    outputs = torch.tensor([[2.0, -1.0, 0.1], [-1.0, -2.0, -0.1], [-1.0, 1.0, 1.0]])
    loss = nn.functional.binary_cross_entropy_with_logits
    assert evaluate(lambda inputs: inputs, loss, [(outputs, targets)], World()).accuracy == pytest.approx(2 / 3)
