"""SGD on signs and factors as they were received, against decoding them first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import TensorSpec
from hybridpar.compress.codecs.onebit import OneBit, RowSigns, Signs
from hybridpar.compress.codecs.powersgd import FactorProduct
from hybridpar.compress.exchange import Exchange
from hybridpar.compress.quantised import QuantisedCoder
from hybridpar.sync.kernels import functions, step_sgd_of_product, step_sgd_of_signs
from hybridpar.sync.pieces import Sgd
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


def received(shape: tuple[int, ...], meet: str, workers: int) -> tuple[list[Signs], torch.Tensor]:
    """What came of an exchange on one worker, as it is and decoded."""
    generator = torch.Generator().manual_seed(3)
    coders = [
        OneBit(meet=meet, least=1).bind(TensorSpec("w", shape, rank, workers, average=False)) for rank in range(workers)
    ]
    gradients = [torch.randn(shape, generator=generator).flatten() for _ in range(workers)]
    outs = [torch.empty_like(one) for one in gradients]
    exchanges = [Exchange([coder]) for coder in coders]
    run_together(exchanges, [[one] for one in gradients], [[one] for one in outs])
    coder = coders[-1].current
    assert isinstance(coder, QuantisedCoder)
    assert isinstance(coder.quantiser, RowSigns)
    length = coder.quantiser.length(coder.spec.count)
    return [Signs(start, stop - start, length, messages) for start, stop, messages in coder.messages()], outs[-1]


def compare(options: dict[str, Any], gradient: Tensor, step: Callable[..., bool], *message: Any) -> None:
    """A step on a message, and one on the gradient that it stands for, are equal bit for bit."""
    if not functions():
        pytest.skip("no kernels on this machine")
    sgd = Sgd(**{**NONE, **options})
    generator = torch.Generator().manual_seed(4)
    ours, momentum = (torch.randn(gradient.numel(), generator=generator) for _ in range(2))
    theirs, other = ours.clone(), momentum.clone()
    squares = torch.full((), 7.0, dtype=torch.float64)
    assert step(ours, momentum if sgd.momentum else None, *message, sgd, squares)
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
    signs, gradient = received(shape, meet, workers)
    compare(options, gradient * 0.5, step_sgd_of_signs, signs, 0.5)


def test_groups_that_fill_no_vectors_and_many_messages_are_left_to_torch() -> None:
    sgd = Sgd(**{**NONE, **OPTIONS[0]})
    for shape, workers in (((4, 33), 2), ((4, 32), 3)):
        signs, gradient = received(shape, "gather", workers)
        ours = torch.zeros(gradient.numel())
        assert not step_sgd_of_signs(ours, None, signs, 1.0, sgd, torch.zeros((), dtype=torch.float64))
        assert not ours.any()


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 32), (9, 48), (130, 16)])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_on_factors_equals_one_on_their_product(
    options: dict[str, Any], shape: tuple[int, int], rank: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    product = FactorProduct(*(torch.randn(rank, side, generator=generator) for side in shape))
    gradient = torch.empty(shape)
    assert kernels.powersgd_product(product.left, product.right, gradient, 3.0)
    compare(options, gradient.view(-1) * 0.5, step_sgd_of_product, product, 3.0, 0.5)


def test_factors_of_other_sizes_are_left_to_torch() -> None:
    sgd = Sgd(**{**NONE, **OPTIONS[0]})
    for rank, columns in ((5, 32), (2, 33)):
        ours, product = torch.zeros(8 * columns), FactorProduct(torch.ones(rank, 8), torch.ones(rank, columns))
        assert not step_sgd_of_product(ours, None, product, 1.0, 1.0, sgd, torch.zeros((), dtype=torch.float64))
        assert not ours.any()
