"""SGD on signs and factors as they were received, against decoding them first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import TensorSpec
from hybridpar.compress.codecs.onebit import OneBit
from hybridpar.compress.exchange import Exchange
from hybridpar.compress.received import Factors, Received, Sgd, functions
from tests.compress.team import run_together

OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.1, "momentum": 0.0},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "maximize": True},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "on")
    caches = functions, kernels.table
    for one in caches:
        one.cache_clear()
    yield
    monkeypatch.undo()
    for one in caches:
        one.cache_clear()


NONE = {"weight_decay": 0.0, "nesterov": False, "maximize": False}


def signs_of(shape: tuple[int, ...], meet: str, workers: int) -> tuple[Received, torch.Tensor]:
    """What came of an exchange on one worker, as it is and decoded."""
    generator = torch.Generator().manual_seed(3)
    coders = [
        OneBit(meet=meet, least=1).coder(TensorSpec("w", shape, rank, workers, average=False))
        for rank in range(workers)
    ]
    gradients = [torch.randn(shape, generator=generator).flatten() for _ in range(workers)]
    outs = [torch.empty_like(one) for one in gradients]
    exchanges = [Exchange([coder]) for coder in coders]
    run_together(exchanges, [[one] for one in gradients], [[one] for one in outs])
    return exchanges[-1].received[0], outs[-1]


def product_of(left: torch.Tensor, right: torch.Tensor, scale: float) -> Received:
    coder = OneBit().coder(TensorSpec("w", (left.shape[1], right.shape[1])))  # which nobody asks
    return Factors(coder, lambda: (left, right), scale)


def compare(options: dict[str, Any], gradient: Tensor, received: Received) -> None:
    """Steps on half of what was received and on half of the gradient that it stands for are equal bit for bit."""
    if not functions():
        pytest.skip("no kernels on this machine")
    sgd = Sgd(**{**NONE, **options}, factor=0.5)
    generator = torch.Generator().manual_seed(4)
    ours, momentum = (torch.randn(gradient.numel(), generator=generator) for _ in range(2))
    theirs, other = ours.clone(), momentum.clone()
    squares = torch.full((), 7.0, dtype=torch.float64)
    assert received.sgd(ours, momentum if sgd.momentum else None, sgd, squares)
    gradient = gradient * 0.5
    sgd.step(theirs, gradient, other if sgd.momentum else None)
    assert torch.equal(ours, theirs)
    assert torch.equal(momentum, other)
    assert squares.item() == pytest.approx(gradient.double().square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("shape", [(1, 32), (7, 48), (16, 3, 4, 4), (130, 16)])
@pytest.mark.parametrize(("meet", "workers"), [("gather", 2), ("shard", 3)])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_on_signs_equals_one_on_what_they_decode_to(
    options: dict[str, Any], meet: str, workers: int, shape: tuple[int, ...]
) -> None:
    signs, gradient = signs_of(shape, meet, workers)
    compare(options, gradient, signs)
    assert signs.is_finite()


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 32), (9, 48), (130, 16)])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_on_factors_equals_one_on_their_product(
    options: dict[str, Any], shape: tuple[int, int], rank: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    left, right = (torch.randn(rank, side, generator=generator) for side in shape)
    gradient = torch.empty(shape)
    assert kernels.powersgd_product(left, right, gradient, 3.0)
    compare(options, gradient.view(-1), product_of(left, right, 3.0))
