"""Call plans: which kernels a call of the depthwise convolution runs on, decided at the first of all equal calls.

Calls are equal if everything but the values and addresses of their tensors is: sizes, strides, dtypes, devices, threads
and which gradients are wanted. A plan holds the kernels of all directions and the sizes of the results. Calls that run
on torch in every direction have no plan: they are torch's own operation, with its one backward for both gradients.

Plans live as long as the records in use, see `choice.Choices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.tvm_kernels.choice import Choices, kernel_for
from hybridpar.tvm_kernels.conv_bench import FORMATS
from hybridpar.tvm_kernels.kernel import AnyKernel, TunedKernel
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.moments import moments_in
from hybridpar.tvm_kernels.operations.depthwise_batch_norm import conv_norm_key
from hybridpar.tvm_kernels.shapes import ConvNormShape, ConvShape, Direction, Layout

#: Most plans that are kept, so that images of many sizes do not fill the memory.
_MOST_PLANS = 4096

_NOTHING = (False, False, False)

Pair = tuple[int, int]
#: Whether the gradients of input, weights and bias are wanted.
Wanted = Sequence[bool]


def layout_of(tensor: Tensor) -> Layout | None:
    """The memory format of an image.

    Args:
        tensor: Any tensor.

    Returns:
        The format; None for a tensor that is not four-dimensional, not dense, or dense in both formats.
    """
    if tensor.ndim != 4:
        return None
    last = tensor.is_contiguous(memory_format=torch.channels_last)
    if tensor.is_contiguous():
        return None if last else Layout.CONTIGUOUS
    return Layout.CHANNELS_LAST if last else None


def usable(layout: Layout | None, image: Tensor, *others: Tensor) -> bool:
    """Whether kernels can read tensors that belong to an image of a layout.

    Args:
        layout: Of the image; None where it is not dense.
        image: (N, C, H, W).
        others: Tensors that are read beside it, such as the weights.

    Returns:
        Whether all have one device and a dtype that kernels read, and the others are contiguous.
    """
    dtype = image.dtype
    if layout is None or not (dtype is torch.float32 if image.is_cpu else image.is_cuda):
        return False
    device = image.device
    return all(other.dtype is dtype and other.device == device and other.is_contiguous() for other in others)


def fits(weight: Tensor, channels: int, layout: Layout | None) -> bool:
    """Whether weights are one filter per channel whose strides make torch's result lie in the layout of the image.

    Contiguous weights may have any stride of the channel axis, of size 1, and torch derives a layout from it.

    Args:
        weight: (C, 1, KH, KW).
        channels: C.
        layout: Of the image; None where it is not dense.

    Returns:
        Whether they are.
    """
    plain = weight.ndim == 4 and weight.shape[0] == channels and weight.shape[1] == 1
    return plain and (layout is Layout.CHANNELS_LAST or weight.stride(1) != 1)


def out_sizes(sizes: Sequence[int], taps: Sequence[int], stride: Any, padding: Any, dilation: Any) -> tuple[int, ...]:
    """The sizes of the output.

    Args:
        sizes: N, C, H, W of the input.
        taps: Rows and columns of a filter.
        stride: Vertical and horizontal, as the next ones.
        padding: Zeros on each side.
        dilation: Input elements from one tap to the next.

    Returns:
        N, C, OH, OW.
    """
    rows, columns = (
        (sizes[2 + axis] + 2 * padding[axis] - dilation[axis] * (taps[axis] - 1) - 1) // stride[axis] + 1
        for axis in (0, 1)
    )
    return sizes[0], sizes[1], rows, columns


@dataclass(frozen=True, slots=True)
class CallPlan:
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
        summing: Kernel of the output that also leaves its moments, at the beginning of its scratch; None where they are
            not wanted, too.
    """

    layout: Layout
    numbers: tuple[Pair, Pair, Pair]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    differentiable: bool
    forward: AnyKernel | None
    input_gradient: AnyKernel | None
    weight_gradient: AnyKernel | None
    summing: TunedKernel | None = None

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, moments: list[Tensor] | None = None) -> Tensor:
        """Compute the output, and its moments where there is a kernel that computes both.

        Args:
            x: (N, C, H, W).
            weight: (C, 1, KH, KW).
            bias: (C), or None.
            moments: Gets the moments, (2, C) float64, appended; None where they are not wanted.

        Returns:
            (N, C, OH, OW), in the layout of x.
        """
        kernel = self.forward
        if kernel is None or not kernel.takes(x, weight):
            return F.conv2d(x, weight, bias, *self.numbers, self.sizes[1])
        out = x.new_empty_strided(self.sizes, self.strides)
        if moments is not None and self.summing is not None and self.summing.takes(x, weight):
            moments.append(moments_in(self.summing(x, weight, bias, out), out.shape[1]))
        else:
            kernel(x, weight, bias, out)
        return out

    def gradients(
        self, x: Tensor, weight: Tensor, gradient: Tensor, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute the gradients of input and weights, those without a kernel by one call of torch.

        Args:
            x: (N, C, H, W).
            weight: (C, 1, KH, KW).
            gradient: Of the output.
            wanted: Whether the gradients of input and weights are wanted.

        Returns:
            Gradient of the input, (N, C, H, W), and of the weights, (C, 1, KH, KW); None for one that is not wanted.
        """
        if gradient.stride() != self.strides:
            gradient = gradient.contiguous(memory_format=FORMATS[self.layout])
        to_x = to_weight = None
        to_be_x, to_be_weight = wanted[0], wanted[1]
        kernel = self.input_gradient
        if to_be_x and kernel is not None and kernel.takes(gradient, weight):
            to_x = torch.empty_like(x)
            kernel(gradient, weight, None, to_x)
            to_be_x = False
        kernel = self.weight_gradient
        if to_be_weight and kernel is not None and kernel.takes(x, gradient):
            to_weight = weight.new_empty(weight.shape)
            kernel(x, gradient, None, to_weight)
            to_be_weight = False
        if to_be_x or to_be_weight:
            found = stock_gradients(x, weight, gradient, self.numbers, (to_be_x, to_be_weight))
            to_x, to_weight = to_x if found[0] is None else found[0], to_weight if found[1] is None else found[1]
        return to_x, to_weight


def stock_gradients(
    x: Tensor, weight: Tensor, gradient: Tensor, numbers: Sequence[Any], wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of input and weights by one call of torch.

    Args:
        x: (N, C, H, W).
        weight: (C, 1, KH, KW).
        gradient: Of the output.
        numbers: Stride, padding and dilation.
        wanted: Whether the gradients of input and weights are wanted.

    Returns:
        Gradient of the input, (N, C, H, W), and of the weights, (C, 1, KH, KW); None for one that is not wanted.
    """
    found = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, *numbers, False, [0, 0], x.shape[1], [*wanted[:2], False]
    )
    return found[0], found[1]


