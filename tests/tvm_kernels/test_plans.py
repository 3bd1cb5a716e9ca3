"""Tests the cached decision which kernel runs for a call; calls of another form need their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridpar.errors import KernelError
from hybridpar.tvm_kernels import op
from hybridpar.tvm_kernels.choice import Choices, active_choices
from hybridpar.tvm_kernels.op import depthwise_conv2d
from hybridpar.tvm_kernels.shapes import ConvShape, Direction
from tests.tvm_kernels.standin import StandIn, all_records, tuned

SHAPE = ConvShape.parse("2x8x9x9 k3x3 s1x1 p1x1 d1x1")
LAST = torch.channels_last


def operands(grads: bool = True) -> tuple[Tensor, Tensor]:
    x = torch.randn(SHAPE.batch, SHAPE.channels, SHAPE.height, SHAPE.width).contiguous(memory_format=LAST)
    return x.requires_grad_(grads), torch.randn(SHAPE.channels, 1, *SHAPE.kernel, requires_grad=grads)


def in_use() -> Choices:
    choices = active_choices()
    assert choices is not None
    return choices


def test_a_form_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = operands()
    with tuned(all_records(SHAPE)) as kernels:
        depthwise_conv2d(x, weight, None, 1, 1).sum().backward()

        def never(*_: object) -> None:
            raise AssertionError("decided again")

        monkeypatch.setattr(Choices, "decide", never)
        monkeypatch.setattr(op, "_made", never)
        for _ in range(3):
            depthwise_conv2d(x * 1, weight, None, (1, 1), [1, 1]).sum().backward()
        assert len(in_use().plans) == 1
    assert kernels.calls == dict.fromkeys(Direction, 4)


def test_an_error_of_strict_says_how_to_get_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "strict")
    with tuned([]), pytest.raises(KernelError) as error:
        depthwise_conv2d(*operands(), None, 1, 1)
    assert f"`{SHAPE.text}`" in error.value.fix
    assert "hybridpar tune --shapes FILE --threads 1 -o k.jsonl" in error.value.fix


@pytest.mark.parametrize("align", [4, 64])
def test_addresses_are_looked_at_in_every_call(align: int) -> None:
    x, weight = operands()
    padded = torch.empty(x.numel() + 1)
    shifted = padded[1:].as_strided(x.shape, x.stride()).copy_(x.detach())
    right = torch.autograd.grad(
        functional.conv2d(x.double(), weight.double(), None, 1, 1, groups=8).square().sum(), (x, weight)
    )
    with tuned(all_records(SHAPE), StandIn(align=align)) as kernels:
        for one in (x.detach(), shifted):
            one = one.requires_grad_()
            out = depthwise_conv2d(one, weight, None, 1, 1)
            for found, true in zip(torch.autograd.grad(out.square().sum(), (one, weight)), right, strict=True):
                torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-4)
        assert len(in_use().plans) == 1
    assert kernels.calls[Direction.FORWARD] == (2 if align == 4 else 1)


def test_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_MOST_PLANS", 3)
    weight = torch.randn(8, 1, 3, 3)
    with tuned([]), torch.no_grad():
        for size in range(4, 14):
            depthwise_conv2d(torch.randn(1, 8, size, size), weight, None, 1, 1)
        assert len(in_use().plans) <= 3
