"""Sums gradients over replicas in buckets, while the backward pass still computes.

Hooks fire as autograd accumulates each gradient. When the last gradient of a bucket arrives in the last micro-batch,
the bucket is sent on a sync lane. Buckets are sent in index order, so that every lane's group sees the same sums in
the same order on every worker.

Only the host thread issues work. Where the host itself runs the backward pass (a model that is not cut), the hook sends
the bucket. Where a lane runs it (a stage of a pipeline), the host has issued all sums beforehand, each behind an event
that the hook marks when the bucket is gathered.

Bucket order: first the reverse of the order in which modules hold parameters, then, re-made once after step 1, the
order that rank 0 observed (Li et al. 2020, "PyTorch Distributed", section 3.2.3).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hybridpar.comm.group import Group
from hybridpar.comm.world import World
from hybridpar.compress import Policy
from hybridpar.errors import SyncError
from hybridpar.lanes import Event, Lane, Lanes
from hybridpar.lanes.base import Work
from hybridpar.sync.buckets import Bucket, Slot, as_real, check_layout, layout_fingerprint, make_buckets, sum_of_squares
from hybridpar.sync.compression import Compression, add_plainly, make_compression
from hybridpar.sync.figures import SyncCosts
from hybridpar.sync.node_worlds import NodeWorlds


@dataclass
class Flight:
    """What is known about the gradients of one step."""

    number: int  # of the step, from 1
    squares: Tensor  # float64, per bucket: only the share of this worker is filled in; or 0-d, of all gradients
    releasing: bool = False  # the last backward pass runs, so full buckets may leave
    checked: set[Lane] = field(default_factory=set)  # sync lanes that have compared the layouts
    landed: list[Event] = field(default_factory=list)  # passed when a bucket is summed
    next_bucket: int = 0  # the first one that has not left
    costs: SyncCosts = field(default_factory=SyncCosts)  # by bucket, written by the sync lanes
    loss: Tensor | None = None  # mean loss of all replicas, 0-d; see `reported`
    layouts: Tensor | None = None  # sums of the replicas' `layout` and of its square, float64; see `reported`
    reported: Event | None = None  # passed when `loss` and `layouts` are there
    flats: list[Tensor] = field(default_factory=list)  # gathered buckets, by index
    marks: list[Event] = field(default_factory=list)  # where another lane gathers them: passed when each is gathered
    on_ready: Callable[[int], None] | None = None  # called when a bucket is gathered, with its number
    wrap: Callable[[int, Work], Work] | None = None  # makes the work that is issued from the work that sums a bucket


SyncLanes = Sequence[tuple[Lane, Group]]


def open_sync_lanes(world: World, lanes: Lanes, spared: int = 0, name: str = "sync") -> SyncLanes:
    """One lane for each of the world's groups that add gradients."""
    groups = world.lane_groups[: len(world.lane_groups) - spared]
    return [(lanes.open(f"{name}-{index}", priority=-1), group) for index, group in enumerate(groups)]


class LocalGradients:
    """The gradients of a stage that has no replicas: nothing is sent, only their norm is taken.

    The norm is taken in one pass after the backward pass, where somebody needs it: hooks would run once per parameter.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], compute: Lane, measure: bool) -> None:
        self._parameters = parameters
        self._compute = compute
        self._measure = measure
        self._complex = any(one.is_complex() for one in parameters.values())
        self._steps = 0
        self.buckets: list[Bucket] = []
        self.layout = 0
        self.compression: Compression | None = None

    def new_flight(self) -> Flight:
        """What will be known about the gradients of the next step."""
        self._steps += 1
        squares = torch.zeros(len(self.buckets), dtype=torch.float64, device=self._compute.device)
        return Flight(self._steps, squares)

    def start(self, flight: Flight) -> None:
        """Forget the gradients of the step before, and expect those of the next."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def begin(self, flight: Flight) -> None:
        """On the host, when `start` has been issued: send what waits from the step before; nothing, in most cases."""

    def marks(self, flight: Flight) -> list[Event]:
        """Events that the last backward pass will pass, one per bucket; none where its hooks send the buckets."""
        return flight.marks

    def begin_last(self, flight: Flight, rate: float | None = None) -> None:
        """On the stage's lane: the next backward pass is the last of the step."""

    def flush(self) -> list[bool]:
        """After the last backward pass: send what is left, with zeros for parameters that were not used here."""
        return []

    def measure(self, flight: Flight) -> None:
        """On the stage's lane, after `flush`: take the norm, where buckets do not bring it.

        It is not finite exactly where an element is not; where float32 overflows it is taken again in float64.
        """
        gradients = [one.grad for one in self._parameters.values() if one.grad is not None]
        if self._complex:
            gradients = list(map(as_real, gradients))
        if self._measure and gradients:
            flight.squares = _sum_of_all_squares(gradients, None, self._compute.device)
            if flight.squares.device.type == "cpu" and not bool(torch.isfinite(flight.squares)):
                flight.squares = _sum_of_all_squares(gradients, torch.float64, self._compute.device)

    def squares(self, flight: Flight) -> Tensor:
        """This worker's part of the squared norm of the reduced gradients, 0-d float64, once all sums are there."""
        return flight.squares.sum()

    def place_gradients(self) -> None:
        """Before they are used: reduced gradients are in `.grad` already."""

    def keep_used(self, users: Tensor, used: list[bool]) -> list[str]:
        """Give parameters used on no worker `.grad` None, so that the optimizer skips them."""
        return []

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a factor, in place."""
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))

    def first_bad(self) -> str | None:
        """Name of the first parameter, in the model's order, whose gradient is not finite."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return name
        return None

    def close_step(self) -> None:
        """After the step was applied or rolled back."""

    def close(self) -> None:
        """Remove all hooks. Gradients stay as they are."""


