"""Why: what tuned kernels save is measured where they run, not taken over from the day on which they were tuned."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridpar.tvm_kernels.choice import Choices, TunedKernel
from hybridpar.tvm_kernels.database import KernelKey
from hybridpar.tvm_kernels.measure import Bench, time_pairs


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


def _saved(key: KernelKey, kernel: TunedKernel, pairs: int) -> float:
    bench = Bench(key.shape, key.direction, key.layout, key.threads)
    bench.run(kernel), bench.stock_in(key.layout)()
    timing = time_pairs(lambda: bench.run(kernel), bench.stock_in(key.layout), 0.0, pairs, key.threads)
    return timing.stock_ms - timing.ms
