"""Why: on a CPU a codec is either a few passes over small chunks in torch, or one compiled pass; this is the latter.

Each function here does what its codec otherwise does in torch, and says whether it did: it does nothing where kernels
are switched off or cannot be had, or where tensors are not dense float32 on a CPU. What is decoded is the same bit for
bit either way, as it is given by the bytes, so workers with and without kernels can train together. What is encoded
differs where sums are made in another order.

Addresses go to the kernels, so the checks that keep them inside of their tensors are made here. The GIL is released.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridpar.compress.residual import KeptResidual, Residual
from hybridpar.kernel_build import Function, load_kernels

if TYPE_CHECKING:
    from hybridpar.compress.codec import Codec

_SOURCES = [Path(__file__).with_name(f"{name}_source.py") for name in ("onebit",)]

#: From so many values on, what is written is not read again before it would have left the caches.
_STREAM = 1 << 16


@functools.cache
def table() -> Mapping[str, Function]:
    """All kernels by name, built if need be; empty where there are none."""
    return load_kernels("codec", _SOURCES) or {}


def prepare(codec: Codec) -> None:
    """Build or load what a codec needs, so that no step waits for it; no collective.

    The first time on a machine it takes as long as TVM takes to start and compile, some 10 seconds; after that it takes
    milliseconds.

    Args:
        codec: Any codec; most need nothing.
    """
    inner: Any = codec
    while inner is not None:
        if inner.kernels:
            table()
        inner = getattr(inner, "inner", None)


def onebit_encode(values: Tensor, residual: Residual, lower: Tensor, upper: Tensor, packed: Tensor) -> bool:
    """Encode groups, and leave what is not sent.

    Args:
        values: One group per row.
        residual: Gives v, and is left as v - C(v).
        lower: Where the lower levels go, one per group.
        upper: Where the upper levels go.
        packed: Where the bits go.
    """
    kept, pending, factor = _halves(residual)
    if not _dense(values, kept, pending):
        return False
    groups, length = values.shape
    assert packed.numel() == -(-groups * length // 8)
    assert lower.numel() == upper.numel() == groups
    stream = int(values.numel() >= _STREAM)
    places = (lower.data_ptr(), upper.data_ptr(), packed.data_ptr(), groups, length, stream)
    if kept is None or pending is None:
        table()["onebit_encode"](values.data_ptr(), 0, 0, *places)
    else:
        assert kept.numel() == pending.numel() == values.numel()
        table()["onebit_encode_keep"](values.data_ptr(), kept.data_ptr(), pending.data_ptr(), *places, factor)
    return True


def onebit_decode(lower: Tensor, upper: Tensor, packed: Tensor, out: Tensor, divisor: int) -> bool:
    """Set out = C(v) / divisor, one group per row."""
    return _onebit("onebit_decode", lower, upper, packed, out, float(divisor))


def onebit_add(lower: Tensor, upper: Tensor, packed: Tensor, total: Tensor) -> bool:
    """Add C(v) to `total`, one group per row."""
    return _onebit("onebit_add", lower, upper, packed, total)


def _onebit(name: str, lower: Tensor, upper: Tensor, packed: Tensor, out: Tensor, *floats: float) -> bool:
    if not _dense(out):
        return False
    groups, length = out.shape
    assert packed.numel() == -(-groups * length // 8)
    assert lower.numel() == upper.numel() == groups
    stream = int(out.numel() >= _STREAM)
    places = (lower.data_ptr(), upper.data_ptr(), packed.data_ptr(), out.data_ptr(), groups, length, stream)
    table()[name](*places, *floats)
    return True


def _halves(residual: Residual) -> tuple[Tensor | None, Tensor | None, float]:
    if isinstance(residual, KeptResidual):
        return residual.kept, residual.pending, residual.factor
    return None, None, 1.0


def _dense(*tensors: Tensor | None) -> bool:
    """Whether kernels can be had and take these tensors."""
    for tensor in tensors:
        if tensor is not None and (
            tensor.device.type != "cpu" or tensor.dtype != torch.float32 or not tensor.is_contiguous()
        ):
            return False
    return bool(table())
