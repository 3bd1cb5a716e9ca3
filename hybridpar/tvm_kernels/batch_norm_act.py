"""BatchNorm and the activation behind it as one operation, which reads memory half as often as two.

`torch.ops.hybridpar.batch_norm_act` is `batch_norm` followed by an activation. Where the kernels can do it (float32 on
a CPU, channels last), it is made of two functional operations, forward and backward, that carry the statistics in a
small table; the running statistics are moved here, as torch defines it. Everything else is torch's `batch_norm` and the
activation: other dtypes, devices and layouts, and what torch refuses. Fewer tensors are kept for backward: the input
alone, where torch also keeps what the activation was given or gave.

A second derivative is refused: the kernels have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hybridpar.errors import HybridparError, UsageError, nearest
from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.moments import take_moments
from hybridpar.tvm_kernels.schedules.norm_rows import ACTIVATIONS, MEAN, TABLE_ROWS, VARIANCE

#: The arguments of `batch_norm_act`, in order; `stock_batch_norm_act` says what they are.
Given = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, bool, float, float, str]

#: What torch does for each activation.
STOCK: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "silu": functional.silu,
}
assert tuple(STOCK) == ACTIVATIONS


class SecondDerivativeError(HybridparError):
    """`batch_norm_act` was differentiated twice."""


def stock_batch_norm_act(*given: *Given) -> Tensor:
    """`torch.ops.hybridpar.batch_norm_act` by torch's own operations.

    Args:
        given: x (N, C, H, W); weight (C) and bias (C), or None; running_mean (C) and running_var (C), moved in
            training, or None; training, whether to normalise by the batch; momentum, how far running statistics move;
            eps, added to the variance; act, "none", "relu", "relu6" or "silu".

    Returns:
        (N, C, H, W), laid out as x is.

    Raises:
        UsageError: No such activation.
    """
    x, weight, bias, mean, variance, training, momentum, eps, act = given
    if act not in STOCK:
        raise UsageError(f"{act!r} is no activation of batch_norm_act", fix=nearest(act, ACTIVATIONS))
    z = functional.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
    # Of these only the rectifier's backward needs nothing but its result.
    return functional.relu_(z) if act == "relu" else STOCK[act](z)


def kernels_fit(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None, training: bool
) -> bool:
    """Whether dtypes, sizes and layouts are such that kernels can compute `batch_norm_act`. It loads no kernels.

    Args:
        x: (N, C, H, W).
        weight: (C), or None.
        bias: (C), or None.
        mean: Running mean, (C), or None.
        variance: Running variance, (C), or None.
        training: Whether to normalise by the batch.

    Returns:
        Whether they are.
    """
    if x.dtype is not torch.float32 or x.ndim != 4 or not x.is_cpu:
        return False
    channels = x.shape[1]
    if channels == 0 or x.numel() < 2 * channels or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    if (mean is None) is not (variance is None) or (mean is None and not training):
        return False
    for one in (weight, bias, mean, variance):
        if one is not None and not (
            one.dtype is torch.float32 and one.is_cpu and one.shape == (channels,) and one.is_contiguous()
        ):
            return False
    return True


def _fusable(*six: Any) -> bool:
    """Whether kernels could do it, and are there."""
    return kernels_fit(*six) and bool(norm_kernels.table())


def _eager(*given: *Given) -> Tensor:
    can = given[-1] in ACTIVATIONS and _fusable(*given[:6])
    return fused_batch_norm_act(*given) if can else stock_batch_norm_act(*given)


def fused_batch_norm_act(*given: *Given) -> Tensor:
    """`torch.ops.hybridpar.batch_norm_act` by the kernels, for operands that `kernels_fit` accepts.

    In training it uses the moments that a convolution has attached to x, as `moments` describes.

    Args:
        given: As the arguments of `stock_batch_norm_act`.

    Returns:
        (N, C, H, W), laid out as x is.
    """
    x, weight, bias, _, _, training, *_ = given
    moments = take_moments(x) if training else None
    if torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    ):
        result: Tensor = _BatchNormThen.apply(*given, moments)
        return result
    return norm_kernels.forward(*given, moments)[0]


class _BatchNormThen(torch.autograd.Function):
    """The kernels called directly, as torch's dispatcher would take most of the time of a small layer."""

    @staticmethod
    def forward(ctx: Any, *given: *tuple[*Given, Tensor | None]) -> Tensor:
        x, *_, training, _, _, ctx.act, _ = given
        y, statistics = norm_kernels.forward(*given)
        ctx.save_for_backward(x, statistics)
        ctx.fixed = not training
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, grad_y), *(None,) * 7)


