"""Why: a small budget buys most where most time is spent, so searches are weighed by what torch takes in a step.

Torch is timed in a first quick pass, largest floors first. What there is no time for is predicted: by its floor, and by
how far above their floors those of the same direction were.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from hybridpar.tvm_kernels.database import KernelKey
from hybridpar.tvm_kernels.measure import Bench, torch_threads

#: What one thread of a common CPU does, in multiply-adds and bytes a second: only proportions count here.
_MULTIPLY_ADDS, _BYTES = 40e9, 12e9


def weigh(
    counts: Mapping[KernelKey, int], seconds: float, measure: Callable[[KernelKey], float] | None = None
) -> dict[KernelKey, float]:
    """Milliseconds that torch takes for convolutions in a step, the largest first.

    Args:
        counts: Convolutions, and how often each runs in a step.
        seconds: For timing; what is left then is predicted.
        measure: Milliseconds of one call; default: `stock_ms`.
    """
    measure = measure or stock_ms
    end = time.monotonic() + seconds
    floors = {key: _floor_ms(key) for key in counts}
    measured: dict[KernelKey, float] = {}
    for key in sorted(counts, key=lambda one: -floors[one] * counts[one]):
        if time.monotonic() >= end:
            break
        measured[key] = measure(key)
    ratios = {key: ms / floors[key] for key, ms in measured.items()}

    def predicted(key: KernelKey) -> float:
        alike = [ratio for other, ratio in ratios.items() if other.direction is key.direction]
        return floors[key] * statistics.median(alike or ratios.values() or [1.0])

    stakes = {key: count * (measured[key] if key in measured else predicted(key)) for key, count in counts.items()}
    return dict(sorted(stakes.items(), key=lambda one: -one[1]))


def stock_ms(key: KernelKey) -> float:
    """What one call of torch takes, in the layout that the convolution is in; the shorter of two after a first one."""
    with torch_threads(key.threads):
        call = Bench(key.shape, key.direction, key.layout, key.threads).stock_in(key.layout)
        call()
        taken = []
        for _ in range(2):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
        return 1e3 * min(taken)


def _floor_ms(key: KernelKey) -> float:
    arithmetic, memory = key.shape.multiply_adds / _MULTIPLY_ADDS, key.shape.least_bytes(key.direction) / _BYTES
    return 1e3 * max(arithmetic, memory) / key.threads
