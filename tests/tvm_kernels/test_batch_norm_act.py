"""Tests BatchNorm fused with an activation against float64 and against the two operations of torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.batch_norm_act import fused_batch_norm_act as norm_act
from hybridpar.tvm_kernels.batch_norm_act import kernels_fit
from hybridpar.tvm_kernels.schedules.norm_rows import ACTIVATIONS
from tests.tvm_kernels.norms import EPS, error, images, parameters, truth

pytestmark = pytest.mark.usefixtures("kernels")

#: Odd sizes, channels that fill no vector, one channel, less than a wide row, a wide row and a rest, several segments.
SHAPES = [
    (2, 1, 1, 1),
    (3, 1, 3, 3),
    (1, 3, 5, 7),
    (4, 17, 9, 9),
    (2, 24, 12, 13),
    (33, 40, 4, 5),
    (1, 1000, 3, 3),
    (8, 32, 20, 20),
    (3, 96, 31, 17),
]


def fused(
    x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor, act: str, running: tuple[Tensor, Tensor] | None = None
) -> list[Tensor]:
    own = [one.detach().requires_grad_() for one in (x, weight, bias)]
    y = norm_act(*own, *(running or (None, None)), running is None, 0.0, EPS, act)
    assert type(y.grad_fn).__name__ == "_BatchNormActBackward", "the kernels did not run"
    return [y.detach(), *torch.autograd.grad(y, own, gradient)]


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_float64(shape: tuple[int, ...], act: str) -> None:
    x, gradient = images(*shape), images(*shape)
    weight, bias = parameters(shape[1])
    results = fused(x, gradient, weight, bias, act)
    expected, stock = truth(x, gradient, weight, bias, act), truth(x, gradient, weight, bias, act, dtype=torch.float32)
    assert results[0].stride() == x.stride()
    for found, true, other in zip(results, expected, stock, strict=True):
        # With two values the gradient is the difference of equals; neither side has it.
        assert error(found, true) < max(2e-6, 4 * error(other, true) if math.prod(shape) == 2 else 0)


@pytest.mark.parametrize("mean", [1e3, 1e4, -1e6])
@pytest.mark.parametrize("act", ["none", "relu6", "silu"])
def test_a_large_mean_costs_no_digits(mean: float, act: str) -> None:
    x, gradient = images(4, 24, 20, 20, mean=mean), images(4, 24, 20, 20)
    weight, bias = parameters(24)
    results, expected = fused(x, gradient, weight, bias, act), truth(x, gradient, weight, bias, act)
    assert max(error(found, true) for found, true in zip(results, expected, strict=True)) < 2e-6


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int) -> None:
    x, gradient = images(4, 72, 30, 30), images(4, 72, 30, 30)
    weight, bias = parameters(72)
    assert norm_kernels.plan_rows(4 * 30 * 30, 72).segments >= 3
    alone = fused(x, gradient, weight, bias, "silu")
    torch.set_num_threads(threads)
    try:
        for one, other in zip(alone, fused(x, gradient, weight, bias, "silu"), strict=True):
            assert torch.equal(one, other)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("size", [1, 4096])
def test_results_past_the_caches_are_the_same(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, gradient = images(2, 24, 15, 9), images(2, 24, 15, 9)
    weight, bias = parameters(24)
    for act in ACTIVATIONS:
        near = fused(x, gradient, weight, bias, act)
        with monkeypatch.context() as patch:
            patch.setattr(norm_kernels, "FAR", size)
            for one, other in zip(near, fused(x, gradient, weight, bias, act), strict=True):
                assert torch.equal(one, other)


def test_views_that_are_not_aligned() -> None:
    padded = torch.randn(1 + 2 * 5 * 5 * 24)
    x = padded[1:].view(2, 5, 5, 24).permute(0, 3, 1, 2)
    assert x.data_ptr() % 16 == 4
    weight, bias = parameters(24)
    gradient = torch.randn(x.shape)  # and one that lies otherwise
    results, expected = fused(x, gradient, weight, bias, "silu"), truth(x, gradient, weight, bias, "silu")
    assert max(error(found, true) for found, true in zip(results, expected, strict=True)) < 2e-6


# ------------------------------------------------------------------------------------------------- statistics and modes


@pytest.mark.parametrize("momentum", [0.1, 0.25, 1.0])
def test_running_statistics_move_as_torchs(momentum: float) -> None:
    mine, theirs = ([torch.full((24,), 0.5), torch.full((24,), 2.0)] for _ in range(2))
    for _ in range(3):
        x = images(3, 24, 5, 5, mean=2)
        norm_act(x, None, None, *mine, True, momentum, EPS, "none")
        functional.batch_norm(x, *theirs, None, None, True, momentum, EPS)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_evaluation_and_frozen_statistics(act: str) -> None:
    x, gradient = images(2, 40, 6, 7, mean=3), images(2, 40, 6, 7)
    weight, bias = parameters(40)
    running = torch.randn(40) + 3, torch.rand(40) + 0.5
    kept = [one.clone() for one in running]
    results, expected = fused(x, gradient, weight, bias, act, running), truth(x, gradient, weight, bias, act, running)
    assert max(error(found, true) for found, true in zip(results, expected, strict=True)) < 2e-6
    assert all(map(torch.equal, running, kept))
    with torch.no_grad():
        assert torch.equal(norm_act(x, weight, bias, *running, False, 0.1, EPS, act), results[0])


def test_frozen_parameters_and_none() -> None:
    x = images(2, 16, 5, 5).requires_grad_()
    weight, bias = parameters(16)
    gradient = images(2, 16, 5, 5)
    (frozen,) = torch.autograd.grad(norm_act(x, weight, bias, None, None, True, 0.0, EPS, "relu"), x, gradient)
    assert error(frozen, truth(x, gradient, weight, bias, "relu")[1]) < 2e-6
    (plain,) = torch.autograd.grad(norm_act(x, None, None, None, None, True, 0.0, EPS, "relu"), x, gradient)
    assert error(plain, truth(x, gradient, torch.ones(16), torch.zeros(16), "relu")[1]) < 2e-6


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 200])
def test_nan_and_infinity_as_torch(value: float, place: int, act: str) -> None:
    x = images(2, 16, 12, 12)
    x.permute(0, 2, 3, 1).view(-1, 16)[place, 3] = value
    gradient = images(2, 16, 12, 12)
    weight, bias = parameters(16)
    mine, theirs = ([torch.zeros(16), torch.ones(16)] for _ in range(2))
    for running, training in ((None, True), ((torch.zeros(16), torch.ones(16)), False)):
        found = fused(x, gradient, weight, bias, act, running)
        expected = truth(x, gradient, weight, bias, act, running, torch.float32)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
        if training:
            norm_act(x, weight, bias, *mine, True, 0.1, EPS, act)
            functional.batch_norm(x, *theirs, weight, bias, True, 0.1, EPS)
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one, other, equal_nan=True)


# ------------------------------------------------------------------------------------------------------ falling back


def test_what_kernels_cannot_do() -> None:
    weight, bias = parameters(4)
    cases = [
        (torch.randn(2, 4, 3, 3), weight, bias),  # another layout
        (images(2, 4, 3, 3).double(), weight.double(), bias.double()),
        (images(2, 4, 3, 3).bfloat16(), weight, bias),
        (images(2, 4, 6, 6)[:, :, ::2], weight, bias),
        (torch.randn(5, 4), weight, bias),
        (images(2, 8, 3, 3), torch.rand(16)[::2], None),
        (torch.randn(0, 4, 3, 3), weight, bias),
        (images(1, 4, 1, 1), weight, bias),  # one value per channel
    ]
    assert kernels_fit(images(2, 4, 3, 3), weight, bias, None, None, True)
    for x, *own in cases:
        assert not kernels_fit(x, own[0], own[1], None, None, True)
    assert not kernels_fit(images(2, 4, 3, 3), weight, bias, None, None, False), "no statistics to normalise by"


def test_second_derivatives_are_refused() -> None:
    x = images(2, 4, 3, 3).requires_grad_()
    y = norm_act(x, None, None, None, None, True, 0.1, EPS, "silu")
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_changing_the_input_in_between_is_noticed() -> None:
    x = images(2, 4, 3, 3).requires_grad_()
    inner = x * 1
    y = norm_act(inner, None, None, None, None, True, 0.1, EPS, "relu")
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