def _gradients(ctx: Any, grad_y: Tensor) -> list[Tensor | None]:
    """Those of x, weight and bias that are needed."""
    x, statistics = ctx.saved_tensors
    grad_y = grad_y.contiguous(memory_format=torch.channels_last)
    plain = type(grad_y) is Tensor and not torch.is_grad_enabled() and grad_y.dtype is torch.float32
    compute = norm_kernels.backward if plain else torch.ops.hybridpar.batch_norm_act_backward
    found = compute(grad_y, x, statistics, ctx.act, ctx.fixed)
    return [one if needed else None for one, needed in zip(found, ctx.needs_input_grad, strict=False)]


def _batch_norm_act(*given: *Given) -> Tensor:
    """The operation; what is traced becomes functional operations, which compilers can see."""
    x, weight, bias, mean, variance, training, momentum, eps, act = given
    if type(x) in (Tensor, torch.nn.Parameter) or act not in ACTIVATIONS or not _fusable(*given[:6]):
        return _eager(*given)
    used = (None, None) if training else (mean, variance)
    y, statistics = torch.ops.hybridpar.batch_norm_act_forward(x, weight, bias, *used, eps, act)
    if training:
        channels = x.shape[1]
        with torch.no_grad():
            for kept, row in ((mean, MEAN), (variance, VARIANCE)):
                if kept is not None:
                    kept.lerp_(statistics[row, :channels], momentum)
    result: Tensor = y
    return result


# ------------------------------------------------------------------------------------------- the functional operations


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    eps: float,
    act: str,
) -> tuple[Tensor, Tensor]:
    training = mean is None or variance is None
    if act not in ACTIVATIONS or not _fusable(x, weight, bias, mean, variance, training):
        raise UsageError(
            f"batch_norm_act_forward cannot take {_described(x)} with activation {act!r}",
            "The kernels take float32 on a CPU, channels last, with at least two values per channel.",
            "Call torch.ops.hybridpar.batch_norm_act, which falls back to torch.",
        )
    return norm_kernels.forward(x, weight, bias, mean, variance, training, 0.0, eps, act)


def _forward_fake(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, eps: float, act: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((TABLE_ROWS, norm_kernels.wide_channels(x.shape[1])))


def _backward(grad_y: Tensor, x: Tensor, statistics: Tensor, act: str, fixed: bool) -> tuple[Tensor, Tensor, Tensor]:
    form = (TABLE_ROWS, norm_kernels.wide_channels(x.shape[1]))
    if (
        act not in ACTIVATIONS
        or not _fusable(x, None, None, None, None, True)
        or grad_y.shape != x.shape
        or not _fusable(grad_y, None, None, None, None, True)
        or tuple(statistics.shape) != form
        or statistics.dtype is not torch.float32
        or not statistics.is_contiguous()
    ):
        raise UsageError(
            f"batch_norm_act_backward cannot take {_described(grad_y)} for {_described(x)}",
            "It takes what batch_norm_act_forward took and gave, and a gradient that lies as its input does.",
            "Differentiate torch.ops.hybridpar.batch_norm_act with torch.autograd.",
        )
    return norm_kernels.backward(grad_y, x, statistics, act, fixed)


def _backward_fake(
    grad_y: Tensor, x: Tensor, statistics: Tensor, act: str, fixed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.shape[1]
    return torch.empty_like(x), x.new_empty(channels), x.new_empty(channels)


def _described(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} of strides {x.stride()} on {x.device}"


# ---------------------------------------------------------------------------------------------------------- autograd


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, _, mean, _, _, ctx.act = inputs
    ctx.fixed = mean is not None
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1])


def _backward_of_forward(ctx: Any, grad_y: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_y is None:
        return (None,) * 7
    return (*_gradients(ctx, grad_y), *(None,) * 4)


def _refuse(ctx: Any, *_: Any) -> None:
    raise SecondDerivativeError(
        "batch_norm_act has no second derivative",
        "Its gradient is computed by a kernel, which autograd cannot differentiate.",
        "Use torch's batch_norm where gradients of gradients are needed (HYBRIDPAR_KERNELS=off, or unfuse_norms).",
    )


#: `Library` has no types.
_library: Any = torch.library.Library("hybridpar", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

_library.define(
    "batch_norm_act_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? variance, float eps, "
    "str act) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_library.impl("batch_norm_act_forward", _forward, "CPU")
torch.library.register_fake("hybridpar::batch_norm_act_forward", _forward_fake, lib=_library)
torch.library.register_autograd(
    "hybridpar::batch_norm_act_forward", _backward_of_forward, setup_context=_save, lib=_library
)

_library.define(
    "batch_norm_act_backward(Tensor grad_y, Tensor x, Tensor statistics, str act, bool fixed) "
    "-> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_library.impl("batch_norm_act_backward", _backward, "CPU")
torch.library.register_fake("hybridpar::batch_norm_act_backward", _backward_fake, lib=_library)
torch.library.register_autograd("hybridpar::batch_norm_act_backward", _refuse, lib=_library)

_library.define(
    "batch_norm_act(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "bool training, float momentum, float eps, str act) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("batch_norm_act", _batch_norm_act, "CompositeImplicitAutograd")
