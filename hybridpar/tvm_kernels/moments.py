"""Hands the moments of a convolution's result to the BatchNorm behind it, on the tensor itself.

Moments are an attribute of the tensor that they were computed for; other tensors carry none. The norm removes them, and
uses them only where the tensor is that one and has not been written to since, by autograd's count. Where a hook
replaced the tensor, and for views, copies and changes in place, the norm computes its own. Copies and pickles of the
tensor have no moments.

`optimize` finds which convolution has such a norm behind it; the layer keeps a `Behind`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

#: The attribute of a tensor, and that of a layer.
_NAME, _BEHIND = "_moments", "_behind"


class _Moments:
    """Moments, and the state of the tensor that they were computed for."""

    __slots__ = ("at", "of", "values", "version")

    def __init__(self, values: Tensor, tensor: Tensor) -> None:
        self.values = values
        self.of = weakref.ref(tensor)
        self.version, self.at = tensor._version, tensor.data_ptr()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())


def _nothing() -> None:
    return None


def attach_moments(tensor: Tensor, values: Tensor) -> None:
    """Attach the moments of a tensor to it.

    Args:
        tensor: A result that was just computed, outside of inference mode.
        values: (2, C) float64, mean and biased variance of its channels.
    """
    tensor._moments = _Moments(values, tensor)  # type: ignore[attr-defined]


def moments_in(scratch: Tensor | None, channels: int) -> Tensor:
    """The moments at the beginning of a kernel's scratch memory, copied.

    Args:
        scratch: Bytes of the call; never None for a kernel that leaves moments.
        channels: C.

    Returns:
        (2, C) float64.
    """
    assert scratch is not None
    return scratch[: 16 * channels].view(torch.float64).view(2, channels).clone()


def take_moments(tensor: Tensor) -> Tensor | None:
    """Detach the moments of a tensor.

    Args:
        tensor: That a convolution may have computed.

    Returns:
        (2, C) float64; None where there are none, or where the tensor has been written to since.
    """
    found: _Moments | None = tensor.__dict__.pop(_NAME, None)
    if found is None or found.of() is not tensor:
        return None
    return found.values if (found.version, found.at) == (tensor._version, tensor.data_ptr()) else None


class Behind:
    """The norm that alone reads what a convolution computes.

    It does not keep the norm alive, and copies and pickles of a model have their own norm here.

    Args:
        norm: The layer.
    """

    def __init__(self, norm: nn.Module | None) -> None:
        self._norm = None if norm is None else weakref.ref(norm)

    @property
    def norm(self) -> nn.Module | None:
        """The layer, while there is one."""
        return None if self._norm is None else self._norm()

    @property
    def wants(self) -> str | None:
        """The activation of the norm if it would take moments now; else None."""
        if torch.is_inference_mode_enabled():  # tensors do not count their changes there
            return None
        wanted: str | None = getattr(self.norm, "takes_moments_for", None)
        return wanted

    def __reduce__(self) -> tuple[Any, ...]:
        return (Behind, (self.norm,))


def behind(layer: nn.Module) -> Behind | None:
    """The norm behind a convolution that `optimize` found.

    Args:
        layer: The convolution.

    Returns:
        What the layer keeps; None where there is no such norm.
    """
    found: Behind | None = layer.__dict__.get(_BEHIND)
    return found


def set_behind(layer: nn.Module, norm: nn.Module | None) -> None:
    """Note on a convolution which norm alone reads its result, or None; state dicts do not show it.

    Args:
        layer: The convolution.
        norm: The norm; None forgets it.
    """
    if norm is None:
        layer.__dict__.pop(_BEHIND, None)
    else:
        layer.__dict__[_BEHIND] = Behind(norm)
