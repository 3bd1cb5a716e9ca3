"""Calls the compiled BatchNorm kernels on tensors, and shares out their rows to threads.

The caller has checked that tensors are dense float32 on a CPU, that activations lie in channels-last order and that the
parameters have one value per channel. The GIL is released while kernels run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.codegen import LANES
from hybridpar.codegen.build import Function, load_kernels
from hybridpar.tvm_kernels.schedules import FAR, norm_rows
from hybridpar.tvm_kernels.spread import run_ranges

_SCHEDULES = Path(__file__).parent / "schedules"

#: At most so many segments are made of a tensor, so that sums of segments stay few beside it.
_SEGMENTS = 64

#: Values of a segment at least: segments are walked from the last one on, and CPUs fetch ahead only within one.
_LEAST = 1 << 16

#: Values below which a second thread costs more than it brings.
_SHARE = 1 << 16


@functools.cache
def table() -> Mapping[str, Function]:
    """All kernels by name, built if need be; empty where there are none."""
    return load_kernels("norm", [_SCHEDULES / "norm.py"], [_SCHEDULES / "norm_rows.py"]) or {}


@dataclass(frozen=True)
class RowPlan:
    """How the rows of a tensor are walked; it follows from their number and length alone.

    Attributes:
        rows: Pixels of all images.
        channels: Values of a row.
        repeat: Rows that are one wide row, so that it is whole vectors.
        length: Wide rows of a segment, a multiple of `CHUNK`.
        segments: What threads share; 0 where all rows together are no wide row.
    """

    rows: int
    channels: int
    repeat: int
    length: int
    segments: int

    @property
    def width(self) -> int:
        """Values of a wide row."""
        return self.channels * self.repeat


@functools.lru_cache(maxsize=1024)
def plan_rows(rows: int, channels: int) -> RowPlan:
    """Plan how rows are walked."""
    repeat = math.lcm(channels, LANES) // channels  # the fewest that fill whole vectors
    wide = rows // repeat
    least = max(wide / _SEGMENTS, _LEAST / (repeat * channels))
    length = norm_rows.CHUNK * max(2, math.ceil(least / norm_rows.CHUNK))
    return RowPlan(rows, channels, repeat, length, math.ceil(wide / length))


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Normalise and activate."""
    channels = x.shape[1]
    plan = plan_rows(x.numel() // channels, channels)
    y, statistics = torch.empty_like(x), torch.empty(norm_rows.TABLE_ROWS, plan.width)
    phases = norm_rows.JOIN | norm_rows.APPLY
    if training:
        phases |= norm_rows.REDUCE | (0 if mean is None else norm_rows.TRACK)
    else:
        phases |= norm_rows.FIXED
    operands = (x, weight, bias, mean, variance, y, statistics)
    _run(f"norm_forward_{activation}", plan, operands, y, phases, eps, momentum)
    return y, statistics


def backward(
    grad_y: Tensor, x: Tensor, statistics: Tensor, activation: str, fixed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `forward`."""
    channels = x.shape[1]
    plan = plan_rows(x.numel() // channels, channels)
    grad_x, grad_weight, grad_bias = torch.empty_like(x), torch.empty(channels), torch.empty(channels)
    phases = norm_rows.REDUCE | norm_rows.JOIN | norm_rows.APPLY | (norm_rows.FIXED if fixed else 0)
    operands = (x, grad_y, statistics, grad_x, grad_weight, grad_bias)
    _run(f"norm_backward_{activation}", plan, operands, grad_x, phases)
    return grad_x, grad_weight, grad_bias


def _run(
    name: str, plan: RowPlan, operands: Sequence[Tensor | None], result: Tensor, phases: int, *numbers: float
) -> None:
    """Run phases of a kernel, those over rows on as many threads as torch would take."""
    sums = (plan.segments * norm_rows.SEGMENT + norm_rows.SHARED) * plan.width
    kernel, tensors = table()[name], (*operands, torch.empty(sums, dtype=torch.float64))
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    stream = int(result.numel() * 4 > FAR and result.data_ptr() % 64 == 0)

    sizes = plan.rows, plan.channels, plan.repeat, plan.length

    def call(phase: int, begin: int, end: int) -> None:
        kernel(*addresses, *sizes, begin, end, phase, stream, *numbers)

    threads = min(torch.get_num_threads(), plan.segments, plan.rows * plan.channels // _SHARE)
    if threads <= 1:
        call(phases, 0, plan.segments)
        return
    modes = phases & (norm_rows.FIXED | norm_rows.TRACK)
    for phase, sharers in ((norm_rows.REDUCE, threads), (norm_rows.JOIN, 1), (norm_rows.APPLY, threads)):
        if phases & phase:
            run_ranges(functools.partial(call, phase | modes), plan.segments, sharers)
