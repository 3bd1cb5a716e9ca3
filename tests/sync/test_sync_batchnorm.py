"""Tests synchronised BatchNorm: R replicas of b samples give what one replica of R b samples gives.

Outputs and gradients are compared.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar import TrainConfig
from hybridpar.comm.world import World
from hybridpar.sync.batchnorm import normalise_over_replicas
from hybridpar.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.small_nets import SmallNet

SHAPES = {"images": (6, 3, 4, 5), "vectors": (6, 3), "volumes": (6, 3, 2, 2, 2)}
CUTS = {"even": [2, 2, 2], "uneven": [1, 2, 3]}


def data(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(shape) * 3 + 100, torch.randn(shape), torch.rand(shape[1]) + 0.5, torch.randn(shape[1])


def stock(shape: tuple[int, ...], affine: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    x, gradient, weight, bias = (tensor.to(dtype) for tensor in data(shape))
    x.requires_grad_()
    w, b = (weight.clone().requires_grad_(), bias.clone().requires_grad_()) if affine else (None, None)
    y = nn.functional.batch_norm(x, None, None, w, b, True, 0.0, 1e-5)
    y.backward(gradient)
    return [y.detach(), x.grad, *([w.grad, b.grad] if w is not None and b is not None else [])]  # type: ignore[list-item]


def one_rank(world: World, shape: tuple[int, ...], cut: list[int], affine: bool) -> list[Any]:
    x, gradient, weight, bias = (tensor.double() for tensor in data(shape))
    mine = x.split(cut)[world.rank].clone().requires_grad_()
    w, b = (weight.clone().requires_grad_(), bias.clone().requires_grad_()) if affine else (None, None)
    y, mean, variance = normalise_over_replicas(mine, w, b, 1e-5, world.lane_groups[0])
    y.backward(gradient.split(cut)[world.rank])
    dims = [0, *range(2, mine.ndim)]
    torch.testing.assert_close(mean, mine.detach().mean(dims))
    if mine.numel() > mine.shape[1]:
        torch.testing.assert_close(variance, mine.detach().var(dims))
    return [y.detach(), mine.grad, *([w.grad, b.grad] if w is not None and b is not None else [])]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_replicas_normalise_as_one_batch(shape: str, cut: str, affine: bool) -> None:
    parts = run_ranks(
        one_rank, 3, SHAPES[shape], [1, 2, 3] if shape == "images" and cut == "uneven" else CUTS["even"], affine
    )
    expected = stock(SHAPES[shape], affine)
    for whole, pieces in zip(expected[:2], zip(*(part[:2] for part in parts), strict=True), strict=True):
        torch.testing.assert_close(torch.cat(pieces), whole)
    for whole, pieces in zip(expected[2:], zip(*(part[2:] for part in parts), strict=True), strict=True):
        torch.testing.assert_close(sum(pieces), whole)


def trained(world: World, batch_norm: str, micro_batches: int, share: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = SmallNet()
    torch.manual_seed(1)
    x, y = torch.randn(12, 3, 8, 8), torch.randint(0, 10, (12,))
    if share:
        x, y = x.chunk(world.size)[world.rank], y.chunk(world.size)[world.rank]
    config = TrainConfig(batch_norm=batch_norm, micro_batches=micro_batches, lr=0.1)  # type: ignore[arg-type]
    with Trainer(model, config=config, world=world) as trainer:
        for _ in range(3):
            assert trainer.step((x, y)).outcome.committed
        return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(
            tensor, other[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_replicas_train_as_one_replica_with_the_whole_batch(micro_batches: int) -> None:

    states = run_ranks(trained, 2, "sync", micro_batches, True)
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    if micro_batches == 1:
        assert_close(states[0], trained(World(), "pooled", 1, False))
