"""Kernels written in NumPy that stand in for compiled ones, for tests of the op, the choice and the swap.

A kernel of this module keeps the contract of compiled ones: it gets addresses and a range, checks nothing, and writes
each row of its result once. It adds up taps in float32, so it is also an oracle that shares no code with torch.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.batch_norm_act import STOCK
from hybridpar.tvm_kernels.choice import Choices, use_choices
from hybridpar.tvm_kernels.database import Database, KernelRecord, versions
from hybridpar.tvm_kernels.kernel import Phase, TunedKernel
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.schedules.norm_rows import TABLE_ROWS
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout, NormShape


class NormStandIn:
    """Takes the place of the kernels of norms: torch computes, behind the same two functions.

    Attributes:
        calls: How often forward and backward were computed, by rows, channels and activation.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, Counter[NormShape]] = {"forward": Counter(), "backward": Counter()}
        patch.setattr(norm_kernels, "table", lambda: {"stands": "in"})
        patch.setattr(norm_kernels, "forward", self._forward)
        patch.setattr(norm_kernels, "backward", self._backward)

    def _note(self, name: str, x: Tensor, act: str) -> None:
        self.calls[name][NormShape(x.numel() // x.shape[1], x.shape[1], act)] += 1

    def _forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        variance: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        act: str,
    ) -> tuple[Tensor, Tensor]:
        self._note("forward", x, act)
        with torch.no_grad():
            y = STOCK[act](functional.batch_norm(x, mean, variance, weight, bias, training, momentum, eps))
            statistics = torch.zeros(TABLE_ROWS, norm_kernels.plan_rows(1, x.shape[1]).width)
            kept = statistics[:, : x.shape[1]]
            kept[0], kept[1], kept[4] = 1.0 if weight is None else weight, 0.0 if bias is None else bias, eps
            if not training and mean is not None and variance is not None:
                kept[2], kept[3] = mean, variance
        return y, statistics

    def _backward(
        self, grad_y: Tensor, x: Tensor, statistics: Tensor, act: str, fixed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._note("backward", x, act)
        weight, bias, mean, variance, eps = statistics[:5, : x.shape[1]].contiguous()
        running = (mean, variance) if fixed else (None, None)
        numbers = (not fixed, float(eps[0]))
        aten = torch.ops.aten
        z, *saved = aten.native_batch_norm(x, weight, bias, *running, numbers[0], 0.0, numbers[1])
        gradient = {
            "none": lambda: grad_y,
            "relu": lambda: aten.threshold_backward(grad_y, z, 0),
            "relu6": lambda: aten.hardtanh_backward(grad_y, z, 0, 6),
            "silu": lambda: aten.silu_backward(grad_y, z),
        }[act]()
        first, second, third = aten.native_batch_norm_backward(
            gradient, x, weight, *running, *saved, *numbers, [True, True, True]
        )
        return first, second, third


def key_of(
    shape: ConvShape | str,
    direction: Direction,
    layout: Layout = Layout.CHANNELS_LAST,
    threads: int = 1,
    device: str | None = None,
    dtype: str = "float32",
) -> KernelKey:
    """A key of this CPU unless told otherwise."""
    parsed = ConvShape.parse(shape) if isinstance(shape, str) else shape
    return KernelKey(direction, parsed, layout, threads, cpu_fingerprint() if device is None else device, dtype)


def record_of(shape: ConvShape | str, direction: Direction, layout: Layout, **fields: Any) -> KernelRecord:
    """A record of this device, twice as fast as torch unless told otherwise."""
    known: dict[str, Any] = {
        "direction": direction,
        "shape": shape if isinstance(shape, str) else shape.text,
        "layout": layout,
        "device": cpu_fingerprint(),
        "threads": 1,
        "versions": versions(fields.get("device", cpu_fingerprint())),
        "parameters": {"tile": 2},
        "ms": 1.0,
        "stock_ms": 2.0,
        "error": 1e-7,
    }
    return KernelRecord(**{**known, **fields})


def all_records(shape: ConvShape | str, *layouts: Layout, **fields: Any) -> list[KernelRecord]:
    """Records of all directions."""
    return [record_of(shape, direction, layout, **fields) for layout in layouts or Layout for direction in Direction]


class StandIn:
    """Makes kernels and counts their calls, by direction.

    Attributes:
        calls: How often each direction was computed.
        ranges: The ranges that were asked for.
    """

    def __init__(self, broken: bool = False) -> None:
        self.calls = dict.fromkeys(Direction, 0)
        self.ranges: list[tuple[int, int]] = []
        self.broken = broken

    def __call__(self, records: Sequence[Any]) -> list[TunedKernel | KernelsUnavailable]:
        return [KernelsUnavailable("the compiler is on strike") if self.broken else self._make(one) for one in records]

    def _make(self, record: KernelRecord) -> TunedKernel:
        shape, layout = ConvShape.parse(record.shape), record.layout
        images = shape.batch
        rows = {
            Direction.FORWARD: self._forward,
            Direction.INPUT_GRADIENT: self._input_gradient,
            Direction.WEIGHT_GRADIENT: self._weight_partials,
        }[record.direction]

        def first(*places: int) -> None:
            self.ranges.append(places[-2:])
            if places[-2] == 0:
                self.calls[record.direction] += 1
            rows(shape, layout, *places)

        phases: list[Phase] = [(first, images, record.threads)]
        scratch = 0
        if record.direction is Direction.WEIGHT_GRADIENT:
            taps = shape.channels * shape.kernel[0] * shape.kernel[1]
            scratch = 4 * images * taps
            phases.append((lambda *places: _merge(shape, *places), 1, record.threads))
        return TunedKernel(tuple(phases), scratch)

    def _forward(self, shape: ConvShape, layout: Layout, x: int, w: int, b: int, y: int, _: int, *part: int) -> None:
        image, out, weight = _image(x, shape, layout), _out(y, shape, layout), _weight(w, shape)
        bias = _array(b, shape.channels)[:, None, None] if b else 0.0
        for n in range(*part):
            out[n] = bias
            for inner, outer, tap in _meetings(shape):
                out[n][(..., *outer)] += weight[:, tap[0], tap[1], None, None] * image[n][(..., *inner)]

    def _input_gradient(
        self, shape: ConvShape, layout: Layout, gy: int, w: int, _b: int, gx: int, _s: int, *part: int
    ) -> None:
        gradient, out, weight = _out(gy, shape, layout), _image(gx, shape, layout), _weight(w, shape)
        for n in range(*part):
            out[n] = 0
            for inner, outer, tap in _meetings(shape):
                out[n][(..., *inner)] += weight[:, tap[0], tap[1], None, None] * gradient[n][(..., *outer)]

    def _weight_partials(
        self, shape: ConvShape, layout: Layout, x: int, gy: int, _b: int, _gw: int, scratch: int, *part: int
    ) -> None:
        image, gradient = _image(x, shape, layout), _out(gy, shape, layout)
        partial = _array(scratch, shape.batch, shape.channels, *shape.kernel)
        for n in range(*part):
            partial[n] = 0
            for inner, outer, tap in _meetings(shape):
                product = image[n][(..., *inner)] * gradient[n][(..., *outer)]
                partial[n][:, tap[0], tap[1]] = product.sum((1, 2))


def _merge(shape: ConvShape, _x: int, _gy: int, _b: int, gw: int, scratch: int, begin: int, end: int) -> None:
    if begin < end:
        _weight(gw, shape)[:] = _array(scratch, shape.batch, shape.channels, *shape.kernel).sum(0)


def _array(address: int, *sizes: int) -> Any:
    count = int(np.prod(sizes))
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)).reshape(sizes)


