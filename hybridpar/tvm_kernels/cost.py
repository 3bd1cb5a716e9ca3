"""Predicts what a candidate for the CPU costs, since compiling and timing one takes a second.

The model counts, per register tile, multiply-adds, loads and stores against the ports that do them, the latency of sums
that wait for themselves, and the loads that a lack of registers adds. To that it adds how often lines move from L2
into L1, by which rows of which channels fit there, and the traffic with memory; for contiguous images what copying and
turning them takes. It is about which candidate is better than which, not about milliseconds;
`benchmarks.kernels.ranking` compares its order with what was measured.

What is counted is in `cost_channels` and `cost_planes`.
"""

from __future__ import annotations

from collections.abc import Mapping

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
