"""A depthwise convolution on tuned kernels where a record says that they are faster, else on torch's own.

What a call runs on is decided at the first of all equal calls, and kept: calls are equal if everything but the values
and addresses of their tensors is. A plan holds the kernels of all directions. Calls that run on torch in every
direction have no plan: they are `torch.nn.functional.conv2d`, as are all that something else has to see, such as a
compiler, a tracer, torch.func or a dispatch mode. Second derivatives are torch's: where gradients are to be
differentiated again, they are computed by torch's own operation.

Dtype, device, layout and alignment of what a kernel gets are checked here; what does not pass runs on torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.tvm_kernels.choice import Choices, active_choices
from hybridpar.tvm_kernels.conv_bench import DTYPES, FORMATS
from hybridpar.tvm_kernels.cuda_kernel import CudaKernel
from hybridpar.tvm_kernels.kernel import TunedKernel
from hybridpar.tvm_kernels.machine import cpu_fingerprint, gpu_at
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout, ShapeError

#: Most plans that are kept, so that images of many sizes do not fill the memory.
_MOST_PLANS = 4096

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Pair = tuple[int, int]
Numbers = Sequence[int]
Kernel = TunedKernel | CudaKernel


def depthwise_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Numbers = 1,
    padding: int | Numbers = 0,
    dilation: int | Numbers = 1,
) -> Tensor:
    """A depthwise convolution, by tuned kernels where a database in use says that they are faster.

    Args:
        x: (N, C, H, W).
        weight: (C, 1, KH, KW).
        bias: (C,).
        stride: One number, or those of rows and columns.
        padding: Zeros on each side, likewise; no names such as "same".
        dilation: Input elements from one tap to the next, likewise.

    Returns:
        (N, C, OH, OW) with the values, and in the memory format, of `conv2d(..., groups=C)`.
    """
    stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
    if not is_seen(x) and (choices := active_choices()) is not None:
        if torch.is_autocast_enabled(x.device.type) and x.dtype in _NAMES:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        plan = _plan_of(choices, x, weight, bias, (stride, padding, dilation))
        if plan is not None and plan.differentiable:
            result: Tensor = _Convolution.apply(x, weight, bias, plan)
            return result
        if plan is not None:
            return plan.compute(x, weight, bias)
    return F.conv2d(x, weight, bias, stride, padding, dilation, x.shape[-3])


def is_seen(x: Tensor) -> bool:
    """Whether a compiler, tracer, transform, subclass or dispatch mode has to see torch's own operations on a tensor.

    Modes are counted for this thread: torch's `is_in_torch_dispatch_mode` is one flag of the process, which stays set
    for ever when modes of two threads overlap.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return True
    return bool(
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state()
    )


def _pair(value: int | Numbers) -> Pair:
    if type(value) is tuple and len(value) == 2:  # as layers have them
        return value
    if isinstance(value, int):
        return value, value
    return (value[0], value[1]) if len(value) == 2 else (value[0], value[0])


# ------------------------------------------------------------------------------------------------------------ deciding


def layout_of(tensor: Tensor) -> Layout | None:
    """The memory format of an image; None for a tensor that is not four-dimensional, not dense, or dense in both."""
    if tensor.ndim != 4:
        return None
    last = tensor.is_contiguous(memory_format=torch.channels_last)
    if tensor.is_contiguous():
        return None if last else Layout.CONTIGUOUS
    return Layout.CHANNELS_LAST if last else None


@dataclass(frozen=True, slots=True)
class Plan:
    """What calls of one form run on. Kernels are None for torch, and where they are not wanted.

    Attributes:
        layout: Of input, output and their gradients.
        numbers: Stride, padding and dilation.
        sizes: Of the output.
        strides: Of the output.
        differentiable: Whether any gradient is wanted.
        forward: Kernel of the output.
        input_gradient: Kernel of the input's gradient.
        weight_gradient: Kernel of the weights' gradient.
    """

    layout: Layout
    numbers: tuple[Pair, Pair, Pair]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    differentiable: bool
    forward: Kernel | None
    input_gradient: Kernel | None
    weight_gradient: Kernel | None

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output, in the layout of x."""
        kernel = self.forward
        if kernel is None or not kernel.takes(x, weight):
            return F.conv2d(x, weight, bias, *self.numbers, self.sizes[1])
        out = x.new_empty_strided(self.sizes, self.strides)
        kernel(x, weight, bias, out)
        return out

    def gradients(
        self, x: Tensor, weight: Tensor, gradient: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of input and weights, those without a kernel by one call of torch."""
        if gradient.stride() != self.strides:
            gradient = gradient.contiguous(memory_format=FORMATS[self.layout])
        to_x = to_weight = None
        kernel = self.input_gradient
        if wanted[0] and kernel is not None and kernel.takes(gradient, weight):
            to_x = torch.empty_like(x)
            kernel(gradient, weight, None, to_x)
        kernel = self.weight_gradient
        if wanted[1] and kernel is not None and kernel.takes(x, gradient):
            to_weight = weight.new_empty(weight.shape)
            kernel(x, gradient, None, to_weight)
        left = wanted[0] and to_x is None, wanted[1] and to_weight is None, False
        if any(left):
            by_torch = _stock_gradients(x, weight, gradient, self.numbers, left)
            to_x, to_weight = (by_torch[0] if left[0] else to_x), (by_torch[1] if left[1] else to_weight)
        return to_x, to_weight


