"""What the caller changes in a model between steps shows in its stages, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar import TrainConfig, Trainer
from hybridpar.errors import UsageError
from tests.train.training import plain_loop

X, Y = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5

Change = Callable[[Any, float], None]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Scaled(nn.Module):
    """Its scale is a buffer, an attribute or a number."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.lin, self.scale = nn.Linear(16, 16), scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x) * self.scale
        return y


class Inverse(Scaled):
    """Something is computed from the scale alone."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x) * (1 / self.scale)
        return y


class Chosen(Scaled):
    """The scale decides what is computed."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x)
        return y * 2 if self.scale > 1.2 else y


class WholeChosen(Chosen):
    """It is kept whole."""

    fx_leaf = True


def fill(part: Any, value: float) -> None:
    part.scale.fill_(value)


def fill_data(part: Any, value: float) -> None:
    part.scale.data.fill_(value)


def assign(part: Any, value: float) -> None:
    part.scale = torch.full((), value)


def set_number(part: Any, value: float) -> None:
    part.scale = value


def set_layer(part: Any, value: float) -> None:
    part.lin = nn.Linear(16, 16)


def buffer() -> nn.Buffer:
    return nn.Buffer(torch.ones(()))


def trained(make: Callable[[], nn.Module], change: Change) -> tuple[nn.Module, nn.Module]:
    """A model in two stages, and in a plain loop, with a change before each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), make(), nn.ReLU(), nn.Linear(16, 5))
    twin = copy.deepcopy(net)
    optimizer = sgd(twin)
    config = TrainConfig(plan="none", stages=2, micro_batches=2)
    with Trainer(net, optimizer=sgd, config=config, example=X[:4]) as trainer:
        for value in (1.0, 1.5, 2.0):
            trainer.wait()
            for model in (net, twin):
                change(model[2], value)
            trainer.step((X, Y))
            plain_loop(twin, optimizer, [(X, Y)])
        trainer.wait()
    return net, twin


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: Scaled(buffer()), fill),
        (lambda: Scaled(buffer()), fill_data),
        (lambda: Scaled(torch.ones(())), fill),
        (lambda: WholeChosen(1.0), set_number),
    ],
    ids=["a buffer", "its data", "a tensor", "a number of what is kept whole"],
)
def test_what_is_used_as_it_is_may_change(make: Callable[[], nn.Module], change: Change) -> None:
    net, twin = trained(make, change)
    for mine, wanted in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize(
    ("make", "change", "name"),
    [
        (lambda: Inverse(buffer()), fill, "scale"),
        (lambda: Inverse(buffer()), fill_data, "scale"),
        (lambda: Scaled(buffer()), assign, "scale"),
        (lambda: Scaled(torch.ones(())), assign, "scale"),
        (lambda: Scaled(1.0), set_number, "scale"),
        (lambda: Chosen(1.0), set_number, "scale"),
        (lambda: Scaled(1.0), set_layer, "lin"),
    ],
    ids=["computed from", "from its data", "assigned", "a tensor assigned", "a number", "a branch", "a module"],
)
def test_what_the_graphs_have_as_it_was_is_refused(make: Callable[[], nn.Module], change: Change, name: str) -> None:
    with pytest.raises(UsageError, match=rf"'2\.{name}' of the model has changed since it was cut into stages"):
        trained(make, change)


class DividedByNorm(Scaled):
    """What it computes from parameters alone is not in a graph."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            norm = sum(parameter.square().sum() for parameter in self.parameters())
        y: Tensor = self.lin(x) / norm
        return y


def test_what_is_computed_from_trained_parameters_alone_is_computed_in_each_pass() -> None:
    net, twin = trained(lambda: DividedByNorm(buffer()), fill)
    for mine, wanted in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_what_forward_does_not_read_may_change() -> None:
    def note(part: Any, value: float) -> None:
        part.epoch = value

    trained(lambda: Scaled(buffer()), note)
