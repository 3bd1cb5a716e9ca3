"""Optimizer steps on pieces of gradients, so that each piece is used while it is in the cache.

A gradient that is the sum of several workers' need not be written to memory: a piece of it is added up in memory that
stays in the cache, and the optimizer's step of that piece follows at once. Torch's fused optimizers treat each element
by itself, so the result is that of one step on whole gradients, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hybridpar.comm.transport import flat_view
from hybridpar.compress.received import Received, Sgd
from hybridpar.sync.buckets import sum_of_squares

#: Elements of a piece for each thread: with gradient, parameter and state it fits in a core's own cache.
PIECE = 1 << 16


@dataclass
class Gradients:
    """The gradients of a step that nobody has written to `.grad` yet.

    Attributes:
        received: What came of each parameter that has a gradient.
        factor: What they are multiplied with, 0-d.
        unmeasured: Whether their norm is wanted and not known yet.
    """

    received: dict[nn.Parameter, Received]
    factor: Tensor | None = None
    unmeasured: bool = False

    def write(self, parameter: nn.Parameter, out: Tensor, start: int = 0) -> None:
        """Write a piece of a parameter's gradient, or all of it where it has no pieces."""
        self.received[parameter].write(out, start)
        if self.factor is not None:
            out.mul_(self.factor.to(out.dtype))

    @torch.no_grad()
    def materialise(self) -> Tensor | None:
        """Write all of them to `.grad`; return their sum of squares where it is wanted."""
        squares = []
        for parameter in self.received:
            parameter.grad = torch.empty_like(parameter)
            flat = flat_view(parameter.grad)
            self.write(parameter, flat)
            if self.unmeasured:
                squares.append(sum_of_squares(flat))
        return torch.stack(squares).sum() if squares else None


def can_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_in_pieces` does what `optimizer.step()` would do.

    It does for SGD, Adam and AdamW of torch in their fused form, without hooks on the step, and for dense parameters on
    a CPU, which all are whose gradients are not written.
    """
    kind = _KINDS.get(type(optimizer))
    hooks: Sequence[Collection[Any]] = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    if kind is None or any(hooks):
        return False
    return all(
        group.get("fused")
        and not group.get("dampening")
        and not group.get("differentiable")
        and not isinstance(group["lr"], Tensor)
        for group in optimizer.param_groups
    )


@torch.no_grad()
def step_in_pieces(optimizer: torch.optim.Optimizer, gradients: Gradients) -> Tensor | None:
    """Step an optimizer on gradients that were not written; return their sum of squares where it is wanted."""
    squares = torch.zeros(len(gradients.received), dtype=torch.float64)
    parts = dict(zip(gradients.received, squares.unbind(), strict=True))
    for group in optimizer.param_groups:
        step = _KINDS[type(optimizer)](optimizer, group, gradients)
        for parameter in group["params"]:
            if parameter in parts:
                step(parameter, parts[parameter])
    optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers of learning rates look for
    return squares.sum() if gradients.unmeasured else None


def _go_through(
    parameter: nn.Parameter, gradients: Gradients, squares: Tensor, step: Callable[..., None], *state: Tensor
) -> None:
    """Step a parameter piece by piece. `step` is given elements, their gradients, and those of `state`."""
    flat = flat_view(parameter)
    size = PIECE * torch.get_num_threads() if gradients.received[parameter].in_pieces else max(flat.numel(), 1)
    memory = torch.empty(min(size, flat.numel()), dtype=flat.dtype)
    for start in range(0, flat.numel(), size):
        piece = slice(start, start + size)
        part = flat[piece]
        gradient = memory[: part.numel()]
        gradients.write(parameter, gradient, start)
        if gradients.unmeasured:
            squares += torch.dot(gradient, gradient)
        step(part, gradient, *(tensor[piece] for tensor in state))


def _as_laid(state: dict[str, Any], name: str, parameter: nn.Parameter) -> Tensor:
    """A tensor of an optimizer's state, 1-D in the memory order of its parameter, which a loaded one may not have."""
    if state[name].stride() != parameter.stride():
        state[name] = torch.empty_like(parameter).copy_(state[name])
    return flat_view(state[name])


_SGD_OPTIONS = ("lr", "momentum", "weight_decay", "nesterov", "maximize")


def _sgd(optimizer: torch.optim.Optimizer, group: dict[str, Any], gradients: Gradients) -> _Step:
    factor = 1.0 if gradients.factor is None else float(gradients.factor)
    options = Sgd(**{name: group[name] for name in _SGD_OPTIONS}, factor=factor)

    def step(parameter: nn.Parameter, squares: Tensor) -> None:
        momentum = None
        if options.momentum:
            state = optimizer.state[parameter]
            momentum = state.get("momentum_buffer")
            if momentum is None:
                momentum = state["momentum_buffer"] = torch.zeros_like(parameter)
            elif momentum.stride() != parameter.stride():
                momentum = state["momentum_buffer"] = torch.empty_like(parameter).copy_(momentum)
        if gradients.received[parameter].sgd(parameter, momentum, options, squares):
            return
        if momentum is None:
            _go_through(parameter, gradients, squares, partial(options.step, buffer=None))
        else:
            _go_through(parameter, gradients, squares, options.step, flat_view(momentum))

    return step


def _adam(optimizer: torch.optim.Optimizer, group: dict[str, Any], gradients: Gradients) -> _Step:
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2]
    update: Any = torch._fused_adamw_ if group.get("decoupled_weight_decay") else torch._fused_adam_
    fixed = {name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}
    fixed["beta1"], fixed["beta2"] = group["betas"]

    def step(parameter: nn.Parameter, squares: Tensor) -> None:
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update({name: torch.zeros_like(parameter) for name in names})
        state["step"] += 1

        def update_piece(part: Tensor, gradient: Tensor, *averages: Tensor) -> None:
            lists = [[tensor] for tensor in averages] + [[]] * (3 - len(averages))
            update([part], [gradient], *lists, [state["step"]], **fixed)

        _go_through(parameter, gradients, squares, update_piece, *(_as_laid(state, name, parameter) for name in names))

    return step


#: Steps a parameter, and notes the sum of squares of its gradient where that is wanted.
_Step = Callable[[nn.Parameter, Tensor], None]

_KINDS: dict[type[torch.optim.Optimizer], Callable[..., _Step]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
}
