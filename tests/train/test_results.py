"""Every sample of a test set counts once; the way through a `Trainer` is in tests/train/test_trainer.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.train.results import evaluate

PIXELS = torch.ones(3, 4, 4, dtype=torch.long)
PIXELS[0, :2] = 0
SEVERAL = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
SCORES = torch.tensor([[2.0, -1.0, 0.1], [-1.0, -2.0, -0.1], [-1.0, 1.0, 1.0]])


@pytest.mark.parametrize(
    ("outputs", "targets", "accuracy"),
    [
        (torch.arange(2.0).view(1, 2, 1, 1).expand(3, 2, 4, 4), PIXELS, 1 - 8 / 48),
        (torch.zeros(3, 2), torch.full((3, 2), 0.5), 0.0),
        (SCORES, SEVERAL, 2 / 3),
    ],
    ids=["parts of a sample by pixel", "neither class numbers nor classes", "all of several classes"],
)
def test_what_counts_as_right(outputs, targets, accuracy):
    result = evaluate(lambda inputs: inputs, nn.functional.cross_entropy, [(outputs, targets)], World())
    assert result.accuracy == pytest.approx(accuracy)
    assert result.loss == pytest.approx(float(nn.functional.cross_entropy(outputs, targets)))
    assert result.samples == 3
