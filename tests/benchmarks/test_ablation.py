"""The ablation of 1-bit SGD: every method can be made, and a row says the same every time."""

from __future__ import annotations

import torch

from benchmarks.asynchronous import ablation
from hybridpar.compress import parse_codec


def test_methods_name_codecs():
    for method in ablation.METHODS:
        if method.codec is not None:
            parse_codec(method.codec.format(warm=3) + ",momentum=0.9")
    assert len({method.name for method in ablation.METHODS}) == len(ablation.METHODS)


def test_one_worker_learns():
    torch.manual_seed(0)
    first = ablation.train(ablation.METHODS[0], 0.1, seed=1, epochs=1)
    torch.manual_seed(1)
    assert first == ablation.train(ablation.METHODS[0], 0.1, seed=1, epochs=1), "a row says the same every time"
    assert ablation.train(ablation.METHODS[0], 0.1, seed=1, epochs=4)[0] > 0.5
