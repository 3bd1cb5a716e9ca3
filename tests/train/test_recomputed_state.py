"""What a module keeps, in stages and where their forward passes run twice: as in a plain loop, or refused by name."""

from __future__ import annotations

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


def trained(kind: Callable[[], nn.Module], *, schedule: str = "1f1b", recompute: tuple[int, ...] = ()) -> nn.Module:
    model, options = make(kind), {"schedule": schedule, "recompute": recompute}
    config = TrainConfig(plan="none", stages=2, micro_batches=3, **options)
    with Trainer(model, optimizer=sgd, config=config, example=IMAGES[:2]) as trainer:
        for _ in range(3):
            trainer.step((IMAGES, LABELS))
    return model


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", [(), (0, 1)], ids=["once", "twice"])
@pytest.mark.parametrize(
    "kind",
    [
        *("buffer_written_always", "buffer_assigned_always", "moving_mean_by_data", "moving_scale"),
        *("counter_used", "tensor_as_attribute"),
    ],
)
def test_a_state_is_as_in_a_plain_loop(kind: str, recompute: tuple[int, ...], schedule: str) -> None:
    state = trained(PIECES[kind], schedule=schedule, recompute=recompute).state_dict()
    expected = make(PIECES[kind])
    plain_loop(expected, sgd(expected), [(IMAGES, LABELS)] * 3, parts=3)
    for name, value in expected.state_dict().items():
        if "running" not in name and "tracked" not in name:  # statistics are pooled over micro-batches
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_what_is_not_put_back_is_refused_where_passes_run_twice() -> None:
    drawing = PIECES["noise_of_a_generator"]
    trained(drawing)
    with pytest.raises(UsageError, match=r"\(noise_of_a_generator\), whose forward changes its attribute 'generator'"):
        trained(drawing, recompute=(0, 1))
    trained(Rolling)
    with pytest.raises(UsageError, match="--recompute 0 with a model that draws random numbers of Python"):
        trained(Rolling, recompute=(0, 1))


def test_what_no_order_of_passes_can_keep_is_refused_by_name() -> None:
    with pytest.raises(TraceError, match=r"torch\.utils\.checkpoint"):
        trained(CheckpointedNorm, schedule="gpipe")
    with pytest.raises(TraceError, match=r"'2\.lin\.weight', of 2\.lin"):
        trained(PIECES["weight_clamped"], schedule="gpipe")
