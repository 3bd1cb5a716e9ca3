"""Calls the compiled kernels of gradients in shared memory; where there are none, torch does the same."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.codegen.build import Function, load_kernels
from hybridpar.codegen.tir_writer import LANES
from hybridpar.compress.codecs.onebit import Signs
from hybridpar.compress.memory import Product
from hybridpar.sync.pieces import Sgd

#: From so many values on, what is written is not read again before it would have left the caches.
_STREAM = 1 << 16


@functools.cache
def functions() -> dict[str, Function]:
    """The kernels of this CPU by name, built if need be; none where they cannot be had."""
    return load_kernels("step", [Path(__file__).with_name("step_source.py")]) or {}


def hand_over(source: Tensor, target: Tensor, squares: Tensor) -> None:
    """Copy values, and add up their squares."""
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
    """Take a step of SGD on a multiple of the sum of some workers' gradients, as far as vectors are filled."""
    kernel = _kernel("sgd", whole, momentum, options)
    if kernel is None:
        return None
    count = whole.numel() // LANES * LANES
    places = (whole.data_ptr(), _address(momentum), first.data_ptr(), squares.data_ptr())
    kernel(*places, count, workers, bytes_apart // first.element_size(), *_rates(options, factor))
    return count


def step_sgd_of_signs(
    whole: Tensor, momentum: Tensor | None, signs: Sequence[Signs], factor: float, options: Sgd, squares: Tensor
) -> bool:
    """Take a step of SGD on a multiple of a sum of signs and levels."""
    workers = len(signs[0].messages) if signs else 0
    if workers not in (1, 2) or any(one.length % LANES for one in signs):
        return False
    kernel = _kernel(f"signs{workers}", whole, momentum, options)
    if kernel is None:
        return False
    squares.zero_()
    own = torch.zeros((), dtype=torch.float64)
    for one in signs:
        start = one.first * one.length
        first, second = one.messages[0], one.messages[-1]
        places = whole[start:].data_ptr(), _address(None if momentum is None else momentum[start:])
        numbers = (first.data_ptr(), second.data_ptr(), own.data_ptr(), one.groups, one.length)
        kernel(*places, *numbers, *_rates(options, factor))
        squares += own
    return True


def step_sgd_of_product(
    whole: Tensor,
    momentum: Tensor | None,
    product: Product,
    scale: float,
    factor: float,
    options: Sgd,
    squares: Tensor,
) -> bool:
    """Take a step of SGD on a multiple of a matrix that is given by its factors."""
    left, right = product.left, product.right
    kernel = _kernel(f"product{left.shape[0]}", whole, momentum, options)
    if kernel is None or right.shape[1] % LANES:
        return False
    places = whole.data_ptr(), _address(momentum), left.data_ptr(), right.data_ptr(), squares.data_ptr()
    kernel(*places, left.shape[1], right.shape[1], scale, *_rates(options, factor))
    return True


def _kernel(name: str, whole: Tensor, momentum: Tensor | None, options: Sgd) -> Function | None:
    kind = "nesterov" if options.nesterov else "plain" if momentum is None else "momentum"
    if whole.dtype != torch.float32:
        return None
    return functions().get(f"{name}_{kind}_decay" if options.weight_decay else f"{name}_{kind}")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rates(options: Sgd, factor: float) -> tuple[float, ...]:
    factor = -factor if options.maximize else factor  # the decay still makes parameters smaller
    return factor, -options.lr, options.weight_decay, options.momentum, 1.0
