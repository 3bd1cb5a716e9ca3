"""Why: a step is asked for, runs on many lanes at once, and is looked at later; each of these has its record here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.lanes import Event
from hybridpar.pipeline.borders import BorderFacts
from hybridpar.pipeline.recorder import SpanRecorder, StepSpans
from hybridpar.schedule.actions import Action
from hybridpar.sync.control import StepOutcome
from hybridpar.sync.figures import SyncCosts, SyncFigures, add_up
from hybridpar.sync.reducer import Flight


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on this worker.

    Attributes:
        inputs: The model's inputs by name.
        target: What the loss compares the output with.
        samples: How many there are.
    """

    inputs: Mapping[str, Tensor]
    target: Any
    samples: int


@dataclass(frozen=True)
class StepRequest:
    """What a step is to do.

    Attributes:
        micro_batches: This replica's share.
        global_samples: Samples of all replicas.
        rate_factor: What the optimizers' peak learning rates are multiplied with; None where their rates have been set.
        stop: This worker wants training to end after this step.
        save: This worker wants a checkpoint after this step.
        flags: `stop` and `save` as a float64 tensor on the device, in place of what the host says. The step is then to
            be captured: the host is told nothing of it but what `Executor.adopt` starts to copy.
    """

    micro_batches: Sequence[MicroBatch]
    global_samples: int
    rate_factor: float | None = 1.0
    stop: bool = False
    save: bool = False
    flags: Tensor | None = None


@dataclass
class StepState:
    """What is known about a step that was issued; filled in by the host and by the lanes."""

    number: int
    request: StepRequest
    facts: list[BorderFacts]
    flights: dict[int, Flight | None]
    spans: SpanRecorder
    events: dict[Action, Event] = field(default_factory=dict)
    reports: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    losses: dict[int, Tensor | None] = field(default_factory=dict)
    reported: dict[int, Event] = field(default_factory=dict)
    shared: dict[int, Event] = field(default_factory=dict)
    values: Tensor | None = None
    host_values: Tensor | None = None
    decided: Event | None = None
    ends: list[Event] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    bytes_sent: int = 0


class LateOutcome(StepOutcome):
    """The outcome of a step that may still be running. Reading it waits.

    Once the step is over it holds numbers only, so keeping the outcomes of a whole run keeps no batch alive.
    """

    def __init__(self, step: StepState, world: World) -> None:
        self._step: StepState | None = step
        self._world = world
        self._recorder = step.spans
        self._bad = step.bad
        self._values: list[float] | None = None
        self._spans: StepSpans | None = None
        self._bytes_sent = 0
        self._costs: list[SyncCosts] = []

    def wait(self) -> None:
        """Wait until this worker has finished the step.

        Raises:
            SyncError: A worker died or did not answer in time.
        """
        if self._step is None:
            return
        for event in self._step.ends:
            self._wait_for(event, "finishing a step")
        self._read_values(self._step)
        self._costs = [flight.costs for flight in self._step.flights.values() if flight is not None]
        self._bytes_sent = self._step.bytes_sent + sum(costs.sent for costs in self._costs)
        self._step = None

    @property
    def spans(self) -> StepSpans:
        """When everything on this worker really ran."""
        if self._spans is None:
            self.wait()
            self._spans = self._recorder.collect()
        return self._spans

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Bytes this worker sent, gradients and activations."""
        self.wait()
        return self._bytes_sent

    @property
    def sync(self) -> SyncFigures:
        """What the sync of this worker's gradients took."""
        self.wait()
        return add_up(self._costs)

    @property
    def exposed_sync_ms(self) -> float:  # type: ignore[override]
        """Time for which this worker had nothing left to do but to wait for its gradients."""
        return self.spans.exposed_sync_ms

    @property
    def bad_parameter(self) -> str | None:
        """A parameter of this worker's stages whose gradient was not finite."""
        self.wait()
        return self._bad[0] if self._bad else None

    def _read_values(self, step: StepState) -> list[float]:
        if self._values is None:
            assert step.decided is not None
            self._wait_for(step.decided, "agreeing on the step")
            assert step.host_values is not None
            self._values = step.host_values.tolist()
        return self._values

    def _wait_for(self, event: Event, doing: str) -> None:
        """Wait. Work on a CPU has named its errors itself, and one of the model's own is nobody else's fault."""
        with self._world.named_errors(doing) if event.family.device.type == "cuda" else nullcontext():
            event.synchronize()

    def _value(self, index: int) -> float:
        if self._values is None:
            assert self._step is not None
            self._read_values(self._step)
        assert self._values is not None
        return self._values[index]