def _stock_gradients(
    x: Tensor, weight: Tensor, gradient: Tensor, numbers: tuple[Pair, Pair, Pair], wanted: Sequence[bool]
) -> Any:
    """The gradients of input, weights and bias by one call of torch."""
    return torch.ops.aten.convolution_backward(
        gradient, x, weight, [x.shape[1]], *numbers, False, [0, 0], x.shape[1], [*wanted[:3]]
    )


def _plan_of(
    choices: Choices, x: Tensor, weight: Tensor, bias: Tensor | None, numbers: tuple[Pair, Pair, Pair]
) -> Plan | None:
    """The plan of a call, made at the first of all equal calls; None where torch's own operation computes all of it."""
    wanted = (False, False, False)
    if torch.is_grad_enabled():
        wanted = (x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
    form = (
        *(x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(), weight.dtype, weight.device),
        None if bias is None else (bias.stride(), bias.dtype, bias.device),
        *(numbers, wanted, torch.get_num_threads()),
    )
    try:
        return choices.plans[form]  # type: ignore[no-any-return]
    except KeyError:
        plan = _made(choices, x, weight, bias, numbers, wanted)
    if len(choices.plans) >= _MOST_PLANS:
        choices.plans.clear()
    choices.plans[form] = plan
    return plan


def _made(
    choices: Choices,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    numbers: tuple[Pair, Pair, Pair],
    wanted: tuple[bool, bool, bool],
) -> Plan | None:
    layout = layout_of(x)
    if layout is None or not _is_readable(x, layout, weight, bias):
        return None
    try:
        pairs = ((int(rows), int(columns)) for rows, columns in (weight.shape[2:], *numbers))
        shape = ConvShape(*map(int, x.shape), *pairs)  # type: ignore[arg-type]
    except ShapeError:  # an empty batch, or what torch refuses, too
        return None
    where = (torch.get_num_threads(), cpu_fingerprint())
    if x.is_cuda:
        where = (1, gpu_at(x.device.index or 0).fingerprint)
    kernels = [
        choices.decide(KernelKey(direction, shape, layout, *where, _NAMES[x.dtype])).kernel if needed else None
        for direction, needed in zip(Direction, (True, *wanted[:2]), strict=True)
    ]
    if all(kernel is None for kernel in kernels):
        return None
    sizes = (shape.batch, shape.channels, shape.out_height, shape.out_width)
    strides = torch.empty(sizes, device="meta", memory_format=FORMATS[layout]).stride()
    return Plan(layout, numbers, sizes, strides, any(wanted), *kernels)


def _is_readable(x: Tensor, layout: Layout, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether kernels can read the operands, and torch's result would lie in the layout of the image.

    Contiguous weights may have any stride of the channel axis, of size 1, and torch derives a layout from it.
    """
    if x.dtype not in _NAMES or not (x.is_cpu or x.is_cuda):
        return False
    if weight.ndim != 4 or weight.shape[:2] != (x.shape[1], 1):
        return False
    if layout is not Layout.CHANNELS_LAST and weight.stride(1) == 1:
        return False
    params = (weight,) if bias is None else (weight, bias)
    return all(param.dtype is x.dtype and param.device == x.device and param.is_contiguous() for param in params)


# ------------------------------------------------------------------------------------------------------------ autograd


class _Convolution(torch.autograd.Function):
    """A call that has a plan and is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(x, weight)
        return plan.compute(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """The gradients; where they may be differentiated again, by torch."""
        wanted, plan = ctx.needs_input_grad, ctx.plan
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled() or is_seen(gradient):
            return (*_stock_gradients(x, weight, gradient, plan.numbers, wanted), None)
        to_bias = gradient.sum((0, 2, 3)) if wanted[2] else None
        return (*plan.gradients(x, weight, gradient, wanted), to_bias, None)
