"""Records of a training step: the request, what is known while it runs on many lanes, when its actions ran, and its
outcome.

When an action starts and ends costs two readings of a clock on a CPU. On a GPU it costs two events, so there it is
recorded only on request.

Also the options of a pipeline, which must be the same on all workers.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.lanes import Event
from hybridpar.pipeline.stage_module import BorderFacts
from hybridpar.schedule.actions import Action, Schedule
from hybridpar.schedule.costs import Costs
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.schedules import ScheduleRequest, make_all
from hybridpar.schedule.spans import Span
from hybridpar.schedule.spans import StepSpans as StepSpans
from hybridpar.sync.figures import SyncCosts, SyncFigures, add_up
from hybridpar.sync.stage_gradients import StepGradients, SyncOptions

#: One name for it, so that tests can put a stand-in here.
cuda: Any = torch.cuda

#: Where `StepValues` has the decision and the squared norm.
COMMIT, SQUARES = 4, 5

#: Kind of queue, worker, and which one of that kind.
Queue = tuple[str, int, int]


@dataclass(frozen=True)
class StepRequest:
    """A replica's share of one global batch, and what the step is to do with it.

    Attributes:
        micro_batches: Inputs and targets of each, on the device.
        samples: How many there are in all of these.
        global_samples: Samples of all replicas, or what their losses are sums over; None where each knows only its own.
        rate_factor: What the optimizers' peak learning rates are multiplied with.
        stop: Ask all workers to stop after this step.
        save: Ask all workers for a checkpoint after this step.
        count: What the losses of this replica are sums over; None where each is a mean over its samples.
        flags: `stop` and `save` as a float64 tensor on the device, in place of what the host says. The step is then to
            be captured: rates have been set, and the host knows nothing of it but what `Executor.adopt` starts to copy.
    """

    micro_batches: Sequence[tuple[Any, Any]]
    samples: int
    global_samples: float | None = None
    rate_factor: float = 1.0
    stop: bool = False
    save: bool = False
    count: float | None = None
    flags: Tensor | None = None

    @property
    def weight(self) -> float:
        """What this replica adds to `global_samples`."""
        return self.samples if self.count is None else self.count


class SpanRecorder:
    """Notes when the actions of one step run."""

    def __init__(self, device: torch.device, enabled: bool | None = None) -> None:
        self._cuda = device.type == "cuda"
        self._now: Callable[[], Any] = _timed_event if self._cuda else time.perf_counter
        self.enabled = not self._cuda if enabled is None else enabled
        self._notes: list[tuple[Queue, Action, Any, Any]] = []
        self._ready: dict[Action, Any] = {}

    def run(self, queue: Queue, action: Action, note: AbstractContextManager[None], work: Callable[[], object]) -> None:
        """Do the work of an action within its note, and record its start and its end."""
        with note:
            if not self.enabled:
                work()
                return
            start = self._now()
            work()
            self._notes.append((queue, action, start, self._now()))

    def ready(self, action: Action) -> None:
        """Note that an action has what it needs of this worker; called by the work that made it."""
        if self.enabled:
            self._ready[action] = self._now()

    def collect(self) -> StepSpans:
        """All that was noted; to be called once, when the step is over."""
        notes, self._notes = self._notes, []
        ready, self._ready = self._ready, {}
        if not notes:
            return StepSpans(time.perf_counter(), ())
        first = notes[0][2]
        if self._cuda:
            for _, _, _, end in notes:
                end.synchronize()

        def since_first(moment: Any) -> float:
            return float(first.elapsed_time(moment)) if self._cuda else (moment - first) * 1e3

        times = [(since_first(start), since_first(end)) for _, _, start, end in notes]
        zero = min(start for start, _ in times)
        begin = time.perf_counter() - max(end for _, end in times) / 1e3 if self._cuda else first
        spans = [
            Span(worker, kind, lane, action, start, end, since_first(ready[action]) if action in ready else None)
            for ((kind, worker, lane), action, _, _), (start, end) in zip(notes, times, strict=True)
        ]
        moved = (span.shifted(-zero) for span in spans)
        return StepSpans(begin + zero / 1e3, tuple(sorted(moved, key=lambda span: (span.start_ms, span.end_ms))))


def _timed_event() -> Any:
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class StepState:
    """What is known about a step that was issued; filled in by the host and by the lanes.

    Attributes:
        number: Of the step, from 1.
        request: What it is to do.
        total: What losses are divided by; a function is asked when the first loss is there, and may wait for other
            workers (only where the host runs the passes itself).
        rate: `rate_factor` of the request; None where rates have been set.
        inputs: The model's inputs by name, of each micro-batch.
        facts: What crosses the borders between stages.
        spans: Records when actions ran.
        flights: Of the gradients of each stage.
        events: Passed when an action is done.
        reports: Of the forward passes, by stage, in parts; where there are replicas one part, summed over them.
        used: For each parameter of a stage whether this worker used it.
        squares: Of the gradients of each stage, summed over the replicas.
        users: `used`, summed over the replicas.
        values: Of the outcome, float64, on the device, in the order of `StepValues`; None until they are decided.
        host_values: The same on the host, once they are copied.
        decided: Passed when `values` are there; None where the host itself has decided.
        ends: Passed when everything is done, by lane.
        bad: Parameters whose gradient was not finite, where the step was rolled back.
        waited_ms: For which the host waited, where it runs the passes itself.
        sent: Bytes of each message that this worker sent, but for gradients.
    """

    number: int
    request: StepRequest
    total: float | Callable[[], float]
    rate: float | None
    inputs: list[dict[str, Tensor]]
    facts: list[BorderFacts]
    spans: SpanRecorder
    waited_ms: float | None
    flights: dict[int, StepGradients] = field(default_factory=dict)
    events: dict[Action, Event] = field(default_factory=dict)
    reports: dict[int, list[Tensor]] = field(default_factory=dict)
    used: dict[int, list[bool]] = field(default_factory=dict)
    squares: dict[int, Tensor] = field(default_factory=dict)
    users: dict[int, Tensor] = field(default_factory=dict)
    values: Tensor | None = None
    host_values: Tensor | None = None
    decided: Event | None = None
    ends: list[Event] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def share(self, weight: int) -> float:
        """What the loss of a micro-batch is multiplied with: its part of the global batch, where it is a mean."""
        return weight / ((self.total() if callable(self.total) else self.total) or 1)  # a sum over no targets is 0


class StepValues(NamedTuple):
    """What all workers know of a step once it is decided.

    Attributes:
        loss: Mean over the global batch.
        samples: In the global batch.
        stop: Above 0 where any worker asked to stop.
        save: Above 0 where any worker asked for a checkpoint.
        commit: 1 where the step counts, 0 where it was rolled back.
        squares: Squared norm of the reduced gradient before clipping; below 0 where it was not taken.
    """

    loss: float
    samples: float
    stop: float
    save: float
    commit: float
    squares: float


class StepOutcome(ABC):
    """What the workers agreed on for one step. The first property that is read waits until the step is decided."""

    is_agreed = True
    exposed_sync_ms: float
    bytes_sent: int
    #: Bytes of weights that came from servers; None where there are none.
    bytes_pulled: int | None = None
    #: Updates made since the weights that the gradient was computed on; None where that is always none.
    staleness: float | None = None

    @property
    def spans(self) -> StepSpans:
        """When everything on this worker really ran; empty where nobody noted it."""
        return StepSpans(0.0, ())

    @property
    def bad_parameter(self) -> str | None:
        """A parameter of this worker's stages whose gradient was not finite, where that is known of the outcome."""
        return None

    @property
    @abstractmethod
    def sync(self) -> SyncFigures:
        """What the sync of gradients took on this worker."""

    @property
    @abstractmethod
    def values(self) -> StepValues:
        """What was decided."""

    @property
    def loss(self) -> float:
        """Mean loss over the global batch."""
        return self.values.loss

    @property
    def samples(self) -> int:
        """Samples in the global batch."""
        return round(self.values.samples)

    @property
    def stop(self) -> bool:
        """Whether any worker asked to stop."""
        return self.values.stop > 0

    @property
    def save(self) -> bool:
        """Whether any worker asked for a checkpoint."""
        return self.values.save > 0

    @property
    def committed(self) -> bool:
        """Whether the step counts; False where the guard rolled it back."""
        return self.values.commit > 0

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the reduced gradient before clipping; None where it was not needed."""
        squares = self.values.squares
        return None if squares < 0 else math.sqrt(squares) if math.isfinite(squares) else math.inf


class LateOutcome(StepOutcome):
    """The outcome of a step that may still be running. Reading it waits.

    Once the step is over it holds numbers only, so keeping the outcomes of a whole run keeps no batch alive.
    """

    def __init__(self, step: StepState, world: World) -> None:
        self._step: StepState | None = step
        self._world = world
        self._recorder = step.spans
        self._bad = step.bad
        self._values: StepValues | None = None
        self._waited_ms = step.waited_ms
        self._bytes_sent = 0
        self._costs: list[SyncCosts] = []

    def wait(self) -> None:
        """Wait until this worker has finished the step."""
        step = self._step
        if step is None:
            return
        for event in step.ends:
            if not event.is_over:
                self._wait_for(event, "finishing a step")
        self._values = self.values
        for flight in step.flights.values():
            if flight.costs.buckets:  # the stage has replicas
                self._costs.append(flight.costs)
        self._bytes_sent = sum(step.sent)
        self._step = None

    @cached_property
    def spans(self) -> StepSpans:
        """When everything on this worker really ran."""
        self.wait()
        return self._recorder.collect()

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Bytes this worker sent, gradients and activations."""
        self.wait()
        return self._bytes_sent + sum(costs.sent for costs in self._costs)

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

    @property
    def values(self) -> StepValues:
        """What was decided, as soon as it is known here."""
        if self._values is None:
            step = self._step
            assert step is not None
            if step.decided is not None and not step.decided.is_over:
                self._wait_for(step.decided, "agreeing on the step")
            assert step.host_values is not None
            self._values = StepValues(*step.host_values.tolist())
        return self._values

    def _wait_for(self, event: Event, doing: str) -> None:
        """Wait. Work on a CPU has named its errors itself, and one of the model's own is not a peer's."""
        with self._world.named_errors(doing) if event.family.device.type == "cuda" else nullcontext():
            event.synchronize()


