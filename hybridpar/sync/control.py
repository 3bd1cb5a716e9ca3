"""Why: what the workers must agree on in a step fits into a few numbers, and these travel apart from the gradients.

Two messages a step, summed over the workers on a lane of their own. The *forward report* leaves when the last forward
pass has ended and is hidden behind the backward pass. The *backward report* follows the last bucket. Its sum of squares
is finite exactly where all gradients are, so one number serves the guard and clipping, and as it has been summed by
the same collective, every worker holds the same bits of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.errors import SyncError
from hybridpar.lanes import Event, Lane, Lanes
from hybridpar.sync.constants import Constants
from hybridpar.sync.figures import SyncCosts, SyncFigures, add_up

# Layout of a forward report; BatchNorm sums follow.
LOSS, _SAMPLES, _STOP, _SAVE, _LAYOUT, _LAYOUT_SQUARED, HEAD = range(7)
# Layout of a step's outcome.
_COMMIT, _SQUARES = 4, 5


class StepOutcome(ABC):
    """What the workers agreed on for one step.

    Making one waits for nothing; the first property that is read waits until the step has been decided.

    Attributes:
        exposed_sync_ms: Time for which nothing but the sync was left to wait for.
        bytes_sent: Bytes this worker sent: payload of each collective times the collective's own factor.
    """

    exposed_sync_ms: float
    bytes_sent: int

    @property
    @abstractmethod
    def sync(self) -> SyncFigures:
        """What the sync of gradients took on this worker."""

    @abstractmethod
    def _value(self, index: int) -> float:
        """One of: loss, samples, stop, save, commit (1 or 0), squared gradient norm."""

    @property
    def loss(self) -> float:
        """Mean loss over the global batch."""
        return self._value(0)

    @property
    def samples(self) -> int:
        """Samples in the global batch."""
        return round(self._value(1))

    @property
    def stop(self) -> bool:
        """Whether any worker asked to stop."""
        return self._value(2) > 0

    @property
    def save(self) -> bool:
        """Whether any worker asked for a checkpoint."""
        return self._value(3) > 0

    @property
    def committed(self) -> bool:
        """Whether the step counts; False where the guard rolled it back."""
        return self._value(4) > 0

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the reduced gradient before clipping; None where nobody needed it."""
        squares = self._value(5)
        return None if squares < 0 else math.sqrt(squares) if math.isfinite(squares) else math.inf


@dataclass
class DecidedOutcome(StepOutcome):
    """The outcome of a step whose end the host has issued.

    On a GPU a copy of the values is on its way to the host, and reading waits for that copy alone, not for work that
    was queued since.

    Attributes:
        values: float64 tensor on the device: loss, samples, stop, save, commit (1 or 0), squared gradient norm.
        costs: What is known of the sync of gradients.
    """

    values: Tensor
    exposed_sync_ms: float
    bytes_sent: int
    _copy: Tensor = field(repr=False)
    _copied: Event | None = field(default=None, repr=False)
    costs: SyncCosts = field(default_factory=SyncCosts, repr=False)
    _host: list[float] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, values: Tensor, exposed_sync_ms: float, bytes_sent: int, lanes: Lanes, costs: SyncCosts | None = None
    ) -> DecidedOutcome:
        """Start the copy to the host."""
        copy = start_copy(values)
        copied = None if values.device.type == "cpu" else lanes.caller.record()
        return cls(values, exposed_sync_ms, bytes_sent, copy, copied, costs or SyncCosts())

    @classmethod
    def bare(cls, values: Tensor, bytes_sent: int) -> DecidedOutcome:
        """What nobody on the host is going to read."""
        return cls(values, 0.0, bytes_sent, values)

    @property
    def sync(self) -> SyncFigures:
        """See `StepOutcome`. On a GPU reading it waits for the end of the sync."""
        return add_up([self.costs])

    @property
    def commit(self) -> Tensor:
        """`committed` as a 0-d tensor of 1 or 0 that nobody has to wait for."""
        return self.values[_COMMIT]

    def _value(self, index: int) -> float:
        if self._host is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._host = self._copy.tolist()
        return self._host[index]


def start_copy(values: Tensor) -> Tensor:
    """A copy on the host, which is there when the current stream is; on a CPU the values themselves."""
    if values.device.type == "cpu":
        return values
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return copy.copy_(values, non_blocking=True)


