"""`ModelProfile`: what a search knows of a model, as plain data, so that it can be repeated without the model.

It holds the graph of a model's units with sizes, the shapes of its parameters, and the times of all units at one
micro-batch size or several, in the way to compute the model that was chosen before.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hybridpar.errors import UsageError
from hybridpar.partition.graph import UnitGraph
from hybridpar.plan import ModelInfo

#: More noise than this is not used to call plans equal.
MOST_NOISE = 0.03


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
