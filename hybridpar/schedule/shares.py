"""How the samples of a step are best divided among workers of unequal speed.

A worker that computes n samples takes a + n / v: a fixed time, such as that of its optimizer step, and its speed. All
wait for the slowest, so the best division is the one that minimises the longest time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class WorkCost(NamedTuple):
    """What a step takes a worker.

    Attributes:
        fixed_ms: Whatever its number of samples is.
        sample_ms: For every sample; greater than 0.
    """

    fixed_ms: float
    sample_ms: float

    def time(self, samples: float) -> float:
        """Milliseconds of a step with so many samples.

        Args:
            samples: Its samples.
        """
        return self.fixed_ms + samples * self.sample_ms


def best_division(costs: Sequence[WorkCost], samples: float) -> list[float]:
    """The division of samples that minimises the longest time, max over workers of a_k + n_k / v_k.

    All workers that get samples take the same time T, with sum of (T - a_k) v_k = samples; a worker whose fixed time is
    T or more gets none.

    Args:
        costs: Of each worker.
        samples: Of a step.

    Returns:
        Samples of each worker, not rounded.
    """
    speed = fixed_samples = 0.0
    longest = float("inf")
    for cost in sorted(costs):
        if cost.fixed_ms >= longest:
            break
        speed += 1 / cost.sample_ms
        fixed_samples += cost.fixed_ms / cost.sample_ms
        longest = (samples + fixed_samples) / speed
    return [max(0.0, longest - cost.fixed_ms) / cost.sample_ms for cost in costs]


def longest_time(costs: Sequence[WorkCost], counts: Sequence[float]) -> float:
    """Milliseconds that a division takes, computation alone.

    Args:
        costs: Of each worker.
        counts: Samples of each worker.
    """
    return max(cost.time(count) for cost, count in zip(costs, counts, strict=True))
