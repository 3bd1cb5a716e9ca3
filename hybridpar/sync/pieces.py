"""Optimizer steps on pieces of gradients, so that each piece is used while it is in the cache.

A gradient that is the sum of several workers' need not be written to memory: a piece of it is added up in memory that
stays in the cache, and the optimizer's step of that piece follows at once. Torch's fused optimizers treat each element
by itself, so the result is that of one step on whole gradients, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hybridpar.comm.transport import flat_view, is_dense

#: Elements of a piece for each thread: with gradient, parameter and state it fits in a core's own cache.
PIECE = 1 << 16


@dataclass(frozen=True)
class Sgd:
    """Options of a step of SGD, as torch has them.

    Attributes:
        lr: Learning rate.
        momentum: Of the momentum buffer; 0 where there is none.
        weight_decay: What parameters are multiplied with and added to their gradients.
        nesterov: Use Nesterov's momentum.
        maximize: Step up the gradient.
    """

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    maximize: bool

    def step(self, part: Tensor, gradient: Tensor, buffer: Tensor | None) -> None:
        """Step some elements."""
        buffers = [] if buffer is None else [buffer]
        torch._fused_sgd_([part], [gradient], buffers, **self.__dict__, dampening=0.0, is_first_step=False)


class Pieces(Protocol):
    """Gradients that are made piece by piece."""

    @property
    def unmeasured(self) -> bool:
        """Whether their norm is wanted and not known yet."""

    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that have a gradient in this step."""

    def piece(self, parameter: nn.Parameter) -> int:
        """Elements that are best read at a time."""

    def read(self, parameter: nn.Parameter, start: int, out: Tensor) -> None:
        """Write a piece of a parameter's gradient."""

    def sgd(self, parameter: nn.Parameter, momentum: Tensor | None, options: Sgd, squares: Tensor) -> bool:
        """Take a step of SGD in one pass, where there is a kernel for it."""

    def materialise(self) -> Tensor | None:
        """Write all of them to `.grad`."""


def can_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_in_pieces` does what `optimizer.step()` would do.

    It does for SGD, Adam, AdamW and Adagrad of torch in their fused form, without hooks on the step.
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
        and all(_fits(parameter) for parameter in group["params"])
        for group in optimizer.param_groups
    )


def step_optimizer(optimizer: torch.optim.Optimizer, pieces: Pieces | None) -> Tensor | None:
    """Step any optimizer: on pieces of gradients where it can take them, else on what is in `.grad`."""
    if pieces is not None and can_step(optimizer):
        return step_in_pieces(optimizer, pieces)
    squares = None if pieces is None else pieces.materialise()
    optimizer.step()
    return squares


def step_in_pieces(optimizer: torch.optim.Optimizer, pieces: Pieces) -> Tensor | None:
    """Step an optimizer on gradients that are made piece by piece."""
    given = {id(parameter): index for index, parameter in enumerate(pieces.parameters())}
    squares = torch.zeros(len(given), dtype=torch.float64)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in given:
                    _KINDS[type(optimizer)](optimizer, group, parameter, pieces, squares[given[id(parameter)]])
    optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers of learning rates look for
    return squares.sum() if pieces.unmeasured else None


def _go_through(
    parameter: nn.Parameter, pieces: Pieces, squares: Tensor, step: Callable[..., None], *kept: Tensor
) -> None:
    """Step a parameter piece by piece. `step` is given elements, their gradients, and those of `kept`."""
    whole = flat_view(parameter)
    size = pieces.piece(parameter)
    memory = torch.empty(min(size, whole.numel()), dtype=whole.dtype)
    for start in range(0, whole.numel(), size):
        place = slice(start, start + size)
        part = whole[place]
        gradient = memory[: part.numel()]
        pieces.read(parameter, start, gradient)
        if pieces.unmeasured:
            squares += torch.dot(gradient, gradient)
        step(part, gradient, *(one[place] for one in kept))


def _as_laid(state: dict[str, Any], name: str, parameter: nn.Parameter) -> Tensor:
    """A tensor of an optimizer's state, 1-D in the memory order of its parameter, which a loaded one may not have."""
    if state[name].stride() != parameter.stride():
        state[name] = torch.empty_like(parameter).copy_(state[name])
    return flat_view(state[name])


def _fits(parameter: nn.Parameter) -> bool:
    return parameter.device.type == "cpu" and parameter.is_floating_point() and is_dense(parameter)


def _sgd(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter, pieces: Pieces, squares: Tensor
) -> None:
    options = Sgd(*(group[name] for name in Sgd.__dataclass_fields__))
    momentum = None
    if options.momentum:
        state = optimizer.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = _as_laid(state, "momentum_buffer", parameter)
    if not pieces.sgd(parameter, momentum, options, squares):
        step = partial(options.step, buffer=None) if momentum is None else options.step
        _go_through(parameter, pieces, squares, step, *([] if momentum is None else [momentum]))


def _adam(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter, pieces: Pieces, squares: Tensor
) -> None:
    state = optimizer.state[parameter]
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state.update({name: torch.zeros_like(parameter) for name in names})
    state["step"] += 1
    call: Any = torch._fused_adamw_ if group.get("decoupled_weight_decay") else torch._fused_adam_
    beta1, beta2 = group["betas"]
    fixed = {name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}

    def step(part: Tensor, gradient: Tensor, *averages: Tensor) -> None:
        kept = [[one] for one in averages] + [[]] * (3 - len(averages))
        call([part], [gradient], *kept, [state["step"]], beta1=beta1, beta2=beta2, **fixed)

    _go_through(parameter, pieces, squares, step, *(_as_laid(state, name, parameter) for name in names))


def _adagrad(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter, pieces: Pieces, squares: Tensor
) -> None:
    state = optimizer.state[parameter]
    state["step"] += 1
    fixed = {key: group[key] for key in ("lr", "lr_decay", "weight_decay", "eps", "maximize")}

    def step(part: Tensor, gradient: Tensor, sums: Tensor) -> None:
        torch._fused_adagrad_([part], [gradient], [sums], [state["step"]], **fixed)

    _go_through(parameter, pieces, squares, step, _as_laid(state, "sum", parameter))


_KINDS: dict[type[torch.optim.Optimizer], Callable[..., None]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.Adagrad: _adagrad,
}
