"""Why: what tuned kernels save is measured where they run, not taken over from the day on which they were tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hybridpar.tvm_kernels.choice import Choices
from hybridpar.tvm_kernels.cuda_device import is_gpu
from hybridpar.tvm_kernels.cuda_measure import CudaBench, time_cuda_pairs
from hybridpar.tvm_kernels.database import KernelKey
from hybridpar.tvm_kernels.kernel import AnyKernel
from hybridpar.tvm_kernels.measure import Bench, time_pairs, torch_threads


def measure_saving(choices: Choices, keys: Mapping[KernelKey, int], pairs: int = 5) -> float:
    """Milliseconds that tuned kernels take less than torch, added over some convolutions.

    Both are timed in pairs, on the same random operands and in the layout that the model uses; both allocate their
    results. The difference of the medians counts.

    Args:
        choices: What decides; convolutions that it leaves to torch save nothing.
        keys: Convolutions, and how often each one runs.
        pairs: Pairs of calls of each, after one that does not count.
    """
    saved = 0.0
    with torch.no_grad():
        for key, count in keys.items():
            kernel = choices.decide(key).kernel
            if kernel is not None:
                with torch_threads(key.threads):
                    saved += count * _saved(key, kernel, pairs)
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
    """The same computation by a kernel and by torch, in the layout of the convolution."""
    what = (key.shape, key.direction, key.layout)
    if is_gpu(key.device):
        cuda = CudaBench(*what, key.dtype, torch.device("cuda", torch.cuda.current_device()))
        (first, second, like), stock = cuda.operands, cuda.ways[f"torch {key.layout}"]
    else:
        bench = Bench(*what, key.threads)
        (first, second, like), stock = bench.operands, bench.stock_in(key.layout)

    def tuned() -> Tensor:
        out = torch.empty_like(like)
        kernel(first, second, None, out)
        return out

    return tuned, stock
