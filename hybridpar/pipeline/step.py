"""Records of a training step: what is asked for, what is known while it runs on many lanes, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        global_samples: Samples of all replicas; a function is asked when the first loss is there, and may wait for
            other workers (only where the host runs the passes itself).
        rate_factor: What the optimizers' peak learning rates are multiplied with; None where their rates have been set.
        stop: This worker wants training to end after this step.
        save: This worker wants a checkpoint after this step.
        flags: `stop` and `save` as a float64 tensor on the device, in place of what the host says. The step is then to
            be captured: the host is told nothing of it but what `Executor.adopt` starts to copy.
    """

    micro_batches: Sequence[MicroBatch]
    global_samples: int | Callable[[], int]
    rate_factor: float | None = 1.0
    stop: bool = False
    save: bool = False
    flags: Tensor | None = None

    def share(self, samples: int) -> float:
        """A micro-batch's part of the global batch, with which its mean loss is weighed."""
        known = self.global_samples
        return samples / (known() if callable(known) else known)


@dataclass
class StepState:
    """What is known about a step that was issued; filled in by the host and by the lanes."""

    number: int
    request: StepRequest
    facts: list[BorderFacts]
    flights: dict[int, Flight | None]
    spans: SpanRecorder
    events: dict[Action, Event] = field(default_factory=dict)
    reports: dict[int, Tensor] = field(default_factory=dict)  # of the forward passes, by stage, summed over replicas
    used: dict[int, list[bool]] = field(default_factory=dict)
    squares: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, Tensor | None] = field(default_factory=dict)
    backward_done: dict[int, Event] = field(default_factory=dict)
    users: dict[int, Tensor] = field(default_factory=dict)  # `used`, summed over replicas
    shared: dict[int, Event] = field(default_factory=dict)  # passed when `reports` and `users` are summed
    values: Tensor | None = None
    host_values: Tensor | None = None
    decided: Event | None = None
    ends: list[Event] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    waited_ms: float | None = None  # for which the host waited for the sync, where it runs the passes itself
    bytes_sent: int = 0
    message_bytes: list[int] = field(default_factory=list)  # of control messages, by their lane


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
        self._waited_ms = step.waited_ms
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
        sent = [*self._step.message_bytes, *(costs.sent for costs in self._costs)]
        self._bytes_sent = self._step.bytes_sent + sum(sent)
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
    def costs(self) -> list[SyncCosts]:
        """What is known of the sync of each of this worker's stages."""
        self.wait()
        return self._costs

    @property
    def sync(self) -> SyncFigures:
        """What the sync of this worker's gradients took."""
        return add_up(self.costs)

    @property
    def exposed_sync_ms(self) -> float:  # type: ignore[override]
        """Time in which this worker only waited for its gradients to be summed."""
        return self.spans.exposed_sync_ms if self._waited_ms is None else self._waited_ms

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
        """Wait. Work on a CPU has named its errors itself, and one of the model's own is not a peer's."""
        with self._world.named_errors(doing) if event.family.device.type == "cuda" else nullcontext():
            event.synchronize()

    def _value(self, index: int) -> float:
        if self._values is None:
            assert self._step is not None
            self._read_values(self._step)
        assert self._values is not None
        return self._values[index]
