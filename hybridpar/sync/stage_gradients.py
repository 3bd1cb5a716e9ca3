"""The gradients of a stage in a step: what is known of them, and what becomes of them where no other worker has a part.

`sync.reducer` adds what replicas need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.lanes import Event, Lane, Lanes
from hybridpar.lanes.base import Work
from hybridpar.sync.figures import SyncCosts

if TYPE_CHECKING:
    from hybridpar.comm.group import Group
    from hybridpar.sync.buckets import Bucket
    from hybridpar.sync.compression import Compression
    from hybridpar.sync.pieces import Gradients


@dataclass
class StepGradients:
    """What is known about the gradients of one step."""

    number: int  # of the step, from 1
    squares: Tensor  # float64, per bucket: only the share of this worker is filled in; or 0-d, of all gradients
    releasing: bool = False  # the last backward pass runs, so full buckets may leave
    landed: list[Event] = field(default_factory=list)  # passed when a bucket is summed
    next_bucket: int = 0  # the first one that has not left
    costs: SyncCosts = field(default_factory=SyncCosts)  # by bucket, written by the sync lanes
    loss: Tensor | None = None  # mean loss of all replicas, 0-d; see `reported`
    reported: Event | None = None  # passed when `loss` is there; on a CPU also: all workers cut the same buckets
    marks: list[Event] = field(default_factory=list)  # where another lane gathers buckets: passed when each is gathered
    on_ready: Callable[[int], None] | None = None  # called when a bucket is gathered, with its number
    run_sum: Callable[[int, Work], None] | None = None  # does the work that sums a bucket


#: The lanes on which gradients are summed, each with the group that does it.
SyncLanes: TypeAlias = "Sequence[tuple[Lane, Group]]"


def open_sync_lanes(world: World, lanes: Lanes, spared: int = 0, name: str = "sync") -> SyncLanes:
    """One lane for each of the world's groups that add gradients."""
    groups = world.lane_groups[: len(world.lane_groups) - spared]
    return [(lanes.open(f"{name}-{index}", priority=-1), group) for index, group in enumerate(groups)]


class StageGradients:
    """The gradients of a stage without replicas: no bucket, no hook, and only their norm is taken.

    The calls of a step. The host: `new_step`; when it issues the last backward pass, `marks`; then `issue` for each
    bucket. The stage's lane: `start`; around the last backward pass `begin_last` and `flush`; then `measure`; and when
    the step has been decided `finish`, `unwritten`, `scale` and `close_step`.

    `measure` says whether the norm is wanted.
    """

    #: What compresses gradients here, if anything does.
    compression: Compression | None = None
    #: Fingerprint of the buckets, which is the same on all replicas.
    layout = 0

    def __init__(self, parameters: Mapping[str, nn.Parameter], compute: Lane, *, measure: bool) -> None:
        self._parameters = parameters
        self._compute = compute
        self._measure = measure
        self._complex = any(parameter.is_complex() for parameter in parameters.values())
        self._steps = 0
        self._step: StepGradients | None = None
        self.buckets: list[Bucket] = []
        #: What gradients are multiplied with before they are measured, 0-d.
        self.unscale: Tensor | None = None
        #: After `finish`: the gradients, where they are not in `.grad`.
        self.unwritten: Gradients | None = None

    def new_step(self) -> StepGradients:
        """What will be known about the gradients of the next step."""
        self._steps += 1
        make = torch.zeros if self.buckets else torch.empty  # where there are none, nothing need be launched
        return StepGradients(self._steps, make(len(self.buckets), dtype=torch.float64, device=self._compute.device))

    def start(self, step: StepGradients) -> None:
        """Forget the gradients of the step before."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self.unwritten, self._step = None, step

    def begin(self, step: StepGradients) -> None:
        """On the host, when `start` has been issued: send what waits from the step before; nothing, in most cases."""

    def marks(self, step: StepGradients) -> list[Event]:
        """Events that the last backward pass will pass, one per bucket; none where its hooks send the buckets."""
        return step.marks

    def begin_last(self, step: StepGradients) -> None:
        """On the stage's lane: the next backward pass is the last of the step, so full buckets are sent from now on."""

    def issue(self, index: int, step: StepGradients) -> Event:
        """Issue the sum of a bucket, where the hooks have not."""
        return step.landed[index]

    def flush(self) -> list[bool]:
        """After the last backward pass: send what is left; returns which parameters were used, bucket by bucket."""
        return []

    def measure(self, step: StepGradients) -> None:
        """On the stage's lane, after `flush`: take the norm of gradients that no bucket measures.

        It is not finite exactly where an element is not: GPUs take it in float64, CPUs where float32 overflows.
        """
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        if not self._measure or not gradients:
            return
        if self.unscale is not None:
            torch._foreach_mul_(gradients, self.unscale)
        if self._complex:
            gradients = [torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in gradients]
        on_cpu = self._compute.device.type == "cpu"
        step.squares = _sum_of_all_squares(gradients, None if on_cpu else torch.float64)
        if on_cpu and not bool(torch.isfinite(step.squares)):
            step.squares = _sum_of_all_squares(gradients, torch.float64)

    def squares(self, step: StepGradients) -> Tensor:
        """This worker's part of the squared norm of the reduced gradients, 0-d float64, once all sums are there."""
        return step.squares.sum() if step.squares.ndim else step.squares

    def finish(self, users: Tensor | None, used: Sequence[bool] | None) -> list[str]:
        """When a step has been decided: leave out parameters used on no worker, which are named."""
        return []

    def scale(self, factor: Tensor) -> None:
        """Multiply all reduced gradients by a 0-d factor."""
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def first_bad(self) -> str | None:
        """Name of the first parameter, in the model's order, whose gradient is not finite."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return name
        return None

    def close_step(self) -> None:
        """After the step was applied or rolled back: backward passes until the next step are none of a step's."""
        self._step = None

    def close(self) -> None:
        """Remove all hooks. Gradients stay as they are."""


def _sum_of_all_squares(gradients: list[Tensor], dtype: torch.dtype | None) -> Tensor:
    norms = torch.stack(torch._foreach_norm(gradients, 2, dtype)).double()
    return torch.dot(norms, norms)
