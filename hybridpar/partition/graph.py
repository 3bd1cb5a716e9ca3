"""The graph that is partitioned: costs and dependencies, without the model.

A `UnitGraph` is all that the balancing algorithms see: units in topological order, the tensors that flow between
them, and the storages that wait for the backward pass. It holds plain numbers, so it can be made by a profile, by the
analytic model, by a test, or read from a cache, and everything above it runs without a model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Unit:
    """An indivisible run of graph nodes. Times are milliseconds, sizes bytes, both per micro-batch.

    Attributes:
        name: Name of its first node.
        module: Path of the module it comes from.
        operation: What it computes, for people.
        forward_ms: Time of the forward pass.
        backward_ms: Time of the backward pass.
        output_bytes: Size of the tensors that others use.
        parameter_bytes: Size of its parameters.
        flops: FLOPs of the forward pass; a multiplication and an addition count as two.
    """

    name: str
    module: str = ""
    operation: str = ""
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    output_bytes: int = 0
    parameter_bytes: int = 0
    flops: int = 0

    @property
    def ms(self) -> float:
        """Forward and backward together."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class Value:
    """A tensor, or a container of tensors, that flows from one unit to others.

    Attributes:
        name: Name of the node that returns it.
        producer: Index of the producing unit; -1 for an input of the model.
        consumers: Indices of the units that use it, ascending.
        bytes: What crosses a cut in the forward pass.
        gradient_bytes: What comes back in the backward pass; 0 where no gradient is needed.
        is_output: The model returns it, so it goes to the last stage, which hands the output over.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    bytes: int
    gradient_bytes: int = 0
    is_output: bool = False


@dataclass(frozen=True)
class Saved:
    """A storage that waits for the backward pass, and the units that wait for it, ascending.

    Attributes:
        bytes: Its size.
        units: Indices of the units, ascending.
    """

    bytes: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class UnitGraph:
    """Units in a topological order, with what flows between them.

    Attributes:
        units: The units; position is index.
        values: Tensors between units.
        saved: Storages kept for backward.
        order_edges: Pairs of units that must keep their order although nothing flows between them (random numbers).
    """

    units: tuple[Unit, ...]
    values: tuple[Value, ...] = ()
    saved: tuple[Saved, ...] = ()
    order_edges: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.units)

    def edges(self) -> list[tuple[int, int]]:
        """Dependencies between units, sorted, each once."""
        pairs = {
            (value.producer, consumer) for value in self.values for consumer in value.consumers if value.producer >= 0
        }
        return sorted(pairs.union(self.order_edges))

    def with_times(self, times: Sequence[tuple[float, float]]) -> UnitGraph:
        """The same graph with new forward and backward times, one pair per unit, in milliseconds.

        Args:
            times: For every unit its forward and backward time.
        """
        units = (
            replace(unit, forward_ms=forward, backward_ms=backward)
            for unit, (forward, backward) in zip(self.units, times, strict=True)
        )
        return replace(self, units=tuple(units))

    def crossing(self, stage_of: Sequence[int]) -> dict[tuple[int, int], tuple[int, int]]:
        """What is sent between the stages of a cut: every value once to each later stage that uses it.

        Args:
            stage_of: Stage of every unit.

        Returns:
            For pairs of stages, in ascending order, bytes forward and back. Inputs of the model that a later stage uses
            come from stage 0, which has them.
        """
        last, sent = max(stage_of), defaultdict[tuple[int, int], list[int]](lambda: [0, 0])
        for value in self.values:
            home = stage_of[value.producer] if value.producer >= 0 else 0
            users = {stage_of[consumer] for consumer in value.consumers} | ({last} if value.is_output else set())
            for user in users - {home}:
                sent[home, user][0] += value.bytes
                sent[home, user][1] += value.gradient_bytes
        return {pair: (ahead, back) for pair, (ahead, back) in sorted(sent.items())}
