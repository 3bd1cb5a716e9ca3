"""`ModelProfile`: what a search knows of a model, as plain data, so that it can be repeated without the model.

It holds the graph of a model's units with sizes, the shapes of its parameters, and the times of all units at one
micro-batch size or several, in the way to compute the model that was chosen before. `profile_model` makes it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from hybridpar.errors import UsageError
from hybridpar.models import model_fingerprint, parameter_count
from hybridpar.models.deferred import is_deferred
from hybridpar.partition.graph import UnitGraph
from hybridpar.partition.graph_facts import state_of
from hybridpar.partition.profile import Progress, device_roofline, estimate_units
from hybridpar.partition.profile_cache import device_name, measured_profile, memory_format_name
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import ModelUnits, find_units
from hybridpar.plan import ModelInfo
from hybridpar.tvm_kernels.swap import optimize, restore

#: More noise than this is not used to call plans equal.
MOST_NOISE = 0.03

#: Layers that normalise over the micro-batch.
BATCH_NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class Parameter:
    """A trained parameter.

    Attributes:
        name: Its name in the model.
        shape: Its shape.
        unit: Index of the first unit that uses it.
    """

    name: str
    shape: tuple[int, ...]
    unit: int

    @cached_property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class SizedTimes:
    """Times of all units at one micro-batch size, in milliseconds.

    Attributes:
        samples: Of the micro-batch.
        forward_ms: Of every unit.
        backward_ms: Of every unit.
    """

    samples: int
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]


@dataclass(frozen=True)
class ModelProfile:
    """What the planner knows of a model.

    Attributes:
        info: Which model.
        graph: Its units, with sizes at `samples` and without times.
        samples: Samples of the micro-batch that sizes are for.
        parameters: Trained parameters, in the model's order.
        sizes: Times at each micro-batch size that was measured, ascending.
        noise: Relative noise of these times.
        batch_norm: Whether layers normalise over the micro-batch, so that its size is part of the result.
        counts: Whether forward passes change Python attributes or draw its random numbers, so that they run once only.
        device: What times were taken on.
        threads: With how many intra-op threads.
        source: `measured` or `analytic`.
        memory_format: `contiguous` or `channels_last`, of images and activations.
        update_ms: What a step takes after the last backward pass, on one worker with the whole model: agreeing,
            statistics of BatchNorm, the optimizer; None where it was not measured.
        versions: Of what it was measured with.
    """

    info: ModelInfo
    graph: UnitGraph
    samples: int
    parameters: tuple[Parameter, ...]
    sizes: tuple[SizedTimes, ...]
    noise: float = 0.0
    batch_norm: bool = False
    counts: bool = False
    device: str = ""
    threads: int | None = None
    source: str = "measured"
    memory_format: str = "contiguous"
    update_ms: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        units = len(self.graph)
        sizes = [size.samples for size in self.sizes]
        rows = [row for size in self.sizes for row in (size.forward_ms, size.backward_ms)]
        counts = {len(row) for row in rows}
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1 or counts != {units}:
            raise UsageError(
                f"a profile with times of {sorted(counts)} units at {sizes} samples, for a model of {units} units",
                "It has a time per unit, at sizes that ascend.",
                "Measure the model again.",
            )
        if any(not 0 <= time < math.inf for row in rows for time in row):
            raise UsageError("a profile with a time below 0 or without end", fix="Measure the model again.")
        if any(not 0 <= parameter.unit < units for parameter in self.parameters):
            raise UsageError("a profile with parameters of no unit", fix="Measure the model again.")

    @property
    def resolution(self) -> float:
        """Relative difference below which two plans count as equal: the noise, within reason.

        A measurement that others disturbed says little about how well plans can be told from each other: they share
        its errors. Beyond `MOST_NOISE` it is doubted aloud (see `explain.notes`), but not taken literally.
        """
        return min(self.noise, MOST_NOISE)

    @property
    def model_bytes(self) -> int:
        """Of all parameters, trained or not, in float32."""
        return 4 * self.info.parameters

    @property
    def step_ms(self) -> float:
        """Forward and backward pass of the whole model at the largest size."""
        return sum(self.sizes[-1].forward_ms) + sum(self.sizes[-1].backward_ms)

    def scaled(self, factor: float) -> ModelProfile:
        """The same, whose units all take so many times as long."""
        sizes = []
        for size in self.sizes:
            times = (tuple(factor * time for time in row) for row in (size.forward_ms, size.backward_ms))
            sizes.append(SizedTimes(size.samples, *times))
        return replace(self, sizes=tuple(sizes))

    def unit_ms(self, samples: float) -> tuple[list[float], list[float]]:
        """Forward and backward time of every unit at a micro-batch size.

        Between sizes that were measured, and beyond them, on the line through the two nearest ones. Where a larger
        micro-batch took less time than a smaller one, that was noise, and both count with their mean. One size alone
        gives times in proportion to the samples, and so does a line where it would reach zero.
        """
        sizes = [size.samples for size in self.sizes]
        forward = zip(*(size.forward_ms for size in self.sizes), strict=True)
        backward = zip(*(size.backward_ms for size in self.sizes), strict=True)
        return [_time_at(samples, sizes, row) for row in forward], [_time_at(samples, sizes, row) for row in backward]

    def timed(self, samples: float) -> UnitGraph:
        """The graph with the times and sizes at a micro-batch size."""
        factor = samples / self.samples
        graph = self.graph.with_times(list(zip(*self.unit_ms(samples), strict=True)))
        return replace(
            graph,
            values=tuple(
                replace(value, bytes=round(value.bytes * factor), gradient_bytes=round(value.gradient_bytes * factor))
                for value in graph.values
            ),
            saved=tuple(replace(saved, bytes=round(saved.bytes * factor)) for saved in graph.saved),
        )


def profile_model(
    model: nn.Module,
    examples: Sequence[torch.Tensor],
    *,
    name: str | None = None,
    measure: bool = True,
    passes: int = 2,
    progress: Progress | None = None,
) -> ModelProfile:
    """Find out what the planner needs to know of a model.

    Args:
        model: The model, in the memory format and with the kernels that it is trained in; see `set_way`.
        examples: Inputs of micro-batches, each of a size to profile, likewise.
        name: What to call the model; default: its class.
        measure: Run units; else, and of a model without memory, their times are estimated.
        passes: Over each unit.
        progress: Called as units are measured.

    Returns:
        Units, parameters and times of the model, without its weights.
    """
    measure = measure and not is_deferred(model)
    ascending = sorted(examples, key=len)
    first = ascending[0]
    traced = trace_model(model, (first,))
    units = find_units(traced, (first,))
    sizes, noise = [], 0.0
    for example in ascending:
        of_size = units if example is first else find_units(traced, (example,))
        if measure:
            times = measured_profile(of_size, (example,), passes=passes, threads=None, cache=None, progress=progress)
        else:
            times = estimate_units(of_size.graph, device_roofline(example.device, None))
        sizes.append(SizedTimes(len(example), times.forward_ms, times.backward_ms))
        noise = max(noise, times.noise)
    return ModelProfile(
        info=ModelInfo(
            name=name or type(model).__name__,
            fingerprint=model_fingerprint(model),
            parameters=parameter_count(model),
            input=tuple(first.shape[1:]),
        ),
        graph=units.graph,
        samples=len(first),
        parameters=parameters_of(units),
        sizes=tuple(sizes),
        noise=noise,
        batch_norm=any(isinstance(module, BATCH_NORMS) for module in model.modules()),
        counts=bool(traced.changes.unrepeatable or traced.changes.draws),
        device=device_name(first.device),
        threads=torch.get_num_threads(),
        memory_format=memory_format_name(first),
        source="measured" if measure else "analytic",
        versions={"torch": str(torch.__version__)},
    )


def set_way(model: nn.Module, example: torch.Tensor, form: str, kernel: str = "stock") -> torch.Tensor:
    """Let a model compute in one of its ways."""
    layout = torch.channels_last if form == "channels_last" else torch.contiguous_format
    restore(model).to(memory_format=layout)
    if kernel == "tuned":
        optimize(model)
    return example.contiguous(memory_format=layout if example.dim() == 4 else torch.contiguous_format)


def parameters_of(units: ModelUnits) -> tuple[Parameter, ...]:
    """The trained parameters of a model, each with the first unit that uses it."""
    first_user: dict[int, int] = {}
    for index, nodes in enumerate(units.nodes):
        for node in nodes:
            for state in state_of(units.traced, node):
                first_user.setdefault(id(state), index)
    # A parameter that no unit uses has no gradient to exchange.
    return tuple(
        Parameter(name, tuple(parameter.shape), first_user[id(parameter)])
        for name, parameter in units.model.named_parameters()
        if parameter.requires_grad and id(parameter) in first_user
    )


def _time_at(samples: float, sizes: Sequence[int], times: Sequence[float]) -> float:
    """Time of a unit at a micro-batch size, of those at the sizes that were measured."""
    if len(sizes) == 1:
        return times[0] * samples / sizes[0]
    index = min(max(bisect_right(sizes, samples) - 1, 0), len(sizes) - 2)
    part = (samples - sizes[index]) / (sizes[index + 1] - sizes[index])
    before, after = _rising(times)[index : index + 2]
    line = before + part * (after - before)
    return line if line > 0 else before * samples / sizes[index]


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest numbers that never fall: neighbours that fall get their mean (isotonic regression)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            (later, count), (earlier, more) = pools.pop(), pools.pop()
            pools.append((earlier + later, more + count))
    return [total / count for total, count in pools for _ in range(count)]
