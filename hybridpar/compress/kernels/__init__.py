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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridpar.compress.residual import KeptResidual, Residual
from hybridpar.compress.scratch import CHUNK, Scratch
from hybridpar.kernel_build import Function, load_kernels

if TYPE_CHECKING:
    from hybridpar.compress.codec import Codec
    from hybridpar.compress.noise import Noise
    from hybridpar.compress.packing import Fields

_SOURCES = [Path(__file__).with_name(f"{name}_source.py") for name in ("onebit", "onebit_columns", "twobit", "qsgd")]

#: From so many values on, what is written is not read again before it would have left the caches.
_STREAM = 1 << 16


@functools.cache
def table() -> Mapping[str, Function]:
    """All kernels by name, built if need be; empty where there are none."""
    return load_kernels("codec", _SOURCES) or {}


def prepare(codec: Codec, device: torch.device | None = None) -> None:
    """Build or load what a codec needs, so that no step waits for it; no collective.

    The first time on a machine it takes as long as TVM takes to start and compile, some 10 seconds; after that it takes
    milliseconds.

    Args:
        codec: Any codec; most need nothing.
        device: Where gradients will be; None for a CPU. Elsewhere torch does the work.
    """
    if device is not None and device.type != "cpu":
        return
    inner: Any = codec
    while inner is not None:
        if inner.kernels:
            table()
        inner = getattr(inner, "inner", None)


def onebit_encode(
    values: Tensor, residual: Residual, lower: Tensor, upper: Tensor, packed: Tensor, scratch: Scratch
) -> bool:
    """Encode groups, and leave what is not sent.

    Args:
        values: One group per row.
        residual: Gives v, and is left as v - C(v).
        lower: Where the lower levels go, one per group.
        upper: Where the upper levels go.
        packed: Where the bits go.
        scratch: Memory to borrow, where values do not lie side by side.
    """
    kept, pending, factor = _halves(residual)
    values = _side_by_side(values, scratch)
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


def onebit_encode_columns(
    values: Tensor, residual: Residual, lower: Tensor, upper: Tensor, packed: Tensor, scratch: Scratch
) -> bool:
    """As `onebit_encode`, where each column is a group.

    Args:
        values: Rows may lie apart.
        residual: In the order of the values, row by row.
        lower: Where the lower levels go, one per column.
        upper: Where the upper levels go.
        packed: Where the bits go, row by row, each in whole 16s.
        scratch: Memory to borrow.
    """
    kept, pending, factor = _halves(residual)
    if not _rows_are_dense(values) or not _dense(kept, pending):
        return False
    rows, columns = values.shape
    _check_columns(values, lower, upper, packed)
    ones = scratch.take("ones", columns)
    places = (lower.data_ptr(), upper.data_ptr(), ones.data_ptr(), packed.data_ptr())
    numbers = (rows, columns, values.stride(0), int(values.numel() >= _STREAM))
    if kept is None or pending is None:
        table()["onebit_columns_encode"](values.data_ptr(), 0, 0, *places, *numbers)
    else:
        assert kept.numel() == pending.numel() == values.numel()
        halves = (kept.data_ptr(), pending.data_ptr())
        table()["onebit_columns_encode_keep"](values.data_ptr(), *halves, *places, *numbers, factor)
    return True


def onebit_decode_columns(lower: Tensor, upper: Tensor, packed: Tensor, out: Tensor) -> bool:
    """Set out = C(v), one group per column; rows of `out` may lie apart."""
    return _columns("onebit_columns_decode", lower, upper, packed, out)


def onebit_add_columns(lower: Tensor, upper: Tensor, packed: Tensor, total: Tensor) -> bool:
    """Add C(v) to `total`, one group per column; its rows may lie apart."""
    return _columns("onebit_columns_add", lower, upper, packed, total)


@dataclass(frozen=True)
class ThresholdRule:
    """How a threshold follows from the values; see `hybridpar.compress.codecs.twobit`.

    Attributes:
        mode: 0 for `fixed`; 1 for the lesser of scale * mean and cap * largest; 2 for scale * mean, with what is sent
            decoded as the mean of what is sent.
        fixed: A threshold.
        scale: Of the mean magnitude.
        cap: Of the largest magnitude.
    """

    mode: int
    fixed: float
    scale: float
    cap: float