@dataclass(frozen=True)
class PipelineOptions:
    """How a model is trained as a pipeline.

    Attributes:
        layout: Where the stages of all replicas run.
        orders: The passes of the lanes, for each replica that differs from others.
        recompute: Stages whose activations are computed again in the backward pass.
        offload: Stages whose activations wait for the backward pass in the host's memory.
        compile: Compile every stage with torch.compile.
        threads: Intra-op threads of every lane on a CPU.
        seed: Of the random operations inside the model.
        costs: What passes take, where that is known.
        sync: How gradients are exchanged between replicas.
        sync_lanes: Lanes on which that is done.
        capture: Steps are to be captured, so the host must not decide on them.
        record: On a GPU, note when every action ran, by two events each. On a CPU that is always done.
        own_only: Each worker holds the tensors of its own stages only; those of others are on the meta device.
    """

    layout: Layout
    orders: tuple[Schedule, ...]
    recompute: tuple[int, ...] = ()
    offload: tuple[int, ...] = ()
    compile: bool = False
    threads: int = 1
    seed: int = 0
    costs: Costs | None = None
    sync: SyncOptions = field(default_factory=SyncOptions)
    sync_lanes: int = 2
    capture: bool = False
    record: bool = False
    own_only: bool = False

    def order(self, replica: int, micro_batches: int) -> Schedule:
        """The passes of the lanes of a replica: of fewer micro-batches without those of others, of more once again."""
        made = self.orders[0 if self.layout.is_equal else replica]
        rows = (
            tuple(
                action._replace(index=first + action.index)
                for first in range(0, micro_batches, made.micro_batches)
                for action in row
                if action.index is not None and first + action.index < micro_batches
            )
            for row in made.rows
        )
        return Schedule(made.name, tuple(rows), micro_batches)


def whole_options(workers: int, **options: Any) -> PipelineOptions:
    """A model that is not cut on each of some workers: one stage, which runs one micro-batch after the other."""
    layout = Layout.repeated([(0, 0)], workers)
    return PipelineOptions(layout, make_all("accumulate", ScheduleRequest(layout, 1)), **options)
