"""Why: on one worker no gradient travels, and whatever stands between autograd and the optimizer is pure cost.

Same calls as `GradientReducer`, none of its machinery: only the squared norm is taken, if somebody needs it. A large
gradient is squared in its hook, while it is still in the cache; the small ones together at the end, because a hook
costs more than they do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hybridpar.pipeline.buckets import flat_view
from hybridpar.pipeline.control import Pending
from hybridpar.pipeline.reducer import sum_of_squares

#: Bytes from which on a gradient is worth a hook of its own.
LARGE_BYTES = 1 << 18


class LocalGradients:
    """Gradients of a world of one worker. See `GradientReducer` for the calls of a step.

    Args:
        parameters: The model's parameters by name.
        device: Where sums are kept.
        measure: Whether to take the sums of squares.
    """

    layout = 0

    def __init__(self, parameters: Mapping[str, nn.Parameter], device: torch.device, measure: bool) -> None:
        self._parameters = list(parameters.values())
        self._device = device
        self._measure = measure
        self._last = False
        self._squares: list[Tensor] = []
        self._squared: set[int] = set()
        self._hooks: dict[int, RemovableHandle] = {}

    def open(self) -> None:
        """Start a step; gradients of the step before are forgotten."""
        for parameter in self._parameters:
            parameter.grad = None
        self._last = False
        self._squares, self._squared = [], set()
        if self._measure:
            self._hook_large()

    def release(self, report: Pending) -> None:
        """The next backward pass is the last of the step."""
        self._last = True

    def flush(self) -> list[bool]:
        """Nothing is left to send, and nobody to agree with on who used what."""
        return []

    def wait(self) -> tuple[Tensor, int]:
        """Sums of squares, and the bytes sent: none."""
        if not self._measure:
            return torch.zeros(1, dtype=torch.float64, device=self._device), 0
        rest = [
            parameter.grad
            for parameter in self._parameters
            if parameter.grad is not None and id(parameter) not in self._squared
        ]
        if rest:
            norms = torch.stack(torch._foreach_norm([gradient.detach() for gradient in rest], 2, torch.float64))
            self._squares.append(norms.to(self._device).square().sum())
        if not self._squares:
            return torch.zeros(1, dtype=torch.float64, device=self._device), 0
        return torch.stack(self._squares), 0

    def close_step(self) -> None:
        """End the step."""

    def keep_used(self, users: Tensor, used: list[bool]) -> None:
        """Autograd leaves the gradient of an unused parameter None by itself."""

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
        """Remove all hooks. Gradients stay as they are."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def take_squares(self, parameter: Tensor) -> None:
        """Called by autograd when a large gradient has been accumulated."""
        gradient = parameter.grad
        if not self._last or gradient is None or gradient.is_sparse or id(parameter) in self._squared:
            return
        self._squared.add(id(parameter))
        with torch.no_grad():
            self._squares.append(sum_of_squares(flat_view(gradient)).to(self._device))

    def _hook_large(self) -> None:
        me = weakref.ref(self)
        for parameter in self._parameters:
            size = parameter.numel() * parameter.element_size()
            if size >= LARGE_BYTES and parameter.requires_grad and id(parameter) not in self._hooks:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks[id(parameter)] = register(_make_hook(me))


def _make_hook(local: weakref.ref[LocalGradients]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        target = local()
        if target is not None:
            target.take_squares(parameter)

    return hook
