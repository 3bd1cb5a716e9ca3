"""Shards of a few numbers, for tests of parameter servers."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar.config import OptimizerConfig
from hybridpar.server import Rules, Shard, cut_model
from hybridpar.server.encoding import PushEncoder
from tests.compress.team import unsent as unsent_by


def sgd(lr: float = 0.1, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False):
    return OptimizerConfig(lr=lr, optimizer=f"sgd:momentum={momentum},nesterov={nesterov}", weight_decay=weight_decay)


def small_shard(rules: Rules, *, count: int = 4, lr: float = 0.1, momentum: float = 0.0, **options) -> Shard:
    """One parameter of zeros, with all learners there."""
    (stripe,) = cut_model([("w", (count,), False)], 1)
    shard = Shard(stripe, torch.zeros(count), rules, sgd(lr, momentum), **options)
    for learner in range(rules.learners):
        shard.join(learner)
    return shard


def unsent(encoder: PushEncoder) -> Tensor:
    """All that a learner's codecs have left out so far, 1-D float32 of the stripe's size."""
    out = torch.zeros(encoder.stripe.count)
    for coder, (first, last) in zip(encoder._coders, encoder.stripe.ranges, strict=True):
        out[first:last] = unsent_by(coder)
    return out
