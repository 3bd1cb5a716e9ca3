"""`ModelProfile`: what a search knows of a model, as plain data, so that it can be repeated without the model.

It holds the graph of a model's units with sizes, the shapes of its parameters, and for each way of computing it
(memory format, kernels) the times of all units at one micro-batch size or several.
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
class Variant:
    """One way to compute the model.

    Attributes:
        memory_format: `contiguous` or `channels_last`.
        kernels: `stock`, or `tuned` where tuned kernels take torch's place.
        sizes: Times at each micro-batch size that was measured, ascending.
        noise: Relative noise of these times.
        update_ms: As of the profile, where it was measured for this way.
    """

    memory_format: str
    kernels: str
    sizes: tuple[SizedTimes, ...]
    noise: float = 0.0
    update_ms: float | None = None

    @property
    def name(self) -> str:
        """Both, where they are not torch's defaults."""
        parts = [self.memory_format] if self.memory_format != "contiguous" else []
        return ", ".join(parts + (["tuned kernels"] if self.kernels != "stock" else []))

    def scaled(self, factor: float) -> Variant:
        """The same, whose units all take so many times as long."""
        sizes = [
            SizedTimes(
                one.samples, tuple(factor * ms for ms in one.forward_ms), tuple(factor * ms for ms in one.backward_ms)
            )
            for one in self.sizes
        ]
        return replace(self, sizes=tuple(sizes))

    @property
    def step_ms(self) -> float:
        """Forward and backward pass of the whole model at the largest size."""
        return sum(self.sizes[-1].forward_ms) + sum(self.sizes[-1].backward_ms)

    def unit_ms(self, samples: float) -> tuple[list[float], list[float]]:
        """Forward and backward time of every unit at a micro-batch size.

        Between sizes that were measured, and beyond them, on the line through the two nearest ones. Where a larger
        micro-batch took less time than a smaller one, that was noise, and both count with their mean. One size alone
        gives times in proportion to the samples, and so does a line where it would reach zero.
        """
        return self._at(samples, "forward_ms"), self._at(samples, "backward_ms")

    def _at(self, samples: float, name: str) -> list[float]:
        if len(self.sizes) == 1:
            only = self.sizes[0]
            return [time * samples / only.samples for time in getattr(only, name)]
        known = [one.samples for one in self.sizes]
        place = min(max(bisect_right(known, samples) - 1, 0), len(known) - 2)
        low, high = self.sizes[place], self.sizes[place + 1]
        part = (samples - low.samples) / (high.samples - low.samples)
        times = []
        for row in zip(*(getattr(one, name) for one in self.sizes), strict=True):
            rising = _rising(row)
            before, after = rising[place : place + 2]
            line = before + part * (after - before)
            times.append(line if line > 0 else before * samples / low.samples)
        return times


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest numbers that never fall: neighbours that fall get their mean (isotonic regression)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            (later, count), (earlier, more) = pools.pop(), pools.pop()
            pools.append((earlier + later, more + count))
    return [total / count for total, count in pools for _ in range(count)]


