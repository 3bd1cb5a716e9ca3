"""Runs a model's forward pass on the meta device in milliseconds, to see which shapes reach its layers.

On the meta device tensors have no values, and most operations cost microseconds there. Two do not: convolutions and
BatchNorm are decomposed in Python, and take most of the time; and convolutions do not know there what layout they give
on a device. Inside of `outlined` these two are what their sizes say, and nothing is computed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def run_outlined(model: nn.Module, example: Tensor) -> None:
    """Run a model's forward pass on tensors without values; parameters and buffers stay as they are.

    Args:
        model: Any module.
        example: An input on the meta device.

    Raises:
        Exception: The model wants values, or whatever it raises on the meta device.
    """
    state = {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    with _Outlined():
        torch.func.functional_call(model, state, (example,))


class _Outlined(TorchFunctionMode):
    """Inside, the costly operations on the meta device give an empty result of the right form."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        form = _FORMS.get(func)
        if form is not None:
            found = form(*args, **(kwargs or {}))
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """As `conv2d`; None for arguments that it refuses."""
    if not (x.is_meta and x.ndim == weight.ndim == 4):
        return None
    if x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups or x.dtype is not weight.dtype:
        return None
    sizes = []
    for axis, step, apart in ((2, _two(stride)[0], _two(dilation)[0]), (3, _two(stride)[1], _two(dilation)[1])):
        reach = apart * (weight.shape[axis] - 1)
        zeros = {"valid": 0, "same": reach}.get(padding) if isinstance(padding, str) else 2 * _two(padding)[axis - 2]
        if zeros is None:
            return None
        sizes.append((x.shape[axis] + zeros - reach - 1) // step + 1)
    if min(sizes) < 1:
        return None
    # Torch's backends give the layout that either of the two suggests.
    last = _suggests_last(x) or _suggests_last(weight)
    return _like((x.shape[0], weight.shape[0], *sizes), last, x, weight, bias)


def _unknown(*_: Any, **__: Any) -> Tensor | None:
    """Refuse other convolutions, whose layout is not known here.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("a convolution whose layout is not known without a device")


def _normalised(
    x: Tensor, mean: Any, variance: Any, weight: Tensor | None = None, bias: Tensor | None = None, *_: Any, **__: Any
) -> Tensor | None:
    """As `batch_norm`, whose result lies as a dense input does."""
    if not (x.is_meta and x.ndim == 4):
        return None
    last = not x.is_contiguous() and (x.is_contiguous(memory_format=torch.channels_last) or _suggests_last(x))
    return _like(x.shape, last, x, weight, bias)


def _like(sizes: Sequence[int], last: bool, x: Tensor, *others: Tensor | None) -> Tensor:
    """An empty tensor, behind operands that may want gradients."""
    form = torch.channels_last if last else torch.contiguous_format
    out = torch.empty(sizes, dtype=x.dtype, device="meta", memory_format=form)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, *others)):
        return out.requires_grad_().clone()  # no leaf, so that what follows may work in place
    return out


def _suggests_last(tensor: Tensor) -> bool:
    """What torch's `suggest_memory_format` says: slices count as the tensor that they are of."""
    sizes, strides = tensor.shape, tensor.stride()
    least = 0
    if strides[1] == 0:
        return False
    for place in (1, 3, 2, 0):
        # What could be either is taken for contiguous.
        if strides[place] < least or (place == 0 and least == strides[1]):
            return False
        least = strides[place] * max(1, sizes[place])
    return True


def _two(value: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[1]) if len(value) == 2 else (value[0], value[0])


_FORMS: dict[Any, Callable[..., Tensor | None]] = {
    F.conv2d: _convolved,
    F.batch_norm: _normalised,
    **dict.fromkeys((F.conv3d, F.conv_transpose2d, F.conv_transpose3d), _unknown),
}
