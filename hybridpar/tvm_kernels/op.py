"""The operation `torch.ops.hybridpar.depthwise_conv2d` and its gradients.

`torch.ops.hybridpar.depthwise_conv2d` and its two gradients are operations of one kernel each or, wherever none was
tuned, of torch's. Each of the three is linear in both of its operands, so the gradients of each are made of the other
two, and gradients of any order come for nothing.

They are registered with `torch.library.Library` and not with `custom_op`, which takes 13 us more for each call.
What is handed to a kernel is checked here: dtype, device, layout, alignment. What does not pass runs on torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.tvm_kernels.call_plan import (
    CallPlan,
    fits,
    kernel_of,
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
        stride: As `torch.nn.functional.conv2d` takes it, and the next ones.
        padding: Numbers alone.
        dilation: One or two numbers.
        norm_act: The activation of a BatchNorm that is called next, in training: where a record says that both are
            faster so, the result carries its moments (see `moments`). None for none.

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
    on = (x.device, dtype) if x.is_cuda else None
    call = x.shape, weight.shape[2:], stride, padding, dilation, layout
    return all(kernel_for(one, *call, on=on) is None for one in Direction)


def _pair(value: int | Numbers) -> tuple[int, int]:
    if type(value) is tuple and len(value) == 2:  # as layers have them
        return value
    if isinstance(value, int):
        return value, value
    return (value[0], value[1]) if len(value) == 2 else (value[0], value[0])


# ---------------------------------------------------------------------------------------------------- what is computed


def _run(
    direction: Direction, first: Tensor, second: Tensor, third: Tensor | None, layout: Layout, *call: Any
) -> Tensor | None:
    """What a kernel computes of operands that it can read; None where there is no such kernel.

    The call is the sizes of the input, taps, stride, padding and dilation.
    """
    kernel = kernel_of(direction, first, *call, layout)
    if kernel is None or not kernel.takes(first, second):
        return None
    sizes, taps = call[0], call[1]
    if direction is _FORWARD:
        sizes = out_sizes(*call)
    elif direction is _WEIGHT:
        sizes, layout = (sizes[1], 1, *taps), Layout.CONTIGUOUS
    result = torch.empty(sizes, dtype=first.dtype, device=first.device, memory_format=FORMATS[layout])
    kernel(first, second, third, result)
    return result


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any) -> Tensor:
    layout = layout_of(x)
    if usable(layout, x, weight, *(() if bias is None else (bias,))) and fits(weight, x.shape[1], layout):
        assert layout is not None
        found = _run(_FORWARD, x, weight, bias, layout, x.shape, weight.shape[2:], stride, padding, dilation)
        if found is not None:
            return found
    return stock_forward(x, weight, bias, stride, padding, dilation)


def _input_gradient(gradient: Tensor, weight: Tensor, size: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    layout = layout_of(gradient)
    if usable(layout, gradient, weight) and fits(weight, gradient.shape[1], layout):
        assert layout is not None
        call = (*gradient.shape[:2], *size), weight.shape[2:], stride, padding, dilation
        found = _run(_INPUT, gradient, weight, None, layout, *call)
        if found is not None:
            return found
    return stock_input_gradient(gradient, weight, size, stride, padding, dilation)


def _weight_gradient(x: Tensor, gradient: Tensor, taps: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    layout = layout_of(x)
    alike = gradient.dtype is x.dtype and gradient.device == x.device
    if layout is not None and usable(layout, x) and alike and gradient.is_contiguous(memory_format=FORMATS[layout]):
        found = _run(_WEIGHT, x, gradient, None, layout, x.shape, taps, stride, padding, dilation)
        if found is not None:
            return found
    return stock_weight_gradient(x, gradient, taps, stride, padding, dilation)


def stock_forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """The output by torch alone.

    Args:
        x: (N, C, H, W).
        weight: (C, 1, KH, KW).
        bias: (C), or None.
        stride: Two numbers, as the next ones.
        padding: As torch has it.
        dilation: As torch has it.
    """
    _check(x, weight.shape[:2])
    return F.conv2d(x, weight, bias, stride, padding, dilation, x.shape[1])


def stock_input_gradient(
    gradient: Tensor, weight: Tensor, size: Any, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """The input's gradient by torch alone; sizes are H and W of the input.

    Args:
        gradient: Of the output, (N, C, OH, OW).
        weight: (C, 1, KH, KW).
        size: H and W of the input.
        stride: Two numbers, as the next ones.
        padding: As torch has it.
        dilation: As torch has it.
    """
    _check(gradient, weight.shape[:2])
    # Of the input only the form counts, and the gradient has the same layout.
    last = layout_of(gradient) is Layout.CHANNELS_LAST
    form = torch.channels_last if last else torch.contiguous_format
    x = torch.empty((*gradient.shape[:2], *size), dtype=gradient.dtype, device=gradient.device, memory_format=form)
    return _stock_backward(gradient, x, weight, stride, padding, dilation, (True, False))


def stock_weight_gradient(x: Tensor, gradient: Tensor, taps: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """The weights' gradient by torch alone; taps are KH and KW.

    Args:
        x: (N, C, H, W).
        gradient: Of the output, (N, C, OH, OW).
        taps: KH and KW.
        stride: Two numbers, as the next ones.
        padding: As torch has it.
        dilation: As torch has it.
    """
    _check(x, (gradient.shape[1], 1))
    weight = torch.empty((gradient.shape[1], 1, *taps), dtype=x.dtype, device=x.device)
    return _stock_backward(gradient, x, weight, stride, padding, dilation, (False, True)).contiguous()


def _check(image: Tensor, filters: Numbers) -> None:
    """Refuse what is no depthwise convolution of one filter per channel.

    Raises:
        ValueError: With the sizes that do not fit.
    """
    if image.ndim != 4 or tuple(filters) != (image.shape[1], 1):
        raise ValueError(
            f"an image of shape {tuple(image.shape)} and filters ({', '.join(map(str, filters))}, ...): "
            "hybridpar's depthwise convolution has images (N, C, H, W) and filters (C, 1, KH, KW)"
        )


def _stock_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, wanted: tuple[bool, bool]
) -> Tensor:
    groups = x.shape[1]
    found = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [*wanted, False]
    )
    result: Tensor = found[0] if wanted[0] else found[1]
    return result


# ---------------------------------------------------------------------------------------------------------- autograd


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.numbers = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


class _Convolution(torch.autograd.Function):
    """The operation without the dispatcher's calls back to Python, of which there would be one for each gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: CallPlan, moments: list[Tensor] | None
    ) -> Tensor:
        """Compute the output, and keep what the gradients need."""
        ctx.plan = plan
        ctx.save_for_backward(x, weight)
        return plan.compute(x, weight, bias, moments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """The gradients; where they are to be differentiated again, by operations."""
        wanted, plan = ctx.needs_input_grad, ctx.plan
        if not _is_last(gradient):
            ctx.numbers, ctx.has_bias = plan.numbers, wanted[2]
            return (*_backward_of_forward(ctx, gradient)[:3], None, None)
        x, weight = ctx.saved_tensors
        to_bias = gradient.sum((0, 2, 3)) if wanted[2] else None
        return (*plan.gradients(x, weight, gradient, wanted), to_bias, None, None)


def _is_last(gradient: Tensor) -> bool:
    """Whether the result of a backward pass is neither traced nor differentiated."""
    return (
        type(gradient) is Tensor and not torch.is_grad_enabled() and _is_plain() and not torch.compiler.is_compiling()
    )


def _backward_of_forward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    gradient = _like(gradient, x)
    ops, wanted = torch.ops.hybridpar, ctx.needs_input_grad
    to_x = to_weight = to_bias = None
    if _is_last(gradient) and all(wanted[:2]):
        choices = active_choices()
        stride, padding, dilation = numbers = [(one[0], one[1]) for one in ctx.numbers]
        plan = None
        if choices is not None:
            plan = plan_of(choices, x, weight, None, stride, padding, dilation, (True, True, False))
        if plan is None:
            to_x, to_weight = stock_gradients(x, weight, gradient, numbers, wanted)
        else:
            to_x, to_weight = plan.gradients(x, weight, gradient, wanted)
    else:
        if wanted[0]:
            to_x = ops.depthwise_conv2d_input_gradient(gradient, weight, x.shape[2:], *ctx.numbers)
        if wanted[1]:
            to_weight = ops.depthwise_conv2d_weight_gradient(x, gradient, weight.shape[2:], *ctx.numbers)
    if ctx.has_bias and wanted[2]:
        to_bias = gradient.sum((0, 2, 3))
    return to_x, to_weight, to_bias, None, None, None


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient in the layout of the input, in which everything is computed; it may come as any view."""
    layout = layout_of(x)
    return gradient if layout is None else gradient.contiguous(memory_format=FORMATS[layout])


def _save_input_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gradient, weight, _, *ctx.numbers = inputs
    ctx.save_for_backward(gradient, weight)


def _backward_of_input_gradient(ctx: Any, second: Tensor) -> tuple[Any, ...]:
    gradient, weight = ctx.saved_tensors
    second = _like(second, gradient)
    ops = torch.ops.hybridpar
    to_gradient = to_weight = None
    if ctx.needs_input_grad[0]:
        to_gradient = ops.depthwise_conv2d(second, weight, None, *ctx.numbers)
    if ctx.needs_input_grad[1]:
        to_weight = ops.depthwise_conv2d_weight_gradient(second, gradient, weight.shape[2:], *ctx.numbers)
    return to_gradient, to_weight, None, None, None, None


def _save_weight_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gradient, _, *ctx.numbers = inputs
    ctx.save_for_backward(x, gradient)


def _backward_of_weight_gradient(ctx: Any, second: Tensor) -> tuple[Any, ...]:
    x, gradient = ctx.saved_tensors
    second = second.contiguous()
    ops = torch.ops.hybridpar
    to_x = to_gradient = None
    if ctx.needs_input_grad[0]:
        to_x = ops.depthwise_conv2d_input_gradient(gradient, second, x.shape[2:], *ctx.numbers)
    if ctx.needs_input_grad[1]:
        to_gradient = ops.depthwise_conv2d(x, second, None, *ctx.numbers)
    return to_x, to_gradient, None, None, None, None


# ------------------------------------------------------------------------------------------------------ registration

_NUMBERS = "int[2] stride, int[2] padding, int[2] dilation"
_library: Any = torch.library.Library("hybridpar", "FRAGMENT")  # type: ignore[no-untyped-call]


def _register(schema: str, compute: Any, stock: Any, save: Any, backward: Any) -> None:
    """Define an operation; what torch computes has the same form, so that does for tensors without data."""
    name = schema.partition("(")[0]
    full = f"hybridpar::{name}"
    _library.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(full, stock, lib=_library)
    torch.library.register_autograd(full, backward, setup_context=save, lib=_library)
    for device in ("cpu", "cuda"):
        _library.impl(name, _under_autocast(name, device), f"Autocast{device.upper()}")


def _under_autocast(name: str, device: str) -> Any:
    """Tensors in autocast's dtype, as torch does it with its own convolution."""

    def cast(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return getattr(torch.ops.hybridpar, name)(
                *(one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one for one in arguments)
            )

    return cast


_register(
    f"depthwise_conv2d(Tensor x, Tensor weight, Tensor? bias, {_NUMBERS}) -> Tensor",
    _forward,
    stock_forward,
    _save_forward,
    _backward_of_forward,
)
_register(
    f"depthwise_conv2d_input_gradient(Tensor gradient, Tensor weight, SymInt[2] size, {_NUMBERS}) -> Tensor",
    _input_gradient,
    stock_input_gradient,
    _save_input_gradient,
    _backward_of_input_gradient,
)
_register(
    f"depthwise_conv2d_weight_gradient(Tensor x, Tensor gradient, SymInt[2] taps, {_NUMBERS}) -> Tensor",
    _weight_gradient,
    stock_weight_gradient,
    _save_weight_gradient,
    _backward_of_weight_gradient,
)
