"""The partitions of a model that a search tries, for each number of stages, and what their stages cost.

For every number of stages one cut is tried: stages are balanced together with what they send over the cluster's link.
Where that does not fit into memory, the cut that needs the least is tried too.

Where the devices of a pipeline differ, stages are balanced by the speed of the device that each will run on, and memory
counts in proportion to what each device has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from hybridpar.partition.balance import (
    IntervalCosts,
    balance_graph,
    least_maximum,
    stages_of,
)
from hybridpar.partition.planning import edges_of, saved_bytes
from hybridpar.planner.profile import ModelProfile, Parameter
from hybridpar.schedule.layout import Edge


@dataclass(frozen=True)
class StageDevice:
    """What a cut must know of the device that a stage will run on.

    Attributes:
        speed: As many times as fast as the slowest device of the pipeline.
        memory: As many times the memory of the smallest one that the stage may use; infinite without a limit.
    """

    speed: float = 1.0
    memory: float = 1.0


@dataclass(frozen=True)
class Cut:
    """A partition of the units.

    Attributes:
        name: How it was made.
        stage_of: Stage of every unit.
        link_speed: Bytes per second of the link that it was made for; None for one that costs nothing.
        recompute: Stages keep only what enters them, and compute their activations again in the backward pass.
        offload: Stages keep what enters and leaves them, and their activations wait in the host's memory.
    """

    name: str
    stage_of: tuple[int, ...]
    link_speed: float | None = None
    recompute: bool = False
    offload: bool = False

    @property
    def saving(self) -> str:
        """How its activations take less memory, in words; empty where they wait on the device."""
        if self.recompute:
            return "activations computed again"
        return "activations in the host's memory" if self.offload else ""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return max(self.stage_of) + 1


@dataclass(frozen=True)
class StageFigures:
    """What the stages of a cut cost for a micro-batch of some size; a number per stage.

    Attributes:
        forward_ms: Forward pass, on the device of the profile.
        backward_ms: Backward pass.
        saved_bytes: What waits for the backward pass.
        parameters: Trained parameters, in the model's order.
        ready: For every parameter, by name, when its gradient is there, as a fraction of the stage's backward pass.
        edges: What flows between stages.
        largest_bytes: The largest tensor that one of its units reads or writes.
        model_bytes: All its parameters, trained or not.
        again_bytes: What a pass has in memory besides, having computed it again, or that moves to the host's memory and
            back; 0 without `recompute` and `offload`.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    saved_bytes: tuple[int, ...]
    parameters: tuple[tuple[Parameter, ...], ...]
    ready: dict[str, float]
    edges: tuple[Edge, ...]
    largest_bytes: tuple[int, ...]
    model_bytes: tuple[int, ...]
    again_bytes: tuple[int, ...]

    @cached_property
    def parameter_bytes(self) -> tuple[int, ...]:
        """Of every stage's parameters, in float32."""
        return tuple(4 * sum(parameter.count for parameter in parameters) for parameters in self.parameters)


class CutLibrary:
    """The cuts of a model and their figures, each made once, however many searches ask for them."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.balanced = cache(lambda stages, devices=(), speed=None: balanced_cut(profile, stages, devices, speed))
        self.smallest = cache(lambda stages, devices=(): smallest_cut(profile, stages, devices))
        self.figures = cache(lambda cut, samples: figures_of(profile, cut, samples))


def balanced_cut(
    profile: ModelProfile, stages: int, devices: Sequence[StageDevice] = (), speed: float | None = None
) -> Cut | None:
    """The cut whose slowest stage is fastest, with what it sends over a link of some speed; None where there is none.

    It balances stages, whatever lanes these are put on: a lane with several short stages of equal length is as
    balanced as one with a long one, and balancing lanes over many stages takes seconds where this takes milliseconds.
    """
    count = len(profile.graph)
    if stages == 1:
        return Cut("whole", (0,) * count)
    if stages > count:
        return None
    speeds = [device.speed for device in devices]
    graph = profile.timed(profile.samples)
    stage_of = balance_graph(graph, stages, speeds=speeds, link_speed=speed, noise=profile.resolution)
    return Cut("balanced by speed" if len(set(speeds)) > 1 else "balanced", stage_of, speed)


def smallest_cut(profile: ModelProfile, stages: int, devices: Sequence[StageDevice] = ()) -> Cut | None:
    """The cut that needs the least memory, in proportion to what each device has; None where there is none."""
    if not 1 < stages <= len(profile.graph):
        return None
    costs = IntervalCosts(profile.timed(profile.samples))
    shares = [device.memory for device in devices] or [1.0] * stages
    needs = [
        np.where(costs.empty, np.inf, need / share) for need, share in zip(costs.memory(stages), shares, strict=True)
    ]
    _, ends = least_maximum(needs)
    assert ends is not None, "there are as many units as stages"
    return Cut("least memory", stages_of(ends, len(profile.graph)))


def figures_of(profile: ModelProfile, cut: Cut, samples: float) -> StageFigures:
    """What the stages of a cut cost."""
    graph, stage_of, stages = profile.timed(samples), cut.stage_of, range(cut.stages)
    units = [[unit for unit, home in zip(graph.units, stage_of, strict=True) if home == stage] for stage in stages]
    forward = [sum(unit.forward_ms for unit in members) for members in units]
    first = forward if cut.recompute else [0.0 for _ in stages]  # what a backward pass begins with
    backward = [ahead + sum(unit.backward_ms for unit in members) for ahead, members in zip(first, units, strict=True)]
    done: dict[int, float] = {}
    passed = list(first)
    for unit in reversed(range(len(stage_of))):
        stage = stage_of[unit]
        passed[stage] += graph.units[unit].backward_ms
        done[unit] = min(1.0, passed[stage] / backward[stage]) if backward[stage] > 0 else 1.0
    parameters = [tuple(layer for layer in profile.parameters if stage_of[layer.unit] == stage) for stage in stages]
    largest, entering, leaving = ([0 for _ in stages] for _ in range(3))
    for value in graph.values:
        source = stage_of[value.producer] if value.producer >= 0 else -1
        users = {stage_of[unit] for unit in value.consumers}
        for stage in {source, *users} - {-1}:
            largest[stage] = max(largest[stage], value.bytes)
        for stage in users - {source}:
            entering[stage] += value.bytes
        if source >= 0 and users - {source}:
            leaving[source] += value.bytes
    saved = saved_bytes(graph, stage_of)
    waiting = saved
    if cut.recompute or cut.offload:
        waiting = [size + other * cut.offload for size, other in zip(entering, leaving, strict=True)]
    return StageFigures(
        tuple(forward),
        tuple(backward),
        tuple(waiting),
        tuple(parameters),
        {layer.name: done[layer.unit] for layer in profile.parameters},
        edges_of(graph, stage_of),
        tuple(largest),
        tuple(sum(unit.parameter_bytes for unit in members) for members in units),
        tuple(max(0, size - stays) for size, stays in zip(saved, waiting, strict=True)),
    )
