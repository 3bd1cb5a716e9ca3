"""Gradients of a stage that has no replicas: nothing is sent, only their norm is taken.

The norm is taken in one pass after the backward pass, where somebody needs it: hooks would run once per parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class LocalGradients:
    """What `GradientReducer` does for a stage with replicas, where there are none.

    Args:
        parameters: The stage's parameters by name.
        device: Where sums are kept.
        measure: Whether to take the sums of squares.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], device: torch.device, measure: bool) -> None:
        self._parameters = list(parameters.values())
        self._device = device
        self._measure = measure

    def start(self) -> None:
        """Start a step: gradients of the step before are forgotten."""
        for parameter in self._parameters:
            parameter.grad = None

    def squares(self) -> Tensor:
        """Sum of squares of all gradients, 0-d float64; 0 where it is not needed.

        It is not finite exactly where an element is not; where float32 overflows it is taken again in float64.
        """
        gradients = [parameter.grad.detach() for parameter in self._parameters if parameter.grad is not None]
        if not self._measure or not gradients:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        total = self._sum_of_squares(gradients, None)
        if total.device.type == "cpu" and not bool(torch.isfinite(total)):
            total = self._sum_of_squares(gradients, torch.float64)
        return total

    def _sum_of_squares(self, gradients: list[Tensor], dtype: torch.dtype | None) -> Tensor:
        norms = torch._foreach_norm(gradients, 2, dtype)
        if any(norm.device != self._device for norm in norms):
            norms = tuple(norm.to(self._device) for norm in norms)
        return torch.stack(norms).double().square().sum()

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a 0-d factor, in place."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))
