"""The ablation of 1-bit SGD: one worker learns, and a row says the same every time."""

from __future__ import annotations

import torch

from benchmarks.asynchronous import ablation


def test_one_worker_learns():
    torch.manual_seed(0)
    first = ablation.train(ablation.METHODS[0], 0.1, seed=1, epochs=1)
    torch.manual_seed(1)
    assert first == ablation.train(ablation.METHODS[0], 0.1, seed=1, epochs=1), "a row says the same every time"
    assert ablation.train(ablation.METHODS[0], 0.1, seed=1, epochs=4)[0] > 0.5
