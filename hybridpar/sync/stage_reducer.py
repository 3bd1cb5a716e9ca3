"""Why: the gradients of a stage are computed on a lane, and only the host may issue their way over the wire.

A `StageReducer` divides the work of `GradientReducer`: hooks on the stage's lane gather full buckets and mark an event
for each, in order; the host has issued the sums beforehand, each behind its event. So a bucket leaves while the last
backward pass of its own stage still computes, and while other stages compute anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from hybridpar.comm.node_worlds import NodeWorlds
from hybridpar.comm.world import World
from hybridpar.compress import Policy
from hybridpar.lanes import Event, Lane, Lanes
from hybridpar.lanes.base import Work
from hybridpar.sync.buckets import Bucket
from hybridpar.sync.reducer import Flight, GradientReducer, SyncLanes


class StageReducer(GradientReducer):
    """Sums the gradients of one stage over its replicas.

    The calls of a step. The host: `new_flight`; when it issues the last backward pass, `marks`; then `issue` for each
    bucket. The stage's lane: `start`; around the last backward pass `begin_last` and `flush`.

    Args:
        parameters: The stage's parameters by name.
        replicas: The workers that hold the same stage, at least two.
        lanes: The lanes of this worker.
        compute: The stage's lane.
        bucket_bytes: Size at which a bucket is full.
        measure: Whether to take the sums of squares of the reduced gradients.
        sync_lanes: Lanes that all stages of the worker share.
        codec: See `GradientReducer`.
        seed: Likewise.
        nodes: Likewise.
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
        super().__init__(parameters, replicas, lanes, bucket_bytes, measure, sync_lanes, codec, seed, nodes)
        self._compute = compute
        self.follow_trainable()

    def marks(self, flight: Flight) -> list[Event]:
        """Events that the last backward pass will pass, one for each bucket."""
        flight.marks = [self._lanes.event() for _ in self.buckets]
        return flight.marks

    def begin_last(
        self, flight: Flight, on_ready: Callable[[int], None] | None = None, rate: float | None = None
    ) -> None:
        """On the stage's lane: the next backward pass is the last of the step.

        Args:
            flight: What is known about this step's gradients.
            on_ready: Called on the lane when a bucket is gathered, with its number.
            rate: Learning rate of the step, in any unit.
        """
        if self.compression is not None:
            self.compression.catch_up()
            if rate is not None:
                self.compression.set_rate(rate)
        flight.releasing = True
        flight.on_ready = on_ready

    def issue(self, index: int, flight: Flight, wrap: Callable[[Work], Work] | None = None) -> Event:
        """Issue the sum of a bucket; the event is passed when it is there.

        Args:
            index: The bucket.
            flight: What is known about this step's gradients.
            wrap: Makes the work that is issued from the work that sums.
        """
        return self._send(self.buckets[index], flight, flight.marks[index], wrap)

    def is_due(self) -> bool:
        """Whether the buckets must be cut anew before the next step."""
        return not self.is_cut() or (bool(self.buckets) and self._steps > 0 and self._observed is not None)

    def rebuild_buckets(self) -> None:
        """After the first step, with all lanes idle: rebuild the buckets in the order in which gradients came."""
        self.close_step()
        self.follow_trainable()

    def _launch(self, bucket: Bucket, flight: Flight) -> None:
        self._refuse_sparse(bucket)
        flight.flats.append(bucket.collect())
        if flight.on_ready is not None:
            flight.on_ready(bucket.index)
        self._compute.mark(flight.marks[bucket.index])
