"""Estimates the times of units from a device's speed, without running the model.

The roofline model (Williams, Waterman and Patterson, 2009): a unit takes as long as its arithmetic at the device's
peak or its memory traffic at the device's bandwidth, whichever is longer, and never less than what it costs to start
it. Caches and how well a kernel fits are left out, so it is good enough to balance stages, not to predict times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridpar.partition.graph import UnitGraph
from hybridpar.partition.profile import UnitTimes


@dataclass(frozen=True)
class Roofline:
    """What a device can do at most.

    Attributes:
        flops_per_second: Peak arithmetic.
        bytes_per_second: Memory bandwidth.
        launch_ms: Least time of any operation.
    """

    flops_per_second: float
    bytes_per_second: float
    launch_ms: float


#: A generic server core with 8-wide fused multiply-add units at 2.5 GHz, at half its peak as convolutions reach it.
_CPU_CORE_FLOPS = 2.5e9 * 2 * 8 * 2 / 2
_CPU_BYTES = 10e9


def device_roofline(device: torch.device, threads: int | None = None) -> Roofline:
    """The roofline of a device: what a CUDA device says of itself, or a generic CPU with so many threads.

    Args:
        device: The device.
        threads: Intra-op threads on a CPU; None for as many as torch uses.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        clock = getattr(properties, "clock_rate", 1_500_000) * 1e3
        memory_clock = getattr(properties, "memory_clock_rate", 5_000_000) * 1e3
        bus_bytes = getattr(properties, "memory_bus_width", 384) / 8
        lanes = properties.multi_processor_count * 128
        return Roofline(lanes * 2 * clock, 2 * memory_clock * bus_bytes, 0.005)
    count = threads or torch.get_num_threads()
    return Roofline(_CPU_CORE_FLOPS * count, _CPU_BYTES, 0.005)


def estimate_units(graph: UnitGraph, roofline: Roofline) -> UnitTimes:
    """Times of all units by the roofline model.

    The forward pass reads inputs and parameters and writes outputs. The backward pass does twice the arithmetic
    (gradients of input and of weight; once where no input needs a gradient), reads what was saved and the incoming
    gradient, and writes the gradients of inputs and parameters.

    Args:
        graph: Units with FLOPs and sizes.
        roofline: Of the device.
    """
    incoming = [0] * len(graph)
    incoming_gradient = [0] * len(graph)
    for value in graph.values:
        for consumer in value.consumers:
            incoming[consumer] += value.bytes
            incoming_gradient[consumer] += value.gradient_bytes
    forward, backward = [], []
    for index, unit in enumerate(graph.units):
        moved = incoming[index] + unit.parameter_bytes + unit.output_bytes
        forward.append(_time(unit.flops, moved, roofline))
        arithmetic = unit.flops * ((1 if incoming_gradient[index] else 0) + (1 if unit.parameter_bytes else 0))
        moved = incoming[index] + incoming_gradient[index] + unit.output_bytes + 2 * unit.parameter_bytes
        backward.append(_time(arithmetic, moved, roofline))
    return UnitTimes(tuple(forward), tuple(backward), sum(forward) + sum(backward), source="analytic")


def _time(flops: int, moved: int, roofline: Roofline) -> float:
    return 1e3 * max(flops / roofline.flops_per_second, moved / roofline.bytes_per_second, roofline.launch_ms / 1e3)
