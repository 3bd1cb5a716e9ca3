"""Modes that change while training; those that stay are in tests/state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hybridpar import TrainConfig, Trainer
from hybridpar.errors import UsageError
from tests.train.training import plain_loop

X, Y = torch.randn(8, 12, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5


class Scaled(nn.Module):
    """Its own forward asks for its mode, so that the graph of it differs."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2.0 if self.training else 0.5)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def facts(net: nn.Module) -> list[tuple[str, bool, set[str]]]:
    return [(name, module.training, set(vars(module))) for name, module in net.named_modules()]


def assert_same(net: nn.Module, other: nn.Module) -> None:
    for (name, one), two in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("stages", [1, 2])
def test_thawing_is_as_in_plain_pytorch(stages: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)
    )
    twin = copy.deepcopy(net)
    twin[1].requires_grad_(False).eval()  # type: ignore[operator]
    optimizer = sgd(twin)
    options = TrainConfig(plan="none", stages=stages, freeze=("1",))
    with Trainer(net, optimizer=sgd, config=options, example=X) as trainer:
        for thawed in (False, True):
            if thawed:
                for model in (net, twin):
                    model.train().requires_grad_(True)
            for _ in range(2):
                trainer.step((X, Y))
            trainer.wait()
            plain_loop(twin, optimizer, [(X, Y)] * 2)
            assert_same(net, twin)
            assert int(net[1].num_batches_tracked) == 2 * thawed  # type: ignore[arg-type]
    assert facts(net) == facts(twin)


def test_a_mode_that_the_stages_are_not_cut_for_is_refused() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(12, 16), Scaled()), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
    with Trainer(net, config=TrainConfig(plan="none", stages=2), example=X) as trainer:
        trainer.step((X, Y))
        trainer.wait()
        net[0].eval()
        with pytest.raises(UsageError, match=r"0 is in evaluation mode, and the stages are cut for training mode"):
            trainer.step((X, Y))
        net.train()
        trainer.step((X, Y))
        net.eval()
        with pytest.raises(UsageError, match=r"Sequential is in evaluation mode, and the stages"):
            trainer.step((X, Y))