def _weight(address: int, shape: ConvShape) -> Any:
    return _array(address, shape.channels, *shape.kernel)


def _image(address: int, shape: ConvShape, layout: Layout) -> Any:
    return _activations(address, layout, shape.batch, shape.channels, shape.height, shape.width)


def _out(address: int, shape: ConvShape, layout: Layout) -> Any:
    return _activations(address, layout, shape.batch, shape.channels, shape.out_height, shape.out_width)


def _activations(address: int, layout: Layout, n: int, c: int, h: int, w: int) -> Any:
    if layout is Layout.CHANNELS_LAST:
        return _array(address, n, h, w, c).transpose(0, 3, 1, 2)
    return _array(address, n, c, h, w)


def _meetings(shape: ConvShape) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice], tuple[int, int]]]:
    """Slices of input and output that a tap joins, for each tap that meets the image at all."""
    for row in range(shape.kernel[0]):
        for column in range(shape.kernel[1]):
            rows = _meeting(shape.height, shape.out_height, row, shape.stride[0], shape.padding[0], shape.dilation[0])
            columns = _meeting(
                shape.width, shape.out_width, column, shape.stride[1], shape.padding[1], shape.dilation[1]
            )
            if rows and columns:
                yield (rows[0], columns[0]), (rows[1], columns[1]), (row, column)


def _meeting(size: int, out: int, tap: int, stride: int, padding: int, dilation: int) -> tuple[slice, slice] | None:
    places = [(one * stride + tap * dilation - padding, one) for one in range(out)]
    inside = [(place, one) for place, one in places if 0 <= place < size]
    if not inside:
        return None
    return slice(inside[0][0], inside[-1][0] + 1, stride), slice(inside[0][1], inside[-1][1] + 1)


@contextmanager
def tuned(records: list[KernelRecord], make: StandIn | None = None) -> Iterator[StandIn]:
    """Choose from records, with kernels of this module, until the end of the block."""
    make = make or StandIn()
    before = use_choices(Choices(Database("the test's database", records), make))
    try:
        yield make
    finally:
        use_choices(before)
