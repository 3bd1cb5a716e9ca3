"""The operation `torch.ops.hybridpar.depthwise_conv2d` and its gradients.

Forward, input gradient and weight gradient are three operations. Each runs one tuned kernel, or torch's operation where
there is none. An image, filters and an output are related such that each operation computes one of the three from the
other two, and is linear in both; so the derivatives of each operation are the other two, to any order.

They are registered with `torch.library.Library` and not with `custom_op`, which takes 13 us more for each call.
Dtype, device, layout and alignment of what a kernel gets are checked here; what does not pass runs on torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.tvm_kernels.call_plan import (
    CallPlan,
    fits,
    layout_of,
    out_sizes,
    plan_of,
    stock_gradients,
    usable,
)
from hybridpar.tvm_kernels.choice import active_choices, kernel_for
from hybridpar.tvm_kernels.conv_bench import FORMATS
from hybridpar.tvm_kernels.moments import attach_moments
from hybridpar.tvm_kernels.shapes import Direction, Layout

#: The same on every call, so looked up once.
_FORWARD, _INPUT, _WEIGHT = Direction.FORWARD, Direction.INPUT_GRADIENT, Direction.WEIGHT_GRADIENT

Numbers = Sequence[int]


def depthwise_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Numbers = 1,
    padding: int | Numbers = 0,
    dilation: int | Numbers = 1,
    *,
    norm_act: str | None = None,
) -> Tensor:
    """A depthwise convolution, by tuned kernels where a database in use says that they are faster.

    Args:
        x: (N, C, H, W).
        weight: (C, 1, KH, KW).
        bias: (C,).
        stride: One number, or those of rows and columns.
        padding: Zeros on each side, likewise; no names such as "same".
        dilation: Input elements from one tap to the next, likewise.
        norm_act: The activation of the BatchNorm that alone reads the result, in training: where a record says that
            both are faster together, the result carries its mean and variance (see `moments`). None for no such norm.

    Returns:
        (N, C, OH, OW) with the values, and in the memory format, of `conv2d(..., groups=C)`.
    """
    stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        result: Tensor = torch.ops.hybridpar.depthwise_conv2d(x, weight, bias, stride, padding, dilation)
        return result
    choices = active_choices()
    # Under torch.func it is torch's own: torch.library's operations have no gradients there.
    if choices is None or torch._C._are_functorch_transforms_active():
        return F.conv2d(x, weight, bias, stride, padding, dilation, x.shape[-3])
    if not _is_plain():
        if _is_stock(x, weight, stride, padding, dilation):
            return F.conv2d(x, weight, bias, stride, padding, dilation, x.shape[-3])
        result = torch.ops.hybridpar.depthwise_conv2d(x, weight, bias, stride, padding, dilation)
        return result
    plan = plan_of(choices, x, weight, bias, stride, padding, dilation, act=norm_act)
    if plan is None:
        return F.conv2d(x, weight, bias, stride, padding, dilation, x.shape[-3])
    moments: list[Tensor] | None = None if plan.summing is None else []
    if plan.differentiable:
        result = _Convolution.apply(x, weight, bias, plan, moments)
    else:
        result = plan.compute(x, weight, bias, moments)
    if moments:
        attach_moments(result, moments[0])
    return result


def _is_plain() -> bool:
    """Whether no tracer, dispatch mode or autocast is active that would have to see the operation itself.

    Modes are counted for this thread: torch's `is_in_torch_dispatch_mode` is one flag of the process, which stays set
    for ever when modes of two threads overlap.
    """
    watched = torch._C._len_torch_dispatch_stack() or torch._C._is_any_autocast_enabled()
    return not (watched or torch._C._get_tracing_state())


def _is_stock(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> bool:
    """Whether torch computes this and its gradients; under autocast it is another dtype."""
    alone = weight.shape[1] == 1 and weight.shape[0] == x.shape[-3]
    if not alone or not (x.is_cpu or x.is_cuda) or (layout := layout_of(x)) is None:
        return True
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if x.is_cpu and dtype is not torch.float32:
        return True
    call = x.shape, weight.shape[2:], stride, padding, dilation, layout
    return all(kernel_for(x.device, dtype, one, *call) is None for one in Direction)


def _pair(value: int | Numbers) -> tuple[int, int]:
    if type(value) is tuple and len(value) == 2:  # as layers have them
        return value
    if isinstance(value, int):
        return value, value
    return (value[0], value[1]) if len(value) == 2 else (value[0], value[0])


# ---------------------------------------------------------------------------------------------------- what is computed

# The operations take (image, filters, bias), (output's gradient, filters, size of the image) and (image, output's
# gradient, size of the filters), each followed by stride, padding and dilation.


def _by_kernel(direction: Direction, first: Tensor, second: Tensor, third: Any, *numbers: Any) -> Tensor | None:
    """What a tuned kernel computes; None where there is none, or where it cannot read the operands."""
    layout = layout_of(first)
    if layout is None:
        return None
    bias = None
    sizes: Numbers = first.shape
    taps: Numbers = second.shape[2:]
    if direction is _WEIGHT:
        taps, form = third, FORMATS[layout]
        alike = second.dtype is first.dtype and second.device == first.device
        readable = usable(layout, first) and alike and second.is_contiguous(memory_format=form)
    else:
        if direction is _FORWARD:
            bias = third
        else:
            sizes = (*sizes[:2], *third)
        others = (second,) if bias is None else (second, bias)
        readable = usable(layout, first, *others) and fits(second, first.shape[1], layout)
    if not readable:
        return None
    kernel = kernel_for(first.device, first.dtype, direction, sizes, taps, *numbers, layout)
    if kernel is None or not kernel.takes(first, second):
        return None
    if direction is _FORWARD:
        sizes = out_sizes(sizes, taps, *numbers)
    elif direction is _WEIGHT:
        sizes, layout = (sizes[1], 1, *taps), Layout.CONTIGUOUS
    result = torch.empty(sizes, dtype=first.dtype, device=first.device, memory_format=FORMATS[layout])
    kernel(first, second, bias, result)
    return result


def _by_torch(direction: Direction, first: Tensor, second: Tensor, third: Any, *numbers: Any) -> Tensor:
    """What torch computes.

    Raises:
        ValueError: It is no depthwise convolution of one filter per channel.
    """
    filters = (second.shape[1], 1) if direction is _WEIGHT else tuple(second.shape[:2])
    if first.ndim != 4 or filters != (first.shape[1], 1):
        raise ValueError(
            f"an image of shape {tuple(first.shape)} and filters ({', '.join(map(str, filters))}, ...): "
            "hybridpar's depthwise convolution has images (N, C, H, W) and filters (C, 1, KH, KW)"
        )
    if direction is _FORWARD:
        stride, padding, dilation = numbers
        return F.conv2d(first, second, third, stride, padding, dilation, first.shape[1])
    like: dict[str, Any] = {"dtype": first.dtype, "device": first.device}
    if direction is _INPUT:
        # Of the image only the form counts, and the gradient has the same layout.
        form = FORMATS[layout_of(first) or Layout.CONTIGUOUS]
        x = torch.empty((*first.shape[:2], *third), memory_format=form, **like)
        found = stock_gradients(x, second, first, numbers, (True, False))[0]
    else:
        weight = torch.empty((second.shape[1], 1, *third), **like)
        found = stock_gradients(first, weight, second, numbers, (False, True))[1]
    assert found is not None, "it was asked for"
    return found if direction is _INPUT else found.contiguous()


# ---------------------------------------------------------------------------------------------------------- autograd


class _Convolution(torch.autograd.Function):
    """The operation without the dispatcher's calls back to Python, of which there would be one for each gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: CallPlan, moments: list[Tensor] | None
    ) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(x, weight)
        return plan.compute(x, weight, bias, moments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """The gradients; where they are to be differentiated again, by operations."""
        wanted, plan = ctx.needs_input_grad, ctx.plan
        if not _is_last(gradient):
            ctx.numbers, ctx.has_bias = plan.numbers, wanted[2]
            return (*_backward(_FORWARD, ctx, gradient)[:3], None, None)
        x, weight = ctx.saved_tensors
        to_bias = gradient.sum((0, 2, 3)) if wanted[2] else None
        return (*plan.gradients(x, weight, gradient, wanted), to_bias, None, None)


def _is_last(gradient: Tensor) -> bool:
    """Whether the result of a backward pass is neither traced nor differentiated."""
    return (
        type(gradient) is Tensor and not torch.is_grad_enabled() and _is_plain() and not torch.compiler.is_compiling()
    )


def _save(direction: Direction, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, third, *ctx.numbers = inputs
    ctx.save_for_backward(first, second)
    ctx.has_bias = direction is _FORWARD and third is not None


def _backward(direction: Direction, ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Derivatives of an operation by its six arguments."""
    first, second = ctx.saved_tensors
    # Everything is computed in the layout of the first operand; gradients may come as any view.
    layout = Layout.CONTIGUOUS if direction is _WEIGHT else layout_of(first)
    gradient = gradient if layout is None else gradient.contiguous(memory_format=FORMATS[layout])
    to_bias = gradient.sum((0, 2, 3)) if ctx.has_bias and ctx.needs_input_grad[2] else None
    if direction is _FORWARD and _is_last(gradient) and all(ctx.needs_input_grad[:2]):
        return (*_both_gradients(ctx, first, second, gradient), to_bias, None, None, None)
    ops, roles = torch.ops.hybridpar, _ROLES[direction]
    known = dict(zip(roles, (first, second, gradient), strict=True))
    x, weight, y = known["image"], known["filters"], known["output"]
    derive: dict[str, Callable[[], Tensor]] = {
        "image": lambda: ops.depthwise_conv2d_input_gradient(y, weight, x.shape[2:], *ctx.numbers),
        "filters": lambda: ops.depthwise_conv2d_weight_gradient(x, y, weight.shape[2:], *ctx.numbers),
        "output": lambda: ops.depthwise_conv2d(x, weight, None, *ctx.numbers),
    }
    by_first, by_second = (
        derive[role]() if needed else None for role, needed in zip(roles[:2], ctx.needs_input_grad, strict=False)
    )
    return by_first, by_second, to_bias, None, None, None


#: Of each operation, what its two operands and its result are.
_ROLES = {
    _FORWARD: ("image", "filters", "output"),
    _INPUT: ("output", "filters", "image"),
    _WEIGHT: ("image", "output", "filters"),
}


def _both_gradients(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of image and filters, by kernels or one call of torch."""
    choices = active_choices()
    stride, padding, dilation = numbers = [(one[0], one[1]) for one in ctx.numbers]
    plan = None
    if choices is not None:
        plan = plan_of(choices, x, weight, None, stride, padding, dilation, (True, True, False))
    if plan is None:
        return stock_gradients(x, weight, gradient, numbers, ctx.needs_input_grad)
    return plan.gradients(x, weight, gradient, ctx.needs_input_grad)


# ------------------------------------------------------------------------------------------------------ registration

_library: Any = torch.library.Library("hybridpar", "FRAGMENT")  # type: ignore[no-untyped-call]


def _register(direction: Direction, name: str, operands: str) -> None:
    """Define the operation of a direction; torch's result has the right form also for tensors without data."""

    def compute(*given: Any) -> Tensor:
        found = _by_kernel(direction, *given)
        return _by_torch(direction, *given) if found is None else found

    def autocast(device: str) -> Callable[..., Tensor]:
        def cast(*given: Any) -> Tensor:
            """Compute in autocast's dtype, as torch does it with its own convolution."""
            dtype = torch.get_autocast_dtype(device)
            with torch.autocast(device, enabled=False):
                result: Tensor = getattr(torch.ops.hybridpar, name)(
                    *(one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one for one in given)
                )
                return result

        return cast

    schema = f"{name}({operands}, int[2] stride, int[2] padding, int[2] dilation) -> Tensor"
    _library.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _library.impl(name, compute, "CompositeExplicitAutograd")
    for device in ("cpu", "cuda"):
        _library.impl(name, autocast(device), f"Autocast{device.upper()}")
    full = f"hybridpar::{name}"
    torch.library.register_fake(full, lambda *given: _by_torch(direction, *given), lib=_library)
    torch.library.register_autograd(
        full,
        lambda ctx, gradient: _backward(direction, ctx, gradient),
        setup_context=lambda ctx, inputs, output: _save(direction, ctx, inputs, output),
        lib=_library,
    )


_register(_FORWARD, "depthwise_conv2d", "Tensor x, Tensor weight, Tensor? bias")
_register(_INPUT, "depthwise_conv2d_input_gradient", "Tensor gradient, Tensor weight, SymInt[2] size")
_register(_WEIGHT, "depthwise_conv2d_weight_gradient", "Tensor x, Tensor gradient, SymInt[2] taps")
