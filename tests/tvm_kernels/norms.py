"""A training step, and float64 results and gradients of BatchNorm with an activation, computed by torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpar.tvm_kernels.batch_norm_act import STOCK

EPS = 1e-5


def images(*shape: int, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape) + mean).contiguous(memory_format=torch.channels_last)


def parameters(channels: int) -> tuple[Tensor, Tensor]:
    return torch.rand(channels) + 0.5, torch.randn(channels)


def truth(
    x: Tensor,
    gradient: Tensor,
    weight: Tensor,
    bias: Tensor,
    act: str,
    running: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Result and gradients of x, weight and bias; by running statistics where they are given."""
    own = [one.detach().to(dtype).requires_grad_() for one in (x, weight, bias)]
    mean, variance = (None, None) if running is None else (one.to(dtype) for one in running)
    y = STOCK[act](functional.batch_norm(own[0], mean, variance, own[1], own[2], running is None, 0.0, EPS))
    return [y.detach(), *torch.autograd.grad(y, own, gradient.to(dtype))]


def error(found: Tensor, true: Tensor) -> float:
    """The largest, relative to the largest value."""
    return float((found.double() - true.double()).abs().max() / true.double().abs().max().clamp(min=1e-30))


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Result, gradients, and buffers, after a training step's forward and backward."""
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), *model.buffers()]