def twobit_encode(
    values: Tensor, residual: Residual, rule: ThresholdRule, level: Tensor, codes: Tensor, scratch: Scratch
) -> bool:
    """Encode values, and leave what is not sent.

    Args:
        values: 1-D.
        residual: Gives v, and is left as v - C(v).
        rule: What is sent.
        level: Where the level goes, one element.
        codes: Where the codes go, whole words of 32 bits.
        scratch: Memory to borrow, where values do not lie side by side.
    """
    kept, pending, factor = _halves(residual)
    values = _side_by_side(values, scratch)
    if not _dense(values, kept, pending):
        return False
    count = values.numel()
    assert codes.numel() == -(-count // 16) * 4
    places = (level.data_ptr(), codes.data_ptr(), count, rule.mode, int(count >= _STREAM))
    numbers = (rule.fixed, rule.scale, rule.cap)
    if kept is None or pending is None:
        table()["twobit_encode"](values.data_ptr(), 0, 0, *places, *numbers)
    else:
        assert kept.numel() == pending.numel() == count
        halves = (kept.data_ptr(), pending.data_ptr())
        table()["twobit_encode_keep"](values.data_ptr(), *halves, *places, *numbers, factor)
    return True


def twobit_decode(level: Tensor, codes: Tensor, out: Tensor, divisor: int) -> bool:
    """Set out = C(v) / divisor."""
    return _twobit("twobit_decode", level, codes, out, float(divisor))


def twobit_add(level: Tensor, codes: Tensor, total: Tensor) -> bool:
    """Add C(v) to `total`."""
    return _twobit("twobit_add", level, codes, total)


def largest(values: Tensor, out: Tensor) -> bool:
    """Set out to the largest magnitude, infinite where a value is not finite."""
    if not _dense(values, out):
        return False
    assert out.numel() == 1
    table()["qsgd_scale"](values.data_ptr(), out.data_ptr(), values.numel())
    return True


def qsgd_encode(
    values: Tensor, scale: Tensor, noise: Noise, steps: int, fields: Fields, words: Tensor, scratch: Scratch
) -> bool:
    """Round values to codes of a grid, and pack them as code + steps.

    Args:
        values: 1-D.
        scale: One element, at least as large as any value.
        noise: Drawn for this message.
        steps: Of the grid, from zero to the scale.
        fields: Where codes lie.
        words: What to fill.
        scratch: Memory to borrow, where values do not lie side by side.
    """
    values = _side_by_side(values, scratch)
    lies = fields.in_words
    if lies is None or not _dense(values, scale):
        return False
    assert values.numel() == fields.count
    planes, planar = words, lies is not fields
    if planar:
        assert planes.numel() == fields.bytes
        words, fields = scratch.take("plane words", lies.words, lies.word), lies
    assert words.numel() == fields.words
    # A run without values draws no place, as in torch, so that both ways round alike.
    places = torch.tensor([noise.place(stop - start) if stop > start else 0 for start, stop in fields.runs()])
    fixed = (fields.count, fields.words, fields.width, fields.per_word, steps, CHUNK)
    addresses = (values.data_ptr(), scale.data_ptr(), words.data_ptr(), noise.ring.data_ptr(), places.data_ptr())
    table()[f"qsgd_encode{words.itemsize * 8}"](*addresses, *fixed)
    if planar:
        table()["qsgd_spread"](words.data_ptr(), planes.data_ptr(), fields.words, fields.width)
    return True


def qsgd_decode(
    words: Tensor, scale: Tensor, fields: Fields, zero: int, unit: int, out: Tensor, scratch: Scratch
) -> bool:
    """Set out = (code - zero) / unit * scale."""
    return _qsgd("decode", words, scale, fields, zero, unit, out, scratch)


def qsgd_add(
    words: Tensor, scale: Tensor, fields: Fields, zero: int, unit: int, total: Tensor, scratch: Scratch
) -> bool:
    """Add (code - zero) / unit * scale to `total`."""
    return _qsgd("add", words, scale, fields, zero, unit, total, scratch)


def _qsgd(
    name: str, words: Tensor, scale: Tensor, fields: Fields, zero: int, unit: int, out: Tensor, scratch: Scratch
) -> bool:
    lies = fields.in_words
    if lies is None or not _dense(scale, out):
        return False
    assert out.numel() == fields.count
    if lies is not fields:
        assert words.numel() == fields.bytes
        planes, words, fields = words, scratch.take("plane words", lies.words, lies.word), lies
        table()["qsgd_collect"](planes.data_ptr(), words.data_ptr(), fields.words, fields.width)
    assert words.numel() == fields.words
    addresses = (words.data_ptr(), scale.data_ptr(), out.data_ptr())
    fixed = (fields.count, fields.words, fields.width, fields.per_word, zero)
    table()[f"qsgd_{name}{words.itemsize * 8}"](*addresses, *fixed, float(unit))
    return True


def _twobit(name: str, level: Tensor, codes: Tensor, out: Tensor, *floats: float) -> bool:
    if not _dense(out):
        return False
    assert codes.numel() * 4 >= out.numel()
    stream = int(out.numel() >= _STREAM)
    table()[name](level.data_ptr(), codes.data_ptr(), out.data_ptr(), out.numel(), stream, *floats)
    return True


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


def _columns(name: str, lower: Tensor, upper: Tensor, packed: Tensor, out: Tensor) -> bool:
    if not _rows_are_dense(out) or not _dense(lower, upper):
        return False
    _check_columns(out, lower, upper, packed)
    stream = int(out.numel() >= _STREAM)
    addresses = (lower.data_ptr(), upper.data_ptr(), packed.data_ptr(), out.data_ptr())
    table()[name](*addresses, *out.shape, out.stride(0), stream)
    return True


def _check_columns(values: Tensor, lower: Tensor, upper: Tensor, packed: Tensor) -> None:
    rows, columns = values.shape
    assert lower.numel() == upper.numel() == columns
    assert packed.numel() == rows * -(-columns // 16) * 2


def _rows_are_dense(values: Tensor) -> bool:
    """Whether values of a row lie side by side, one row behind the other; and are float32 on a CPU."""
    rows, columns = values.shape
    dense = columns == 1 or values.stride(1) == 1
    apart = rows == 1 or values.stride(0) >= columns
    return dense and apart and values.device.type == "cpu" and values.dtype == torch.float32


def _halves(residual: Residual) -> tuple[Tensor | None, Tensor | None, float]:
    if isinstance(residual, KeptResidual):
        return residual.kept, residual.pending, residual.factor
    return None, None, 1.0


def _side_by_side(values: Tensor, scratch: Scratch) -> Tensor:
    """The values, copied where they lie apart: so a gradient's strides change nothing in what is made of it."""
    if values.is_contiguous() or values.device.type != "cpu" or values.dtype != torch.float32 or not table():
        return values
    return scratch.take("side by side", values.numel()).view(values.shape).copy_(values)


def _dense(*tensors: Tensor | None) -> bool:
    """Whether kernels can be had and take these tensors."""
    for tensor in tensors:
        if tensor is not None and (
            tensor.device.type != "cpu" or tensor.dtype != torch.float32 or not tensor.is_contiguous()
        ):
            return False
    return bool(table())
