"""Sums gradients over workers as messages of codecs, and keeps what codecs remember of each parameter.

The exchange of a bucket lives as long as the buckets are cut as they are. It runs on the sync lane that the bucket's
sum would have run on. A bucket of which nothing is compressed is added as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.group import Group
from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.compress import Coder, Exchange, PhaseTimer, Policy
from hybridpar.compress.codec import Full
from hybridpar.compress.coders import BucketExchange, ParameterCoders
from hybridpar.compress.nodes import NodeWorlds
from hybridpar.lanes.base import start_copy
from hybridpar.sync.buckets import Bucket
from hybridpar.sync.figures import BucketCost, SyncCosts

_log = logging.getLogger(__name__)

#: The norm of what was not sent takes a pass over it, so it is taken in the first step and then in each of so many.
RESIDUAL_EVERY = 50


class Decision:
    """A decision on a device, on its way to the host; made by work on a lane, where no event of lanes
    can be recorded.
    """

    def __init__(self, commit: Tensor) -> None:
        self._copy = start_copy(commit)
        self._copied: Any = None
        if commit.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @property
    def committed(self) -> bool:
        """Whether the step counts; reading it waits for the copy from the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._copy) > 0


class Compression(ParameterCoders):
    """Adds gradients over the workers as a codec's messages, and remembers what was not sent.

    The calls of a step: for each bucket, on its sync lane, `add` or those of `exchange`; then `settle`, when it is
    known whether the step counts, or `settle_later`, where that is left on the device, and then `catch_up` before the
    next step's first `add`.
    """

    def __init__(
        self,
        policy: Policy,
        world: World,
        groups: Sequence[Group],
        seed: int = 0,
        nodes: NodeWorlds | None = None,
    ) -> None:
        super().__init__(policy, world, seed, nodes, average=False)
        self._world = world
        self._groups = list(groups)
        self._buckets: tuple[Bucket, ...] = ()
        self._exchanges: dict[int, BucketExchange] = {}
        self._steps = 0
        #: Whether what was loaded last was restored.
        self.went_on = False
        self._undecided: tuple[Decision, list[str], SyncCosts | None] | None = None

    def cut(self, buckets: Sequence[Bucket]) -> None:
        """Follow how the buckets are cut; no step is under way. What is not float32 has no codec."""
        self.catch_up()
        self._buckets, self._exchanges = tuple(buckets), {}
        if self._on_one_node:
            return
        for bucket in buckets:
            if bucket.dtype == torch.float32:
                self._exchanges[bucket.index] = self.exchange_of(
                    [slot.name for slot in bucket.slots], [slot.parameter for slot in bucket.slots]
                )

    def exchange(self, bucket: Bucket) -> Exchange:
        """What sends a bucket whose gradients are encoded one by one."""
        return self._exchanges[bucket.index]

    def add(self, bucket: Bucket, flat: Tensor, group: Group) -> BucketCost:
        """Replace a bucket's gradients by what the workers make of their sum; equal bit for bit on all of them."""
        exchange = self._exchanges.get(bucket.index)
        if exchange is None:
            return add_plainly(bucket, flat, group)
        across, inside = (group, None) if self._nodes is None else self._nodes.groups(self._groups.index(group))
        timer = exchange.add(flat, across, inside)
        led = sum(coder.spec.count for coder in exchange.coders)
        return BucketCost(all_reduce_bytes(4 * led, self._party.size), exchange.traffic.wire, timer)

    def settle(self, committed: bool, unused: Collection[str] = (), costs: SyncCosts | None = None) -> None:
        """A step is over, in which all buckets were added."""
        for exchange in self._exchanges.values() if committed else ():
            exchange.commit(unused)
        if costs is not None and self._steps % RESIDUAL_EVERY == 0:
            for name, coder in self._coders.items():
                if coder.unsent:
                    costs.residuals[name] = coder.residual_squares()
        self._steps += 1

    def settle_later(self, commit: Tensor, unused: Collection[str] = (), costs: SyncCosts | None = None) -> None:
        """As `settle`, for a step whose decision, 0-d, the host has not read; by work on a lane.

        What a codec keeps is the host's to swap. It does so when the next step's first bucket is full: then the device
        has that step's forward pass to do, so that it does not wait for the host, which waits for it.
        """
        self._undecided = (Decision(commit), list(unused), costs)

    def catch_up(self) -> None:
        """Settle the step that `settle_later` was told of, if there is one."""
        if self._undecided is not None:
            (decision, unused, costs), self._undecided = self._undecided, None
            self.settle(decision.committed, unused, costs)

    def bytes_by_parameter(self) -> dict[str, tuple[str, int, int]]:
        """For each parameter the codec that it is sent as, and bytes of a step: as it is, and as that codec.

        What a worker sends to others, as `SyncFigures` counts it; with nodes what the leader of the parameter sends to
        other nodes, and a collective of the node. Warm-ups are over.
        """
        rows: dict[str, tuple[str, int, int]] = {}
        for bucket in self._buckets:
            for slot in bucket.slots:
                if bucket.index not in self._exchanges:
                    full = all_reduce_bytes(slot.parameter.numel() * slot.parameter.element_size(), self._world.size)
                    rows[slot.name] = ("none", full, full)
                elif slot.name in self._coders:
                    rows[slot.name] = self._row(self._coders[slot.name])
        if self._nodes is not None:
            for others in self._nodes.inside.gather(rows):
                assert isinstance(others, dict)
                rows |= others
        return rows

    def state_dict(self) -> dict[str, Any]:
        """What this worker needs to go on bit for bit: the policy, the codecs' state, and the worker's place."""
        self.catch_up()
        return super().state_dict()

    def _row(self, coder: Coder) -> tuple[str, int, int]:
        """What a parameter is sent as, and its bytes as it is and as that."""
        workers = self._party.size
        full = all_reduce_bytes(4 * coder.spec.count, workers)
        if _is_plain(coder):
            return "none", full, full
        rounds = coder.rounds
        return self.policy.text_of(coder.spec.name), full, sum(entry.sent(workers) for entry in rounds)

    @property
    def _on_one_node(self) -> bool:
        """Whether the workers are all on one of several nodes, where codecs are used between nodes alone."""
        return len(self._node_sizes) == 1

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; `settle_codecs` afterwards.

        What was kept before is forgotten, also where the state is empty, of another policy, or of another place, number
        of workers or nodes; and where all workers are on one of several nodes, which send nothing compressed.
        """
        self.catch_up()
        self.went_on = bool(state) and state["codec"] == str(self.policy) and self.fits(state) and not self._on_one_node
        self._load(state if self.went_on else {})
        self.cut(self._buckets)  # coders are made anew


def add_plainly(bucket: Bucket, flat: Tensor, group: Group) -> BucketCost:
    """Add a bucket's gradients as they are. On a GPU, where this may be part of a graph, no times are noted."""
    timer = PhaseTimer(flat.device) if flat.device.type == "cpu" else None
    group.all_reduce(flat)
    if timer is not None:
        timer.end("wire")
    sent = all_reduce_bytes(bucket.bytes, group.size)
    return BucketCost(sent, sent, timer)


def settle_codecs(codecs: Sequence[Compression], world: World, saved: Any) -> None:
    """Let all workers go on with what their codecs have loaded, or let all codecs begin anew; a collective.

    They begin anew, and rank 0 says so, where what was saved was of no use on any worker.
    """
    if not all(world.gather(all(codec.went_on for codec in codecs))):
        for codec in codecs:
            codec.load_state_dict({})
    if world.is_main and _holds_codec_state(saved) and not any(codec.went_on for codec in codecs):
        _log.warning("what codecs had not sent is dropped: workers, their layout or the codec are others now")


def _holds_codec_state(state: Any) -> bool:
    """Whether codecs kept something, in what an engine's `state_dict` returned."""
    if not isinstance(state, Mapping):
        return False
    if "parameters" in state and "codec" in state:
        return bool(state["parameters"])
    return any(map(_holds_codec_state, state.values()))


def _is_plain(coder: Coder) -> bool:
    """Whether a coder only adds float32."""
    return isinstance(coder, Full) and coder.spec.wire == torch.float32
