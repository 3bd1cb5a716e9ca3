"""Why: a gradient should be on its way while the gradients of earlier layers are still being computed.

Hooks fire as autograd accumulates each gradient. When the last gradient of a bucket arrives in the last micro-batch,
the bucket leaves on a sync lane. Buckets leave in index order, so that every lane's group sees the same sums in the
same order on every worker.

Bucket order: first the reverse of the order in which modules hold parameters, then, re-made once after step 1, the
order that rank 0 observed (Li et al. 2020, "PyTorch Distributed", section 3.2.3).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hybridpar.comm.collective import SumGroup
from hybridpar.comm.node_worlds import NodeWorlds
from hybridpar.comm.world import World
from hybridpar.compress import Policy
from hybridpar.errors import SyncError
from hybridpar.lanes import Event, Lane, Lanes
from hybridpar.lanes.base import Work
from hybridpar.sync.buckets import Bucket, Slot, layout_fingerprint, make_buckets
from hybridpar.sync.compression import add_plainly, make_compression
from hybridpar.sync.control import Pending, check_layout
from hybridpar.sync.figures import SyncCosts


@dataclass
class Flight:
    """What is known about the gradients of one step."""

    number: int  # of the step, from 1
    squares: Tensor  # per bucket, float64; only the share of this worker is filled in
    releasing: bool = False  # the last backward pass runs, so full buckets may leave
    checked: set[Lane] = field(default_factory=set)
    landed: list[Event] = field(default_factory=list)
    next_bucket: int = 0
    costs: SyncCosts = field(default_factory=SyncCosts)  # by bucket, written by the sync lanes
    report: Pending | None = None  # the forward report, in which workers compare their layouts
    flats: list[Tensor] = field(default_factory=list)  # gathered buckets, by index
    marks: list[Event] = field(default_factory=list)  # where another lane gathers them: passed when each is gathered
    on_ready: Callable[[int], None] | None = None  # told of each, on that lane


SyncLanes = Sequence[tuple[Lane, SumGroup]]


def open_sync_lanes(world: World, lanes: Lanes, spared: int = 0) -> SyncLanes:
    """One lane for each of the world's groups that add gradients.

    Args:
        world: The workers.
        lanes: Where to open the lanes.
        spared: Groups that are left for other uses; the last ones.
    """
    groups = world.lane_sums[: len(world.lane_sums) - spared]
    return [(lanes.open(f"sync-{index}", priority=-1), group) for index, group in enumerate(groups)]


class GradientReducer:
    """Sums gradients over the workers, bucket by bucket, as they become ready.

    The calls of a step: `open`; backward passes; before the last one `release`; after it `flush` and `wait`.

    Args:
        parameters: The model's parameters by name, in the model's order, equal on all workers.
        world: The workers, at least two.
        lanes: Where to open sync lanes.
        bucket_bytes: Size at which a bucket is full.
        measure: Whether to take the sums of squares of the reduced gradients.
        sync_lanes: Lanes that are open already, each with what adds on it; None opens one for each of the world's.
        codec: What gradients travel as, a policy or its text; `none` adds them as they are.
        seed: For what the codec draws at random; equal on all workers.
        nodes: Where the codec is used between nodes alone, and gradients are added in full precision inside of them.

    Raises:
        UsageError: There is no such codec, or it has no such option.
        SyncError: A codec is asked for between workers that meet in shared memory.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        world: World,
        lanes: Lanes,
        bucket_bytes: int,
        measure: bool,
        sync_lanes: SyncLanes | None = None,
        codec: str | Policy = "none",
        seed: int = 0,
        nodes: NodeWorlds | None = None,
    ) -> None:
        self._parameters = parameters
        self._world = world
        self._lanes = lanes
        self._measure = measure
        self._bucket_bytes = bucket_bytes
        self._sync_lanes = open_sync_lanes(world, lanes) if sync_lanes is None else sync_lanes
        self.compression = make_compression(codec, world, [group for _, group in self._sync_lanes], seed, nodes)
        self._order: list[str] = list(parameters)[::-1]
        self._observed: list[str] | None = []
        self._trainable: tuple[bool, ...] = ()
        self._places: dict[str, tuple[Bucket, Slot]] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._steps = 0
        self._flight: Flight | None = None
        self.buckets: list[Bucket] = []
        #: Fingerprint of the buckets, to be compared between workers.
        self.layout = 0

    # ------------------------------------------------------------------ a step

    def open(self) -> None:
        """Start a step; gradients of the step before are forgotten."""
        self.follow_trainable()
        self.start(self.new_flight())

    def set_rate(self, rate: float) -> None:
        """Say which learning rate the step uses, in any unit."""
        if self.compression is not None:
            self.compression.set_rate(rate)

    def new_flight(self) -> Flight:
        """What will be known about the gradients of the next step."""
        self._steps += 1
        squares = torch.zeros(len(self.buckets), dtype=torch.float64, device=self._world.device)
        return Flight(self._steps, squares)

    def start(self, flight: Flight) -> None:
        """Forget the gradients of the step before, and expect those of the next."""
        for parameter in self._parameters.values():
            parameter.grad = None
        for bucket in self.buckets:
            bucket.pending = len(bucket.slots)
        self._flight = flight

    def release(self, report: Pending) -> None:
        """The next backward pass is the last of the step: full buckets leave.

        Args:
            report: The forward report on its way, in which workers compare `layout`.
        """
        assert self._flight is not None
        self._flight.report = report
        self._flight.releasing = True

    def flush(self) -> list[bool]:
        """After the last backward pass: send what is left, with zeros for parameters that were not used here.

        Returns:
            For each parameter, in the order of the buckets, whether it was used on this worker.
        """
        flight = self._flight
        assert flight is not None
        used = [slot.seen == flight.number for bucket in self.buckets for slot in bucket.slots]
        for bucket in self.buckets[flight.next_bucket :]:
            bucket.pending = 0
        self._launch_full_buckets(flight)
        return used

    def wait(self) -> tuple[Tensor, int]:
        """Make the caller's lane wait until all buckets are reduced.

        Returns:
            Sums of squares per bucket (0 where another worker takes them), and the bytes sent.

        Raises:
            SyncError: A worker died, did not answer in time, or cut other buckets than this one.
        """
        flight = self._flight
        assert flight is not None
        with self._world.named_errors("reducing gradients"):
            for event in flight.landed:
                self._lanes.caller.wait(event)
        return flight.squares, flight.costs.sent

    def close_step(self) -> None:
        """End the step; after the first one, cut the buckets by the order in which gradients really came."""
        self._flight = None
        if self._observed:
            self._adopt_observed_order(self._observed)

    def keep_used(self, users: Tensor, used: list[bool]) -> list[str]:
        """Give parameters used on no worker `.grad` None, so that the optimizer skips them.

        Args:
            users: Number of workers that used each parameter, in the order of the buckets.
            used: What `flush` returned; where this worker used everything there is nothing to look up.

        Returns:
            Their names.
        """
        if all(used):
            return []
        names = [slot.name for bucket in self.buckets for slot in bucket.slots]
        unused = [name for name, count in zip(names, users.tolist(), strict=True) if count == 0]
        for name in unused:
            self._parameters[name].grad = None
        return unused

    def scale(self, factor: Tensor) -> None:
        """Multiply all reduced gradients by a 0-d factor, in place."""
        for bucket in self.buckets:
            flat = bucket.flat()
            flat.mul_(factor.to(flat.dtype))

    @property
    def costs(self) -> SyncCosts:
        """What is known of the sync of the step under way."""
        assert self._flight is not None
        return self._flight.costs

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
        if slot.ready == flight.number:
            raise SyncError(
                f"the gradient of {name!r} arrived twice in one backward pass",
                "A bucket leaves at the first arrival, so a second one would be lost.",
                "Use non-reentrant activation checkpointing, and call backward once per micro-batch.",
            )
        slot.ready = flight.number
        if self._observed is not None:
            self._observed.append(name)
        bucket.pending -= 1
        if bucket.pending == 0:
            self._launch_full_buckets(flight)

    def _launch_full_buckets(self, flight: Flight) -> None:
        while flight.next_bucket < len(self.buckets) and self.buckets[flight.next_bucket].pending <= 0:
            self._launch(self.buckets[flight.next_bucket], flight)
            flight.next_bucket += 1

    def _launch(self, bucket: Bucket, flight: Flight) -> None:
        """A bucket is full, and all before it have left."""
        self._refuse_sparse(bucket)
        flight.flats.append(bucket.collect())
        if self.compression is not None:  # before the mark: it may leave work of its own on this lane
            self.compression.catch_up()
        with self._lanes.on_behalf():
            self._send(bucket, flight, self._lanes.caller.record())

    def _refuse_sparse(self, bucket: Bucket) -> None:
        if any(slot.parameter.grad is not None and slot.parameter.grad.is_sparse for slot in bucket.slots):
            raise SyncError(
                f"a gradient among {[slot.name for slot in bucket.slots]} is sparse",
                "Gradients travel dense.",
                "Build the layer with sparse=False.",
            )

    def _send(self, bucket: Bucket, flight: Flight, ready: Event, wrap: Callable[[Work], Work] | None = None) -> Event:
        """Issue the sum of a bucket that is gathered when an event is passed.

        Args:
            bucket: The bucket.
            flight: What is known about this step's gradients.
            ready: Passed when the bucket is gathered.
            wrap: Makes the work that is issued from the work that sums.
        """
        lane, group = self._sync_lanes[bucket.index % len(self._sync_lanes)]
        self._check_peers(lane, flight)
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

        lane.wait(ready)
        lane.submit(wrap(reduce) if wrap is not None else reduce)
        landed = lane.record()
        flight.landed.append(landed)
        return landed

    def _check_peers(self, lane: Lane, flight: Flight) -> None:
        """Before a lane's first bucket, let it see that all workers cut the same buckets.

        A collective whose sizes differ between workers does not fail in an orderly way: gloo aborts the process.
        """
        if lane in flight.checked:
            return
        flight.checked.add(lane)
        pending, size = flight.report, self._world.size
        if pending is not None and pending.event is not None and self._world.device.type == "cpu":
            report = pending.message
            lane.wait(pending.event)
            lane.submit(lambda: check_layout(report, size), uses=(report,))

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
        """See `Compression.bytes_by_parameter`; empty where gradients are added as they are."""
        self.follow_trainable()
        return {} if self.compression is None else self.compression.bytes_by_parameter()

    def state_dict(self) -> dict[str, Any]:
        """The agreed order, by parameter name, so that a resumed run adds in the same order; and what codecs keep."""
        state: dict[str, Any] = {"order": list(self._order), "settled": self._observed is None}
        return state if self.compression is None else {**state, "codec": self.compression.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the order and what codecs keep, where names fit; otherwise both begin anew, as without entries."""
        fits = sorted(state.get("order", ())) == sorted(self._parameters)
        self._order = list(state["order"]) if fits else list(self._parameters)[::-1]
        self._observed = None if self._world.size == 1 or (fits and state["settled"]) else []
        self._trainable = ()
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


def sum_of_squares(flat: Tensor) -> Tensor:
    """Sum of squares of a 1-D tensor, 0-d float64; not finite exactly where an element is not.

    One pass at the speed of memory in float32. Where that overflows, as it does from a norm of 1.8e19 on, the sum is
    taken again in float64; on a GPU it stays infinite, because asking would stall it.
    """
    values = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    total = torch.dot(values, values).double()
    if flat.device.type == "cpu" and not math.isfinite(total.item()):
        total = torch.linalg.vector_norm(values, dtype=torch.float64).square()
    return total
