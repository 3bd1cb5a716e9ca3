"""How gradients are synchronised, and the gradients of a stage in a step: what is known of them, and what becomes of
them where no other worker has a part.

`sync.reducer` adds what replicas need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from hybridpar.comm.transport import flat_view
from hybridpar.comm.world import World
from hybridpar.compress import Policy
from hybridpar.lanes import Event, Lane, Lanes
from hybridpar.lanes.base import Work
from hybridpar.sync.figures import SyncCosts

if TYPE_CHECKING:
    from hybridpar.comm.group import Group
    from hybridpar.sync.buckets import Bucket
    from hybridpar.sync.compression import Compression
    from hybridpar.sync.pieces import Gradients


@dataclass(frozen=True)
class SyncOptions:
    """How gradients are synchronised.

    Attributes:
        bucket_bytes: Size at which a bucket is full; a parameter of at least this size has a bucket of its own.
        guard: Roll a step back on all workers when any gradient is not finite.
        clip_norm: Scale the gradient down to this global norm; with another `clip_mode` its limit.
        clip_mode: `norm`, `value` or `agc`, see `clip_each`.
        not_clipped: Names of parameters that `agc` leaves alone.
        pool_batch_norm: Pool BatchNorm's running statistics over micro-batches and workers.
        sync_batch_norm: Also normalise by the moments over the replicas, on a group of its own.
        codec: What gradients are sent as: a policy of `hybridpar.compress` or its text. Anything but `none` needs
            process groups.
        seed: Of what codecs draw at random.
        hierarchy: Where there are several nodes, and one of them has several workers, codecs are used between nodes
            alone.
        shard_optimizer: Each replica steps a part of the parameters (`hybridpar.sync.shards`), on a group of its own.
        delayed: Apply each gradient one step late, and sum it meanwhile (`hybridpar.sync.delayed_reducer`).
    """

    bucket_bytes: int = 8 << 20
    guard: bool = True
    clip_norm: float | None = None
    clip_mode: str = "norm"
    not_clipped: tuple[str, ...] = ()
    pool_batch_norm: bool = True
    sync_batch_norm: bool = False
    codec: str | Policy = "none"
    seed: int = 0
    hierarchy: bool = True
    delayed: bool = False
    shard_optimizer: bool = False

    @property
    def global_norm(self) -> float | None:
        """The norm that the gradient of all parameters is clipped to, if it is."""
        return self.clip_norm if self.clip_mode == "norm" else None

    @property
    def policy(self) -> Policy:
        """What gradients are sent as, once workers have agreed on it."""
        assert isinstance(self.codec, Policy)
        return self.codec

    @property
    def uses_nodes(self) -> bool:
        """Whether it matters which workers are on one node, once workers have agreed on the policy."""
        return self.hierarchy and not self.policy.changes_nothing


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
        if self.unwritten is not None:
            self.unwritten.factor = factor
            return
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def first_bad(self) -> str | None:
        """Name of the first parameter, in the model's order, whose gradient is not finite."""
        received = {} if self.unwritten is None else self.unwritten.received
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if parameter in received:
                gradient = torch.empty_like(parameter)
                received[parameter].write(flat_view(gradient))
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
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


#: Norm that a unit's weights are taken to have at least (Brock et al. 2021, equation 3).
_LEAST_NORM = 1e-3


def clip_factor(squares: Tensor, limit: float) -> Tensor | None:
    """The factor by which gradients are clipped to a norm; None where the host knows that it is 1."""
    # The same guard against division by zero as torch.nn.utils.clip_grad_norm_.
    factor = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    if factor.device.type == "cpu" and (not math.isfinite(float(squares)) or float(factor) == 1.0):
        return None
    return factor


@torch.no_grad()
def clip_each(parameters: Iterable[nn.Parameter], mode: str, limit: float) -> None:
    """Clip the gradient of each parameter by itself, in place: by value, or adaptively (`agc`)."""
    if mode == "value":
        torch.nn.utils.clip_grad_value_(parameters, limit)
        return
    for parameter in parameters:
        if parameter.grad is not None:
            clip_adaptively(parameter.grad, parameter, limit)


def clip_adaptively(gradient: Tensor, weight: Tensor, factor: float) -> None:
    """Scale down, in place, what of a gradient is large for the weights that it moves.

    The gradient of a unit, one row of a matrix or one filter, is scaled to the norm max(|w|, 0.001) * factor of its
    weights where it is longer (Brock et al. 2021, "High-performance large-scale image recognition without
    normalization", equation 3). A vector is one unit.
    """
    longest = _unit_norm(weight).clamp_(min=_LEAST_NORM).mul_(factor)
    norm = _unit_norm(gradient)
    clipped = gradient * (longest / norm.clamp(min=1e-6))
    gradient.copy_(torch.where(norm < longest, gradient, clipped))


def _unit_norm(values: Tensor) -> Tensor:
    over = tuple(range(1, values.ndim)) or None
    norm: Tensor = torch.linalg.vector_norm(values, dim=over, keepdim=values.ndim > 1)
    return norm
