"""What a module keeps that cannot be put back where forward passes run twice, refused by name."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridpar import TrainConfig, Trainer
from hybridpar.errors import TraceError, UsageError
from tests.state.pieces import PIECES
from tests.train.training import plain_loop

IMAGES, LABELS = torch.randn(6, 12, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 5


class Rolling(nn.Module):
    """It draws from Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        assert bool(torch.isfinite(x.detach()).all())
        return x + random.random()


class CheckpointedNorm(nn.Module):
    """Its second pass would move the statistics again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.norm, x, use_reentrant=False)
        return y


def make(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(12, 16), nn.ReLU(), kind(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 5))
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(kind: Callable[[], nn.Module], *, schedule: str = "1f1b", recompute: tuple[int, ...] = ()) -> None:
    config = TrainConfig(plan="none", stages=2, micro_batches=3, schedule=schedule, recompute=recompute)
    with Trainer(make(kind), config=config, example=IMAGES[:2]) as trainer:
        for _ in range(3):
            trainer.step((IMAGES, LABELS))


def test_what_is_not_put_back_is_refused_where_passes_run_twice() -> None:
    drawing = PIECES["noise_of_a_generator"]
    train(drawing)
    with pytest.raises(UsageError, match=r"\(noise_of_a_generator\), whose forward changes its attribute 'generator'"):
        train(drawing, recompute=(0, 1))
    train(Rolling)
    with pytest.raises(UsageError, match="--recompute 0 with a model that draws random numbers of Python"):
        train(Rolling, recompute=(0, 1))


def test_what_no_order_of_passes_can_keep_is_refused_by_name() -> None:
    with pytest.raises(TraceError, match=r"torch\.utils\.checkpoint"):
        train(CheckpointedNorm, schedule="gpipe")
    with pytest.raises(TraceError, match=r"'2\.lin\.weight', of 2\.lin"):
        train(PIECES["weight_clamped"], schedule="gpipe")


@pytest.mark.parametrize("layers", [2, 3, 12])
def test_all_is_recomputed_also_of_a_model_with_less_units_than_eight(layers: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(12, 12) for _ in range(layers)))
    twin = copy.deepcopy(net)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    config = TrainConfig(plan="none", recompute=("all",))
    with Trainer(net, optimizer=sgd, config=config, example=IMAGES) as trainer:
        count = min(layers, 8)
        assert (trainer.plan.layout.stages, trainer.plan.pipeline.recompute) == (count, tuple(range(count)))
        for _ in range(2):
            trainer.step((IMAGES, LABELS))
        trainer.wait()
    plain_loop(twin, optimizer, [(IMAGES, LABELS)] * 2)
    for mine, wanted in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted)
