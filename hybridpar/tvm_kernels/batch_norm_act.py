"""BatchNorm and the activation behind it as one operation, which reads memory half as often as two.

Where the kernels can do it (float32 on a CPU, channels last), `fused_batch_norm_act` computes it; everything else is
torch's `batch_norm` and the activation: other dtypes, devices and layouts, and what torch refuses. Fewer tensors are
kept for backward: the input alone, where torch also keeps what the activation was given or gave.

A second derivative is refused: the kernels have none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.schedules.norm_rows import ACTIVATIONS

#: The arguments of both functions, in order; `stock_batch_norm_act` says what they are.
Given = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, bool, float, float, str]

#: What torch does for each activation.
STOCK: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "silu": functional.silu,
}
assert tuple(STOCK) == ACTIVATIONS

#: Those whose backward needs nothing but the result.
_IN_PLACE = {"relu": partial(functional.relu, inplace=True), "relu6": partial(functional.relu6, inplace=True)}


def stock_batch_norm_act(*given: *Given) -> Tensor:
    """BatchNorm and activation by torch's own operations."""
    x, weight, bias, mean, variance, training, momentum, eps, act = given
    z = functional.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
    return _IN_PLACE.get(act, STOCK[act])(z)


def kernels_fit(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None, training: bool
) -> bool:
    """Whether dtypes, sizes and layouts are such that kernels can compute it. It loads no kernels."""
    if x.dtype is not torch.float32 or x.ndim != 4 or not x.is_cpu:
        return False
    channels = x.shape[1]
    if channels == 0 or x.numel() < 2 * channels or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    if (mean is None) is not (variance is None) or (mean is None and not training):
        return False
    return all(
        given is None
        or (given.dtype is torch.float32 and given.is_cpu and given.shape == (channels,) and given.is_contiguous())
        for given in (weight, bias, mean, variance)
    )


def fused_batch_norm_act(*given: *Given) -> Tensor:
    """BatchNorm and activation by the kernels, for operands that `kernels_fit` accepts."""
    x, weight, bias, *_ = given
    if torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    ):
        result: Tensor = _BatchNormAct.apply(*given)
        return result
    return norm_kernels.forward(*given)[0]


class _BatchNormAct(torch.autograd.Function):
    """The kernels called directly, as torch's dispatcher would take most of the time of a small layer."""

    @staticmethod
    def forward(ctx: Any, *given: *Given) -> Tensor:
        x, *_, training, _, _, ctx.act = given
        y, statistics = norm_kernels.forward(*given)
        ctx.save_for_backward(x, statistics)
        ctx.fixed = not training
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, statistics = ctx.saved_tensors
        grad_y = grad_y.contiguous(memory_format=torch.channels_last)
        gradients = norm_kernels.backward(grad_y, x, statistics, ctx.act, ctx.fixed)
        needed = zip(gradients, ctx.needs_input_grad, strict=False)
        return (*(gradient if is_needed else None for gradient, is_needed in needed), *(None,) * 6)
