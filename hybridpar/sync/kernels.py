"""Calls the compiled kernels of gradients in shared memory; where there are none, torch does the same."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.codegen.build import Function, load_kernels
from hybridpar.codegen.tir_writer import LANES
from hybridpar.sync.pieces import Sgd

#: From so many values on, what is written is not read again before it would have left the caches.
_STREAM = 1 << 16


@functools.cache
def functions() -> dict[str, Function]:
    """The kernels of this CPU by name, built if need be; none where they cannot be had."""
    return load_kernels("step", [Path(__file__).with_name("step_source.py")]) or {}


def hand_over(source: Tensor, target: Tensor, squares: Tensor) -> None:
    """Copy values, and add up their squares.

    Args:
        source: 1-D.
        target: 1-D, of the same type and size.
        squares: One element, float64; replaced by the sum.
    """
    kernel = functions().get("hand_over")
    if kernel is None or source.dtype != torch.float32:
        target.copy_(source)
        squares.copy_(torch.dot(target, target))
        return
    whole = source.numel() // LANES * LANES
    kernel(source.data_ptr(), target.data_ptr(), squares.data_ptr(), whole, int(whole >= _STREAM))
    if whole < source.numel():
        rest = source[whole:]
        target[whole:].copy_(rest)
        squares += torch.dot(rest, rest)


def step_sgd(
    whole: Tensor,
    momentum: Tensor | None,
    first: Tensor,
    bytes_apart: int,
    workers: int,
    factor: float,
    options: Sgd,
    squares: Tensor,
) -> int | None:
    """Take a step of SGD on a multiple of the sum of some workers' gradients, as far as vectors are filled.

    Args:
        whole: The parameter, 1-D in memory order.
        momentum: Of the same size.
        first: The gradient of the first worker.
        bytes_apart: How far the gradient of the next worker is from it in memory.
        workers: How many there are, at least 2.
        factor: What the sum is multiplied with.
        options: Of the step.
        squares: One element, float64; replaced by the sum of the squares of the multiple.

    Returns:
        How many elements were stepped, from the first one on; None where there is no kernel.
    """
    kind = "nesterov" if options.nesterov else "plain" if momentum is None else "momentum"
    kernel = functions().get(f"sgd_{kind}_decay" if options.weight_decay else f"sgd_{kind}")
    if kernel is None or whole.dtype != torch.float32:
        return None
    count = whole.numel() // LANES * LANES
    places = (whole.data_ptr(), 0 if momentum is None else momentum.data_ptr(), first.data_ptr(), squares.data_ptr())
    rate = options.lr if options.maximize else -options.lr
    rates = (factor, rate, options.weight_decay, options.momentum, 1.0 - options.dampening)
    kernel(*places, count, workers, bytes_apart // first.element_size(), *rates)
    return count
