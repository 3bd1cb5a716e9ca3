"""Clipping of gradients: by their global norm, by value, and adaptive gradient clipping.

The last two act on each parameter by itself, so a stage of a pipeline, or a parameter server, clips its own gradients,
once they are summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

#: Norm that a unit's weights are taken to have at least (Brock et al. 2021, equation 3).
_LEAST_NORM = 1e-3


def clip_factor(squares: Tensor, limit: float) -> Tensor | None:
    """The factor by which gradients are clipped to a norm; None where the host knows that it is 1."""
    # The same guard against division by zero as torch.nn.utils.clip_grad_norm_.
    factor = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    if factor.device.type == "cpu" and (not math.isfinite(float(squares)) or float(factor) == 1.0):
        return None
    return factor


@torch.no_grad()
def clip_each(parameters: Iterable[nn.Parameter], mode: str, limit: float) -> None:
    """Clip the gradient of each parameter, in place."""
    if mode == "value":
        torch.nn.utils.clip_grad_value_(parameters, limit)
        return
    for parameter in parameters:
        if parameter.grad is not None:
            clip_adaptively(parameter.grad, parameter, limit)


def clip_adaptively(gradient: Tensor, weight: Tensor, factor: float) -> None:
    """Scale down, in place, what of a gradient is large for the weights that it moves.

    The gradient of a unit, one row of a matrix or one filter, is scaled to the norm max(|w|, 0.001) * factor of its
    weights where it is longer (Brock et al. 2021, "High-performance large-scale image recognition without
    normalization", equation 3). A vector is one unit.
    """
    longest = _unit_norm(weight).clamp_(min=_LEAST_NORM).mul_(factor)
    norm = _unit_norm(gradient)
    clipped = gradient * (longest / norm.clamp(min=1e-6))
    gradient.copy_(torch.where(norm < longest, gradient, clipped))


def _unit_norm(values: Tensor) -> Tensor:
    over = tuple(range(1, values.ndim)) or None
    norm: Tensor = torch.linalg.vector_norm(values, dim=over, keepdim=values.ndim > 1)
    return norm
