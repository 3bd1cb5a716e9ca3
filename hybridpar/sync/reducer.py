"""Sums gradients over replicas in buckets, while the backward pass still computes.

Hooks fire as autograd accumulates each gradient. In the last micro-batch each hands its gradient to the `Meeting` of
its bucket; when the last one of a bucket has arrived, the bucket is sent on a sync lane. Buckets are sent in index
order, so that every lane's group sees the same sums in the same order on every worker.

Only the host thread issues work. Where the host itself runs the backward pass (a model that is not cut), the hook sends
the bucket. Where a lane runs it (a stage of a pipeline), the host has issued all sums beforehand, each behind an event
that the hook marks when the bucket is gathered.

Bucket order: first the reverse of the order in which modules hold parameters, then, re-made once after step 1, the
order that rank 0 observed (Li et al. 2020, "PyTorch Distributed", section 3.2.3).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hybridpar.comm.transport import flat_view, is_dense
from hybridpar.comm.world import World
from hybridpar.compress.coders import has_rows
from hybridpar.compress.nodes import NodeWorlds
from hybridpar.compress.received import functions
from hybridpar.errors import SyncError
from hybridpar.lanes import Event, Lane, Lanes
from hybridpar.sync.buckets import Bucket, Slot, layout_fingerprint, make_buckets
from hybridpar.sync.compression import Compression, add_plainly
from hybridpar.sync.meetings import EncodedMeeting, FlatMeeting, Meeting, SharedGradients, SharedMeeting
from hybridpar.sync.pieces import Gradients
from hybridpar.sync.stage_gradients import StageGradients, StepGradients, SyncLanes, SyncOptions

_log = logging.getLogger(__name__)


class Reducer(StageGradients):
    """Sums the gradients of a stage over its replicas, bucket by bucket, as they become ready.

    Before a step the host calls `rebuild_buckets` where it `is_due`.

    `measure` says whether the norm of the sums is wanted, `exact` whether it is wanted before the optimizer steps; else
    it is enough to know that the sums are finite.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        replicas: World,
        lanes: Lanes,
        compute: Lane,
        sync_lanes: SyncLanes,
        options: SyncOptions,
        *,
        measure: bool,
        exact: bool = True,
        nodes: NodeWorlds | None = None,
    ) -> None:
        super().__init__(parameters, compute, measure=measure)
        self._world = replicas
        self._lanes = lanes
        self._inline = compute is lanes.caller  # the host runs the passes, and hooks send the buckets
        self._sync_lanes = sync_lanes
        self._options = options
        self._shared: SharedGradients | None = None
        self._encodes = False
        self._choose_meetings(nodes)
        #: Whether gradients are taken in the hook, and stay unwritten until the optimizer reads them.
        self.takes = self._shared is not None or self._encodes
        if self.takes:
            functions(coded=self._encodes)  # so that no step waits for a compiler
        self._exact = exact or not self.takes
        self._order = list(parameters)[::-1]
        # With all gradients in shared memory, their order makes no difference.
        self._observed: list[str] | None = [] if self._shared is None else None
        self._loaded_at = 0  # the step after which a state was loaded
        self._trainable: list[bool] = []
        self._meetings: list[Meeting] = []
        self._slots: dict[str, tuple[Meeting, int, Slot]] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        # Hooks must not keep the reducer alive, nor outlive it.
        weakref.finalize(self, _remove, self._hooks)
        self.follow_trainable()

    def _choose_meetings(self, nodes: NodeWorlds | None) -> None:
        """Decide how all buckets meet, from the options, the device and the parameters."""
        options, parameters = self._options, self._parameters.values()
        in_hook = self._compute.device.type == "cpu" and not options.delayed  # the gradient is in the cache there
        in_hook = in_hook and all(parameter.is_floating_point() and is_dense(parameter) for parameter in parameters)
        if not options.policy.changes_nothing:
            groups = [group for _, group in self._sync_lanes]
            self.compression = Compression(options.policy, self._world, groups, options.seed, nodes)
            fits = all(parameter.dtype == torch.float32 and has_rows(parameter) for parameter in parameters)
            self._encodes = in_hook and fits and nodes is None and options.policy.at_once
        elif in_hook and self._world.transport == "shared memory":
            try:
                self._shared = SharedGradients(self._parameters, self._world)
            except OSError as error:  # on all workers
                if self._world.is_main:
                    _log.warning("no memory for all gradients that workers share (%s): they are added in parts", error)
            else:
                self._sync_lanes = self._sync_lanes[:1]

    def _meeting_of(self, bucket: Bucket) -> Meeting:
        if self._shared is not None:
            return SharedMeeting(bucket, self._shared)
        if self.compression is None:
            return FlatMeeting(bucket, add_plainly)
        if self._encodes:
            return EncodedMeeting(bucket, self.compression.exchange)
        return FlatMeeting(bucket, self.compression.add)

    # ------------------------------------------------------------------ a step

    def start(self, step: StepGradients) -> None:
        """Forget the gradients of the step before, and expect those of the next in every bucket."""
        super().start(step)
        for bucket, meeting in zip(self.buckets, self._meetings, strict=True):
            bucket.pending, meeting.memory = len(bucket.slots), ()

    def marks(self, step: StepGradients) -> list[Event]:
        """Events that the last backward pass will pass, one per bucket; none where its hooks send the buckets."""
        if not self._inline:
            step.marks = [self._lanes.event() for _ in self.buckets]
        return step.marks

    def begin_last(self, step: StepGradients) -> None:
        """On the stage's lane: the next backward pass is the last of the step, so full buckets are sent from now on."""
        if self.compression is not None and (self._encodes or not self._inline):
            self.compression.catch_up()
        for meeting in self._meetings:
            meeting.open()
        step.releasing = True

    def issue(self, index: int, step: StepGradients) -> Event:
        """Issue the sum of a bucket, where the hooks have not."""
        return step.landed[index] if self._inline else self._send(index, step, step.marks[index])

    def flush(self) -> list[bool]:
        """After the last backward pass: send what is left, with zeros for parameters that were not used here."""
        step = self._step
        assert step is not None
        used = []
        for bucket in self.buckets:
            for slot in bucket.slots:
                used.append(slot.seen == step.number)
                if slot.ready != step.number:
                    self.gradient_ready(slot.name)
        return used

    def measure(self, step: StepGradients) -> None:
        """Nothing: the lanes that sum the buckets have taken their norms."""

    def finish(self, users: Tensor | None, used: Sequence[bool] | None) -> list[str]:
        """When a step has been decided: leave out parameters used on no worker, which are named."""
        for meeting in self._meetings:
            if meeting.memory:
                self._compute.keep(*meeting.memory)
        unused: list[str] = []
        if users is not None and used is not None and not all(used):
            names = [slot.name for bucket in self.buckets for slot in bucket.slots]
            unused = [name for name, count in zip(names, users.tolist(), strict=True) if count == 0]
        for name in unused:
            self._parameters[name].grad = None
        if self.takes:
            received = {
                slot.parameter: received
                for meeting in self._meetings
                for slot, received in zip(meeting.bucket.slots, meeting.received, strict=True)
                if slot.name not in unused
            }
            self.unwritten = Gradients(received, unmeasured=self._measure and not self._exact)
        return unused

    def close_step(self) -> None:
        """After the step was applied or rolled back: backward passes until the next step are not the reducer's."""
        super().close_step()
        if self._shared is not None:
            self._shared.end_step()

    # ----------------------------------------------------------------- sending

    def gradient_ready(self, name: str, _: Tensor | None = None) -> None:
        """Called by autograd when a parameter's gradient has been accumulated, and by `flush` for those it left out."""
        step = self._step
        if step is None or name not in self._slots:
            return
        meeting, index, slot = self._slots[name]
        slot.seen = step.number
        if not step.releasing:
            return
        if slot.ready == step.number:
            raise SyncError(
                f"the gradient of {name!r} arrived twice in one backward pass",
                "It is sent at the first arrival, so a second one would be lost.",
                "Use non-reentrant activation checkpointing, and call backward once per micro-batch.",
            )
        slot.ready = step.number
        if self._observed is not None:
            self._observed.append(name)
        parameter, gradient = slot.parameter, slot.parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise sparse_gradient(name)
        if meeting.drops:
            parameter.grad = None
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            elif gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)
            meeting.take(index, gradient.view(-1) if gradient.is_contiguous() else flat_view(gradient))
        meeting.bucket.pending -= 1
        if meeting.bucket.pending == 0:
            self._send_full_buckets(step)

    def _send_full_buckets(self, step: StepGradients) -> None:
        while step.next_bucket < len(self.buckets) and self.buckets[step.next_bucket].pending <= 0:
            index = step.next_bucket
            self._meetings[index].gather()
            if step.on_ready is not None:
                step.on_ready(index)
            if self._inline:
                if self.compression is not None:  # before the event: it may leave work of its own on this lane
                    self.compression.catch_up()
                with self._lanes.on_behalf():
                    self._send(index, step, self._lanes.caller.record())
            else:
                self._compute.mark(step.marks[index])
            step.next_bucket += 1

    def _send(self, index: int, step: StepGradients, ready: Event) -> Event:
        """Issue the sum of a bucket that is gathered when `ready` is passed; the returned event is passed after it."""
        lane, group = self._sync_lanes[index % len(self._sync_lanes)]
        self._wait_for_peers(lane, step)
        meeting = self._meetings[index]

        def meet() -> None:
            lane.keep(step.squares, *meeting.memory)
            step.costs.buckets[index] = meeting.meet(group)
            squares = meeting.squares(self._world, exact=self._exact) if self._measure else None
            if squares is not None:
                step.squares[index] = squares

        lane.wait(ready)
        lane.submit(meet if step.run_sum is None else partial(step.run_sum, index, meet))
        landed = lane.record()
        step.landed.append(landed)
        return landed

    def _wait_for_peers(self, lane: Lane, step: StepGradients) -> None:
        """Before a bucket, wait until it is known that all workers cut the same ones; on a GPU that would stall it.

        A collective whose sizes differ between workers does not fail in an orderly way: gloo aborts the process.
        """
        if step.reported is not None and self._world.device.type == "cpu":
            lane.wait(step.reported)

    # ------------------------------------------------------------------ layout

    def is_due(self) -> bool:
        """Whether the buckets must be rebuilt before the next step."""
        return not self.is_cut() or (bool(self.buckets) and self._has_observed)

    def rebuild_buckets(self) -> None:
        """With all lanes idle: rebuild the buckets for the parameters that are trained now.

        After the first step, in the order in which gradients were computed.
        """
        self._step = None
        if self._has_observed:
            arrived = set(self._observed or ())
            order = [*(self._observed or ()), *(name for name in self._order if name not in arrived)]
            orders: list[Any] = self._world.gather(order)
            self._order = orders[0]
            self._observed, self._trainable = None, []
        self.follow_trainable()

    @property
    def _has_observed(self) -> bool:
        """Whether an order is to be agreed on; it is also where this worker had no sample, and saw none."""
        return self._observed is not None and self._steps > self._loaded_at

    def is_cut(self) -> bool:
        """Whether the buckets still fit: no parameter was frozen or thawed since they were cut."""
        return self._trainable == [parameter.requires_grad for parameter in self._parameters.values()]

    def follow_trainable(self) -> None:
        """Cut the buckets anew where parameters were frozen or thawed since the last step."""
        if self.is_cut():
            return
        self._trainable = [parameter.requires_grad for parameter in self._parameters.values()]
        order = [(name, self._parameters[name]) for name in self._order if self._parameters[name].requires_grad]
        self.buckets = make_buckets(order, self._options.bucket_bytes if self._shared is None else 1 << 62)
        self.layout = layout_fingerprint(self.buckets)
        if self.compression is not None:
            self.compression.cut(self.buckets)
        self._meetings = [self._meeting_of(bucket) for bucket in self.buckets]
        self._slots = {
            slot.name: (meeting, index, slot)
            for meeting in self._meetings
            for index, slot in enumerate(meeting.bucket.slots)
        }
        for name, parameter in order:
            if name not in self._hooks:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks[name] = register(partial(Reducer.gradient_ready, weakref.proxy(self), name))

    def bytes_by_parameter(self) -> dict[str, tuple[str, int, int]]:
        """Codec, bytes as it is and bytes sent of each parameter's gradient; empty where no codec is used."""
        self.follow_trainable()
        return {} if self.compression is None else self.compression.bytes_by_parameter()

    # ------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The agreed order, by parameter name, so that a resumed run adds in the same order; and what codecs keep.

        A collective, with all lanes idle: the order of the first step is agreed on before.
        """
        if self._shared is not None:  # the order makes no difference
            return {"order": list(self._order), "settled": False}
        if self.is_due():
            self.rebuild_buckets()
        state: dict[str, Any] = {"order": list(self._order), "settled": self._observed is None}
        return state if self.compression is None else {**state, "codec": self.compression.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the order and what codecs keep, where names fit; otherwise both begin anew, as without entries."""
        if self._shared is not None:
            return
        fits = sorted(state.get("order", ())) == sorted(self._parameters)
        self._order = list(state["order"]) if fits else list(self._parameters)[::-1]
        self._observed = None if fits and state["settled"] else []
        self._trainable, self._loaded_at = [], self._steps
        if self.compression is not None:
            self.compression.load_state_dict(state.get("codec", {}) if fits else {})

    def close(self) -> None:
        """Remove all hooks. Gradients stay as they are."""
        _remove(self._hooks)
        if self._shared is not None:
            self._meetings, self._slots, self.unwritten = [], {}, None
            self._shared.close()


def sparse_gradient(name: str) -> SyncError:
    """The error of a gradient that is sparse."""
    return SyncError(
        f"the gradient of {name!r} is sparse",
        "Gradients are sent as dense tensors.",
        "Build the layer with sparse=False.",
    )


def _remove(hooks: dict[str, RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()