class GradientReducer(LocalGradients):
    """Sums the gradients of a stage over its replicas, bucket by bucket, as they become ready.

    The calls of a step. The host: `rebuild_buckets` where `is_due`, `new_flight`; when it issues the last backward
    pass, `marks`; then `issue` for each bucket. The stage's lane: `start`; around the last backward pass `begin_last`
    and `flush`; and when the step has been decided `keep_used`, `scale` and `close_step`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        replicas: World,
        lanes: Lanes,
        compute: Lane,
        bucket_bytes: int,
        measure: bool,
        sync_lanes: SyncLanes,
        codec: str | Policy = "none",
        seed: int = 0,
        nodes: NodeWorlds | None = None,
    ) -> None:
        super().__init__(parameters, compute, measure)
        self._world = replicas
        self._lanes = lanes
        self._inline = compute is lanes.caller  # the host runs the passes, and hooks send the buckets
        self._bucket_bytes = bucket_bytes
        self._sync_lanes = sync_lanes
        self.compression = make_compression(codec, replicas, [group for _, group in sync_lanes], seed, nodes)
        self._order: list[str] = list(parameters)[::-1]
        self._observed: list[str] | None = []
        self._loaded_at = 0  # the step after which a state was loaded
        self._trainable: tuple[bool, ...] = ()
        self._places: dict[str, tuple[Bucket, Slot]] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._flight: Flight | None = None
        self.follow_trainable()

    # ------------------------------------------------------------------ a step

    def start(self, flight: Flight) -> None:
        """Forget the gradients of the step before, and expect those of the next in every bucket."""
        super().start(flight)
        for bucket in self.buckets:
            bucket.pending = len(bucket.slots)
        self._flight = flight

    def marks(self, flight: Flight) -> list[Event]:
        """Events that the last backward pass will pass, one per bucket; none where its hooks send the buckets."""
        if not self._inline:
            flight.marks = [self._lanes.event() for _ in self.buckets]
        return flight.marks

    def begin_last(self, flight: Flight, rate: float | None = None) -> None:
        """The next backward pass is the last of the step: from now on full buckets are sent."""
        if self.compression is not None:
            if not self._inline:
                self.compression.catch_up()
            if rate is not None:
                self.compression.set_rate(rate)
        flight.releasing = True

    def issue(self, index: int, flight: Flight) -> Event:
        """Issue the sum of a bucket, where the hooks have not."""
        if self._inline:
            return flight.landed[index]
        return self._send(self.buckets[index], flight, flight.marks[index])

    def flush(self) -> list[bool]:
        """After the last backward pass: send what is left, with zeros for parameters that were not used here."""
        flight = self._flight
        assert flight is not None
        used = [slot.seen == flight.number for bucket in self.buckets for slot in bucket.slots]
        for bucket in self.buckets[flight.next_bucket :]:
            bucket.pending = 0
        self._launch_full_buckets(flight)
        return used

    def is_due(self) -> bool:
        """Whether the buckets must be rebuilt before the next step."""
        return not self.is_cut() or (bool(self.buckets) and self._has_observed)

    def rebuild_buckets(self) -> None:
        """With all lanes idle: rebuild the buckets for the parameters that are trained now.

        After the first step, in the order in which gradients were computed.
        """
        self._flight = None
        if self._has_observed:
            self._adopt_observed_order(self._observed or [])
        self.follow_trainable()

    @property
    def _has_observed(self) -> bool:
        """Whether an order is to be agreed on; it is also where this worker had no sample, and saw none."""
        return self._observed is not None and self._steps > self._loaded_at

    def measure(self, flight: Flight) -> None:
        """Sync lanes take the squares, bucket by bucket."""

    def close_step(self) -> None:
        """After the step was applied or rolled back: backward passes until the next step are not the reducer's."""
        self._flight = None

    def keep_used(self, users: Tensor, used: list[bool]) -> list[str]:
        """Give parameters used on no worker `.grad` None; return their names."""
        if all(used):
            return []
        names = [slot.name for bucket in self.buckets for slot in bucket.slots]
        unused = [name for name, count in zip(names, users.tolist(), strict=True) if count == 0]
        for name in unused:
            self._parameters[name].grad = None
        return unused

    def scale(self, factor: Tensor) -> None:
        """Multiply all reduced gradients by a 0-d factor, in place, bucket by bucket."""
        for bucket in self.buckets:
            if any(slot.parameter.grad is not None for slot in bucket.slots):
                flat = bucket.flat()
                flat.mul_(factor.to(flat.dtype))

    # ----------------------------------------------------------------- sending

    def gradient_ready(self, name: str) -> None:
        """Called by autograd when a parameter's gradient has been accumulated."""
        flight = self._flight
        if flight is None or name not in self._places:
            return
        bucket, slot = self._places[name]
        slot.seen = flight.number
        if not flight.releasing:
            return
        self._note_ready(slot, flight)
        if self._observed is not None:
            self._observed.append(name)
        self._arrived(bucket, slot)
        bucket.pending -= 1
        if bucket.pending == 0:
            self._launch_full_buckets(flight)

    def _arrived(self, bucket: Bucket, slot: Slot) -> None:
        """A gradient is complete. It stays in `.grad` until its bucket is full."""

    def _note_ready(self, slot: Slot, flight: Flight) -> None:
        """A gradient is complete, and must be so only once."""
        if slot.ready == flight.number:
            raise SyncError(
                f"the gradient of {slot.name!r} arrived twice in one backward pass",
                "It is sent at the first arrival, so a second one would be lost.",
                "Use non-reentrant activation checkpointing, and call backward once per micro-batch.",
            )
        slot.ready = flight.number

    def _launch_full_buckets(self, flight: Flight) -> None:
        while flight.next_bucket < len(self.buckets) and self.buckets[flight.next_bucket].pending <= 0:
            self._launch(self.buckets[flight.next_bucket], flight)
            flight.next_bucket += 1

    def _launch(self, bucket: Bucket, flight: Flight) -> None:
        """A bucket is full, and all before it have been sent."""
        self._collect(bucket, flight)
        if flight.on_ready is not None:
            flight.on_ready(bucket.index)
        if not self._inline:
            self._compute.mark(flight.marks[bucket.index])
            return
        if self.compression is not None:  # before the event: it may leave work of its own on this lane
            self.compression.catch_up()
        with self._lanes.on_behalf():
            self._send(bucket, flight, self._lanes.caller.record())

    def _collect(self, bucket: Bucket, flight: Flight) -> None:
        """Bring the gradients of a full bucket together."""
        self._refuse_sparse(bucket.slots)
        flight.flats.append(bucket.collect())

    def _refuse_sparse(self, slots: Sequence[Slot]) -> None:
        sparse = [one.name for one in slots if one.parameter.grad is not None and one.parameter.grad.is_sparse]
        if sparse:
            raise SyncError(
                f"the gradient of {sparse[0]!r} is sparse",
                "Gradients are sent as dense tensors.",
                "Build the layer with sparse=False.",
            )

    def _send(self, bucket: Bucket, flight: Flight, ready: Event) -> Event:
        """Issue the sum of a bucket that is gathered when `ready` is passed; the returned event is passed after it."""
        lane, group = self._sync_lanes[bucket.index % len(self._sync_lanes)]
        self._check_peers(lane, flight)
        work = self._work(bucket, flight, lane, group)
        lane.wait(ready)
        lane.submit(flight.wrap(bucket.index, work) if flight.wrap is not None else work)
        landed = lane.record()
        flight.landed.append(landed)
        return landed

    def _work(self, bucket: Bucket, flight: Flight, lane: Lane, group: Group) -> Work:
        """What a sync lane does for a bucket that is gathered. It fills in the bucket's squares and costs."""
        mine = self._measure and bucket.index % self._world.size == self._world.rank

        def reduce() -> None:
            flat, squares = flight.flats[bucket.index], flight.squares[bucket.index]
            lane.keep(flat, squares)
            if self.compression is not None:
                flight.costs.buckets[bucket.index] = self.compression.add(bucket, flat, group)
            else:
                flight.costs.buckets[bucket.index] = add_plainly(bucket, flat, group, self._world.size)
            if mine:
                squares.copy_(sum_of_squares(flat))

        return reduce

    def _check_peers(self, lane: Lane, flight: Flight) -> None:
        """Before a lane's first bucket, check that all workers cut the same buckets; on a GPU that would stall it.

        A collective whose sizes differ between workers does not fail in an orderly way: gloo aborts the process.
        """
        if lane in flight.checked or flight.reported is None or self._world.device.type != "cpu":
            return
        flight.checked.add(lane)

        def check() -> None:
            assert flight.layouts is not None
            lane.keep(flight.layouts)
            check_layout(flight.layouts, self._world.size)

        lane.wait(flight.reported)
        lane.submit(check)

    # ------------------------------------------------------------------ layout

    def is_cut(self) -> bool:
        """Whether the buckets still fit: no parameter was frozen or thawed since they were cut."""
        return self._trainable == tuple(parameter.requires_grad for parameter in self._parameters.values())

    def follow_trainable(self) -> None:
        """Cut the buckets anew where parameters were frozen or thawed since the last step."""
        trainable = tuple(parameter.requires_grad for parameter in self._parameters.values())
        if trainable == self._trainable:
            return
        self._trainable = trainable
        order = [(name, self._parameters[name]) for name in self._order if self._parameters[name].requires_grad]
        self.buckets = make_buckets(order, self._bucket_bytes)
        self._places = {slot.name: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}
        self.layout = layout_fingerprint(self.buckets)
        if self.compression is not None:
            self.compression.cut(self.buckets)
        me = weakref.ref(self)
        for name, parameter in order:
            if name not in self._hooks:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks[name] = register(_make_hook(me, name))

    def _adopt_observed_order(self, observed: list[str]) -> None:
        """Rank 0's order counts for all."""
        numbers = {name: index for index, name in enumerate(self._parameters)}
        arrived = set(observed)
        rest = [name for name in self._order if name not in arrived]
        order = torch.tensor([numbers[name] for name in [*observed, *rest]], device=self._world.device)
        with self._world.named_errors("agreeing on the order of buckets"):
            dist.broadcast(order, group_src=0, group=self._world.control)
        names = list(self._parameters)
        self._order = [names[index] for index in order.tolist()]
        self._observed = None
        self._trainable = ()

    def bytes_by_parameter(self) -> dict[str, tuple[str, int, int]]:
        """Codec, bytes as it is and bytes sent of each parameter's gradient; empty where no codec is used."""
        self.follow_trainable()
        return {} if self.compression is None else self.compression.bytes_by_parameter()

    def state_dict(self) -> dict[str, Any]:
        """The agreed order, by parameter name, so that a resumed run adds in the same order; and what codecs keep.

        A collective, with all lanes idle: the order of the first step is agreed on before.
        """
        if self.is_due():
            self.rebuild_buckets()
        state: dict[str, Any] = {"order": list(self._order), "settled": self._observed is None}
        return state if self.compression is None else {**state, "codec": self.compression.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the order and what codecs keep, where names fit; otherwise both begin anew, as without entries."""
        fits = sorted(state.get("order", ())) == sorted(self._parameters)
        self._order = list(state["order"]) if fits else list(self._parameters)[::-1]
        self._observed = None if self._world.size == 1 or (fits and state["settled"]) else []
        self._trainable, self._loaded_at = (), self._steps
        if self.compression is not None:
            self.compression.load_state_dict(state.get("codec", {}) if fits else {})

    def close(self) -> None:
        """Remove all hooks. Gradients stay as they are."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}


def _make_hook(sync: weakref.ref[GradientReducer], name: str) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        target = sync()
        if target is not None:
            target.gradient_ready(name)

    return hook


@torch.no_grad()
def _sum_of_all_squares(gradients: list[Tensor], dtype: torch.dtype | None, device: torch.device) -> Tensor:
    norms = torch._foreach_norm(gradients, 2, dtype)
    if any(norm.device != device for norm in norms):
        norms = tuple(norm.to(device) for norm in norms)
    return torch.stack(norms).double().square().sum()