@dataclass
class Pending:
    """A message on its way: when the event is done, `message` holds the sum over the workers."""

    message: Tensor
    event: Event | None
    _lanes: Lanes
    _world: World
    _doing: str

    def wait(self) -> Tensor:
        """Make the caller's lane wait for the sum.

        Raises:
            SyncError: A worker died or did not answer in time.
        """
        if self.event is not None:
            with self._world.named_errors(self._doing):
                self._lanes.caller.wait(self.event)
        return self.message


class ControlLane:
    """Sums small float64 messages over the workers, in order, on a lane of its own.

    Args:
        world: The workers; in a world of one a message is its own sum.
        lanes: Where to open the lane.
    """

    def __init__(self, world: World, lanes: Lanes) -> None:
        self._world = world
        self._lanes = lanes
        self._lane: Lane | None = lanes.open("control", priority=-1) if world.size > 1 else None

    def send(self, message: Tensor, doing: str) -> Pending:
        """Start summing a message in place.

        Args:
            message: float64, equal in shape on all workers.
            doing: What the workers are doing, for the error message.
        """
        if self._lane is None:
            return Pending(message, None, self._lanes, self._world, doing)
        group = self._world.control_sum
        assert group is not None

        def reduce() -> None:
            group.all_reduce(message)

        self._lane.wait(self._lanes.caller.record())
        self._lane.submit(reduce, uses=(message,))
        return Pending(message, self._lane.record(), self._lanes, self._world, doing)

    def bytes_of(self, elements: int) -> int:
        """Bytes that one worker sends for a message."""
        return all_reduce_bytes(8 * elements, self._world.size)


def all_reduce_bytes(payload: int, workers: int) -> int:
    """Bytes that one worker sends in an all-reduce of `payload` bytes: 2 (K - 1) / K of it."""
    return round(2 * (workers - 1) / workers * payload)


def forward_report(
    loss: Tensor,
    samples: int,
    *,
    stop: bool = False,
    save: bool = False,
    layout: int,
    batch_norm: Tensor | None,
    flags: Tensor | None = None,
    constants: Constants | None = None,
) -> Tensor:
    """The message that leaves after the last forward pass.

    Args:
        loss: This worker's part of the mean loss, 0-d.
        samples: Samples of this worker.
        stop: This worker wants to stop.
        save: This worker wants a checkpoint.
        layout: Fingerprint of the buckets, 16 bits.
        batch_norm: Sums of the BatchNorm layers.
        flags: `stop` and `save` as a float64 tensor where the loss is, in place of what the host says.
        constants: Where numbers that were copied to the device before are found.
    """
    known = constants or Constants(loss.device)
    if flags is None:
        flags = known.of(float(stop), float(save))
    head = (loss.double().reshape(1), known.of(samples), flags, known.of(layout, layout * layout))
    return torch.cat(head if batch_norm is None else (*head, batch_norm))


def check_layout(report: Tensor, workers: int) -> None:
    """Refuse to go on where workers cut different buckets.

    All fingerprints h are equal exactly where K sum(h^2) = sum(h)^2; with 16 bits the sums are exact in float64.
    On a GPU nothing is checked, because reading the sums would stall it.

    Raises:
        SyncError: They differ.
    """
    if workers == 1 or report.device.type != "cpu":
        return
    head = report[:HEAD].tolist()
    if workers * head[_LAYOUT_SQUARED] != head[_LAYOUT] ** 2:
        raise SyncError(
            "the workers do not train the same parameters",
            "Names, shapes, memory formats and requires_grad of all parameters must be equal on all workers.",
            "Build and freeze the model in the same way on every worker.",
        )


def backward_report(squares: Tensor, used: Sequence[bool], constants: Constants | None = None) -> Tensor:
    """The message that follows the last bucket: this worker's sums of squares, then who used which parameter."""
    return torch.cat((squares.sum().reshape(1), (constants or Constants(squares.device)).of(*used)))


def decide(report: Tensor, squares: Tensor, *, guard: bool, measured: bool) -> Tensor:
    """The values of a `StepOutcome`, from the summed reports.

    Args:
        report: The summed forward report.
        squares: Squared norm of the reduced gradient.
        guard: Whether a non-finite gradient rolls the step back.
        measured: Whether anybody computed the norm.
    """
    commit = torch.isfinite(squares).double() if guard else torch.ones_like(squares)
    known = squares if measured else torch.full_like(squares, -1.0)
    return torch.cat((report[: _SAVE + 1], torch.stack((commit, known))))
