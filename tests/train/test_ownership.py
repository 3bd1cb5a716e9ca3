"""Models of two stages that ask each other's parameters for their type or shape, or keep modes, beside a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.formats.checkpoint_files import load_model_state
from hybridpar.models.deferred import DeferredModel
from tests.ranks import run_ranks
from tests.train.test_modes import part_in_evaluation
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
STEPS = 10


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02)


def train(
    world: World, directory: str, make: Callable[[], nn.Module], deferred: bool
) -> tuple[State, list[float], list[bool]]:
    """Train in two stages with a test in between; the saved state, the losses of the tests, and modes."""
    config = TrainConfig(plan="none", stages=2, micro_batches=2, batch_size=8)
    torch.manual_seed(0)
    model = DeferredModel(make) if deferred else make()
    with Trainer(model, optimizer=sgd, config=config, world=world, example=X[:4]) as trainer:
        tested = []
        for _ in range(2):
            for _ in range(STEPS):
                trainer.step((X, Y))
            tested.append(trainer.evaluate([(X, Y)]).loss)
        path = trainer.save(directory)
        return load_model_state(path), tested, [module.training for module in trainer.model.modules()]


@pytest.mark.parametrize(("workers", "deferred"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("make", [Net, part_in_evaluation])
def test_two_stages_train_as_a_plain_loop(
    make: Callable[[], nn.Module], tmp_path: Path, workers: int, deferred: bool
) -> None:
    torch.manual_seed(0)
    model, losses = make(), []
    for _ in range(2):
        plain_loop(model, sgd(model), [(X, Y)] * STEPS)
        losses.append(cross_entropy(copy.deepcopy(model).eval()(X), Y).item())
    for saved, tested, modes in run_ranks(train, workers, str(tmp_path), make, deferred):
        assert saved.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(saved[name], value, rtol=1e-6, atol=1e-6)
        assert tested == pytest.approx(losses, rel=1e-5)
        assert modes == [module.training for module in model.modules()]
