"""Why: what tuned kernels save is measured where they run, not taken over from the day on which they were tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hybridpar.tvm_kernels.choice import AnyKernel, Choices
from hybridpar.tvm_kernels.cuda_device import is_gpu
from hybridpar.tvm_kernels.cuda_measure import DTYPES, time_cuda_pairs
from hybridpar.tvm_kernels.database import KernelKey
from hybridpar.tvm_kernels.measure import time_pairs
from hybridpar.tvm_kernels.op import stock_forward, stock_input_gradient, stock_weight_gradient
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout


def measure_saving(choices: Choices, keys: Mapping[KernelKey, int], pairs: int = 5) -> float:
    """Milliseconds that tuned kernels take less than torch, added over some convolutions.

    Both are timed in pairs, on the same random operands and in the layout that the model uses; both allocate their
    results. The difference of the medians counts.

    Args:
        choices: What decides; convolutions that it leaves to torch save nothing.
        keys: Convolutions, and how often each one runs.
        pairs: Pairs of calls of each, after one that does not count.
    """
    saved, threads = 0.0, torch.get_num_threads()
    try:
        with torch.no_grad():
            for key, count in keys.items():
                kernel = choices.decide(key).kernel
                if kernel is not None:
                    torch.set_num_threads(key.threads)
                    saved += count * _saved(key, kernel, pairs)
    finally:
        torch.set_num_threads(threads)
    return saved


def _saved(key: KernelKey, kernel: AnyKernel, pairs: int) -> float:
    tuned, stock = _sides(key, kernel)
    tuned(), stock()
    if is_gpu(key.device):
        timing = time_cuda_pairs(tuned, stock, 0.0, pairs, torch.device("cuda", torch.cuda.current_device()))
    else:
        timing = time_pairs(tuned, stock, 0.0, pairs, key.threads)
    return timing.stock_ms - timing.ms


def _sides(key: KernelKey, kernel: AnyKernel) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same computation by a kernel and by torch."""
    shape = key.shape
    form = torch.channels_last if key.layout is Layout.CHANNELS_LAST else torch.contiguous_format
    image = (shape.batch, shape.channels, shape.height, shape.width)
    out = (shape.batch, shape.channels, shape.out_height, shape.out_width)
    filters = (shape.channels, 1, *shape.kernel)
    # Operands of the three directions, and the sizes of what they give.
    operands: tuple[tuple[int, ...], tuple[int, ...]]
    operands, result = {
        Direction.FORWARD: ((image, filters), out),
        Direction.INPUT_GRADIENT: ((out, filters), image),
        Direction.WEIGHT_GRADIENT: ((image, out), filters),
    }[key.direction]
    where = torch.device("cuda", torch.cuda.current_device()) if is_gpu(key.device) else torch.device("cpu")
    dtype = DTYPES[key.dtype]
    first, second = (
        _random(sizes, form if sizes != filters else torch.contiguous_format).to(where, dtype) for sizes in operands
    )

    def tuned() -> Tensor:
        kind = form if result != filters else torch.contiguous_format
        made = torch.empty(result, dtype=dtype, device=where, memory_format=kind)
        kernel(first, second, None, made)
        return made

    return tuned, lambda: _stock(key.direction, shape, first, second)


def _random(sizes: tuple[int, ...], form: torch.memory_format) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sizes, generator=generator).contiguous(memory_format=form)


def _stock(direction: Direction, shape: ConvShape, first: Tensor, second: Tensor) -> Tensor:
    numbers = (shape.stride, shape.padding, shape.dilation)
    if direction is Direction.FORWARD:
        return stock_forward(first, second, None, *numbers)
    if direction is Direction.INPUT_GRADIENT:
        return stock_input_gradient(first, second, (shape.height, shape.width), *numbers)
    return stock_weight_gradient(first, second, shape.kernel, *numbers)
