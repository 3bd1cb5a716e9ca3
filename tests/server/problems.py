"""Training problems for tests of parameter servers: models of a few numbers, and one that really learns."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

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


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Scikit-learn's digits as 64 features each, standardised, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32)
    return (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-3), torch.tensor(labels)


class DigitsGradient:
    """Mean gradients of a logistic regression on digits, or of a net with a hidden layer, each of a batch of its own.

    Args:
        batch: Samples of a learner's minibatch.
        hidden: Units of the hidden layer; 0 for none.
    """

    def __init__(self, batch: int, hidden: int = 0) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)] if hidden else [nn.Linear(64, 10)]
        self.model = nn.Sequential(*layers)
        self._batch = batch
        #: The weights at the start, 1-D.
        self.start = torch.cat([own.detach().view(-1) for own in self.model.parameters()])

    def put(self, weights: Tensor) -> None:
        torch.nn.utils.vector_to_parameters(weights, self.model.parameters())

    def __call__(self, learner: int, number: int, weights: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * learner + number)
        inputs, labels = digits()
        chosen = torch.randint(len(labels), (self._batch,), generator=draw)
        return self.at(weights, inputs[chosen], labels[chosen])

    def at(self, weights: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        self.put(weights.clone())
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        return torch.cat([one.view(-1) for one in torch.autograd.grad(loss, list(self.model.parameters()))])

    def loss(self, weights: Tensor) -> float:
        """Over all digits."""
        inputs, labels = digits()
        self.put(weights.clone())
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self.model(inputs), labels))
