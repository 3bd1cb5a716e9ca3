"""A model whose stages ask each other's parameters for their type or shape trains as in a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.models.deferred import DeferredModel
from hybridpar.train.checkpoint import load_model_state
from tests.ranks import run_ranks
from tests.train.training import plain_loop

State = dict[str, Tensor]


class Net(nn.Module):
    """The first layers ask the head, the head asks the first layer; the scale is read by both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.register_buffer("scale", torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.device, self.head.weight.dtype) / self.head.weight.size(0)
        x = self.c(self.b((self.a(x) * self.scale).relu()).relu())
        return self.head(x.relu() * self.a.weight.shape[1] * self.scale)


GENERATOR = torch.Generator().manual_seed(1)
X, Y = torch.randn(8, 12, generator=GENERATOR), torch.arange(8) % 5
STEPS = 20


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02)


@pytest.fixture(scope="module")
def plain() -> tuple[State, float]:
    """The state and the loss after training in a plain loop."""
    model = Net()
    plain_loop(model, sgd(model), [(X, Y)] * STEPS)
    return model.state_dict(), cross_entropy(model(X), Y).item()


def train(world: World, directory: str, deferred: bool) -> tuple[State, float]:
    """Train in two stages with a test in between; the saved state and the loss of the last test."""
    config = TrainConfig(plan="none", stages=2, micro_batches=2, batch_size=8)
    model = DeferredModel(Net) if deferred else Net()
    with Trainer(model, optimizer=sgd, config=config, world=world, example=X[:4]) as trainer:
        for step in range(STEPS):
            trainer.step((X, Y))
            if step == STEPS // 2:
                trainer.evaluate([(X, Y)])
        tested = trainer.evaluate([(X, Y)])
        path = trainer.save(directory)
        return load_model_state(path), tested.loss


@pytest.mark.parametrize(("workers", "deferred"), [(1, False), (2, False), (2, True)])
def test_two_stages_train_as_a_plain_loop(
    plain: tuple[State, float], tmp_path: Path, workers: int, deferred: bool
) -> None:
    state, loss = plain
    for saved, tested in run_ranks(train, workers, str(tmp_path), deferred):
        assert saved.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(saved[name], value, rtol=1e-6, atol=1e-6)
        assert tested == pytest.approx(loss, rel=1e-5)
