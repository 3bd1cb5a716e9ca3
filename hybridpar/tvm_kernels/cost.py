"""Why: compiling and timing a candidate takes a second, so most are ruled out by counting what they would do.

The model counts, per register tile, multiply-adds, loads and stores against the ports that do them, the latency of sums
that wait for themselves, and the loads that a lack of registers adds. To that comes how often lines travel from L2
into L1, by which rows of which channels fit there, and the traffic with memory; for contiguous images what copying and
turning them takes. It is about which candidate is better than which, not about milliseconds: `rank` of measured against
predicted is what it is judged by.

What is counted is in `cost_channels` and `cost_planes`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridpar.tvm_kernels.cost_channels import Cost, gather_cost, weight_cost
from hybridpar.tvm_kernels.cost_planes import planes_cost
from hybridpar.tvm_kernels.machine import Machine
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout


def estimate(
    shape: ConvShape,
    direction: Direction,
    parameters: Mapping[str, int],
    threads: int,
    machine: Machine,
    layout: Layout = Layout.CHANNELS_LAST,
) -> Cost:
    """What a candidate costs.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: Of the candidate.
        threads: That share the work.
        machine: The CPU.
        layout: Of the images.
    """
    if layout is Layout.CONTIGUOUS:
        return planes_cost(shape, direction, parameters, threads, machine)
    if direction is Direction.WEIGHT_GRADIENT:
        return weight_cost(shape, parameters, threads, machine)
    return gather_cost(shape, direction, parameters, threads, machine)


@dataclass(frozen=True)
class Ranking:
    """How well predictions order candidates.

    Attributes:
        candidates: How many were compared.
        correlation: Spearman's, 1 where the order is right; None for fewer than three.
        regret: By k: how much slower the best of the k best predicted is than the best of all.
    """

    candidates: int
    correlation: float | None
    regret: dict[int, float]


def rank(predicted: Sequence[float], measured: Sequence[float], top: Sequence[int] = (1, 4, 16)) -> Ranking:
    """Compare predictions with times; only their order matters.

    Args:
        predicted: Of each candidate.
        measured: Of each candidate.
        top: For which k the regret is told.
    """
    order = sorted(range(len(predicted)), key=lambda index: predicted[index])
    best = min(measured, default=0.0)
    regret = {k: min(measured[index] for index in order[:k]) / best - 1 for k in top if order}
    correlation = None
    if len(set(predicted)) > 1 and len(set(measured)) > 1 and len(predicted) > 2:
        correlation = statistics.correlation(_places(predicted), _places(measured))
    return Ranking(len(predicted), correlation, regret)


def _places(values: Sequence[float]) -> list[float]:
    """Place of each value in ascending order; equal ones share the middle of theirs."""
    order = sorted(values)
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]
