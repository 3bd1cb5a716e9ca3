"""Why: on one worker no gradient travels, and whatever stands between autograd and the optimizer is pure cost.

Same calls as `GradientReducer`, none of its machinery: only the squared norm is taken, if somebody needs it, in one
pass at the speed of memory after the backward pass, and not in hooks, which would run once per parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.sync.compression import Compression
from hybridpar.sync.control import Pending
from hybridpar.sync.figures import SyncCosts


class LocalGradients:
    """Gradients of a world of one worker. See `GradientReducer` for the calls of a step.

    Args:
        parameters: The model's parameters by name.
        device: Where sums are kept.
        measure: Whether to take the sums of squares.
    """

    layout = 0
    compression: Compression | None = None
    costs: SyncCosts | None = None

    def __init__(self, parameters: Mapping[str, nn.Parameter], device: torch.device, measure: bool) -> None:
        self._parameters = list(parameters.values())
        self._device = device
        self._measure = measure

    def open(self) -> None:
        """Start a step; gradients of the step before are forgotten."""
        for parameter in self._parameters:
            parameter.grad = None

    def set_rate(self, rate: float) -> None:
        """No codec is there to be told."""

    def release(self, report: Pending) -> None:
        """The next backward pass is the last of the step: nothing waits for it here."""

    def flush(self) -> list[bool]:
        """Nothing is left to send, and nobody to agree with on who used what."""
        return []

    def wait(self) -> tuple[Tensor, int]:
        """Sum of squares of all gradients, and the bytes sent: none.

        The sum is not finite exactly where an element is not; where float32 overflows it is taken again in float64.
        """
        gradients = [parameter.grad.detach() for parameter in self._parameters if parameter.grad is not None]
        if not self._measure or not gradients:
            return torch.zeros(1, dtype=torch.float64, device=self._device), 0
        total = self._sum_of_squares(gradients, None)
        if total.device.type == "cpu" and not bool(torch.isfinite(total)):
            total = self._sum_of_squares(gradients, torch.float64)
        return total, 0

    def _sum_of_squares(self, gradients: list[Tensor], dtype: torch.dtype | None) -> Tensor:
        norms = torch._foreach_norm(gradients, 2, dtype)
        if any(norm.device != self._device for norm in norms):
            norms = tuple(norm.to(self._device) for norm in norms)
        return torch.stack(norms).double().square().sum().reshape(1)

    def bytes_by_parameter(self) -> dict[str, tuple[str, int, int]]:
        """Nothing is sent."""
        return {}

    def close_step(self) -> None:
        """End the step."""

    def keep_used(self, users: Tensor, used: list[bool]) -> list[str]:
        """Autograd leaves the gradient of an unused parameter None by itself."""
        return []

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a 0-d factor, in place."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))

    def state_dict(self) -> dict[str, Any]:
        """Nothing has been agreed on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore: the order of buckets means nothing here."""

    def close(self) -> None:
        """Gradients stay as they are."""