@dataclass(frozen=True)
class ModelProfile:
    """What the planner knows of a model.

    Attributes:
        info: Which model.
        graph: Its units, with sizes at `samples` and without times.
        samples: Samples of the micro-batch that sizes are for.
        parameters: Trained parameters, in the model's order.
        variants: Ways to compute it; the first is torch's default.
        batch_norm: Whether layers normalise over the micro-batch, so that its size is part of the result.
        counts: Whether forward passes change Python attributes or draw its random numbers, so that they run once only.
        device: What times were taken on.
        threads: With how many intra-op threads.
        source: `measured` or `analytic`.
        co_run: For numbers of lanes on one device that were measured: how much slower each runs while all are busy.
        crowd: For numbers of workers on one host that compute at a time: how much slower each is than one alone.
        together: How much slower several workers compute in a step than the parts of it say, see `planner.rehearse`.
        together_coded: The same where gradients are compressed; None for `together`.
        update_ms: What a step takes after the last backward pass, on one worker with the whole model: agreeing,
            statistics of BatchNorm, the optimizer; None where it was not measured.
        collect_ms: Copying all gradients into buckets.
        accumulate_ms: By how much backward passes that add gradients to those of the micro-batch before, as all that
            were timed do, take longer than those that make the first ones; it can be less than nothing.
        compiled: Step of the model through torch.compile over the step that its units add up to, where that is what the
            times are of: those of all units were multiplied with it. None where the model is not compiled.
        versions: Of what it was measured with.
    """

    info: ModelInfo
    graph: UnitGraph
    samples: int
    parameters: tuple[Parameter, ...]
    variants: tuple[Variant, ...]
    batch_norm: bool = False
    counts: bool = False
    device: str = ""
    threads: int | None = None
    source: str = "measured"
    co_run: Mapping[int, float] = field(default_factory=dict)
    crowd: Mapping[int, float] = field(default_factory=dict)
    together: float = 1.0
    together_coded: float | None = None
    update_ms: float | None = None
    collect_ms: float = 0.0
    accumulate_ms: float = 0.0
    compiled: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        units = len(self.graph)
        for variant in self.variants:
            known = [one.samples for one in variant.sizes]
            counts = {len(times) for one in variant.sizes for times in (one.forward_ms, one.backward_ms)}
            if not known or known != sorted(set(known)) or known[0] < 1 or counts != {units}:
                raise UsageError(
                    f"a profile with times of {sorted(counts)} units at {known} samples, for a model of {units} units",
                    "It has a time per unit, at sizes that ascend.",
                    "Measure the model again.",
                )
            if any(not 0 <= time < math.inf for one in variant.sizes for time in (*one.forward_ms, *one.backward_ms)):
                raise UsageError("a profile with a time below 0 or without end", fix="Measure the model again.")
        if not self.variants or any(not 0 <= one.unit < units for one in self.parameters):
            raise UsageError("a profile without times, or with parameters of no unit", fix="Measure the model again.")

    @property
    def noise(self) -> float:
        """Of all its times: the most, as measured."""
        return max(variant.noise for variant in self.variants)

    @property
    def resolution(self) -> float:
        """Relative difference below which two plans count as equal: the noise, within reason.

        A measurement that others disturbed says little about how well plans can be told from each other: they share
        its errors. Beyond `MOST_NOISE` it is doubted aloud (see `explain.notes`), but not taken literally.
        """
        return min(self.noise, MOST_NOISE)

    def crowding(self, workers: int) -> float:
        """How much slower a worker computes while so many on its host do: of the nearest number that was measured."""
        if workers == 1 or not self.crowd:
            return 1.0
        return max(1.0, self.crowd[min(self.crowd, key=lambda known: (abs(known - workers), known))])

    def slowing(self, coded: bool | None) -> float:
        """How much slower several workers compute in a step than alone."""
        ways = (self.together, self.together if self.together_coded is None else self.together_coded)
        return min(ways) if coded is None else ways[coded]

    @cached_property
    def parameter_bytes(self) -> int:
        """Of all parameters that are trained, in float32."""
        return 4 * sum(one.count for one in self.parameters)

    @property
    def model_bytes(self) -> int:
        """Of all parameters, trained or not, in float32."""
        return 4 * self.info.parameters

    def timed(self, variant: int, samples: float) -> UnitGraph:
        """The graph with the times and sizes of a variant at a micro-batch size."""
        factor = samples / self.samples
        forward, backward = self.variants[variant].unit_ms(samples)
        graph = self.graph.with_times(list(zip(forward, backward, strict=True)))
        return replace(
            graph,
            values=tuple(
                replace(one, bytes=round(one.bytes * factor), gradient_bytes=round(one.gradient_bytes * factor))
                for one in graph.values
            ),
            saved=tuple(replace(one, bytes=round(one.bytes * factor)) for one in graph.saved),
        )