def plan_of(
    choices: Choices,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    wanted: Wanted | None = None,
    act: str | None = None,
) -> CallPlan | None:
    """The plan of a call, made at the first of all equal calls.

    Args:
        choices: What decides.
        x: (N, C, H, W).
        weight: (C, 1, KH, KW).
        bias: (C), or None.
        stride: Of rows and columns.
        padding: Zeros on each side, of rows and columns.
        dilation: Of rows and columns.
        wanted: Whether the gradients of input, weights and bias will be computed; None for what autograd would compute.
        act: The activation of a norm behind it that would take moments; None for none.

    Returns:
        The plan; None where torch's own operation computes all of it.

    Raises:
        KernelError: A kernel is missing, and HYBRIDPAR_KERNELS is `strict`.
    """
    if wanted is None:
        wanted = _NOTHING
        if torch.is_grad_enabled():
            wanted = (x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
    form = (
        *(x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(), weight.dtype, weight.device),
        None if bias is None else (bias.stride(), bias.dtype, bias.device),
        *(stride, padding, dilation, wanted, torch.get_num_threads(), act),
    )
    try:
        return choices.plans[form]  # type: ignore[no-any-return]
    except KeyError:
        pass
    plan = _made(choices, x, weight, bias, (stride, padding, dilation), wanted, act)
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
    wanted: Wanted,
    act: str | None,
) -> CallPlan | None:
    layout = layout_of(x)
    if layout is None or not usable(layout, x, weight, *(() if bias is None else (bias,))):
        return None
    if not fits(weight, x.shape[1], layout):
        return None
    taps = weight.shape[2:]
    kernels = [
        kernel_for(x.device, x.dtype, direction, x.shape, taps, *numbers, layout) if needed else None
        for direction, needed in zip(Direction, (True, *wanted), strict=False)
    ]
    if all(kernel is None for kernel in kernels):
        return None
    sizes = out_sizes(x.shape, taps, *numbers)
    strides = torch.empty(sizes, device="meta", memory_format=FORMATS[layout]).stride()
    summing = None
    if act is not None and x.is_cpu and layout is Layout.CHANNELS_LAST:
        pairs = ((int(one[0]), int(one[1])) for one in (taps, *numbers))
        shape = ConvNormShape(ConvShape(*map(int, x.shape), *pairs), act)  # type: ignore[arg-type]
        summing = choices.decide(conv_norm_key(shape, torch.get_num_threads(), cpu_fingerprint())).kernel
    forward, to_x, to_weight = kernels
    return CallPlan(layout, numbers, sizes, strides, any(wanted), forward, to_x, to_weight, summing)
