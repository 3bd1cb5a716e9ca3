"""Gradients that are encoded in the hook and decoded in the optimizer's pass.

For codecs whose step is one message (`Codec.one_message`). A gradient is encoded while it is in the cache, and dropped;
a sync lane has nothing to do but to exchange messages; and SGD reads signs and levels as they came, so that the sum of
`onebit` is never written to memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hybridpar.comm.transport import flat_view
from hybridpar.comm.world import SumGroup, World
from hybridpar.compress import Policy
from hybridpar.lanes import Lane, Lanes
from hybridpar.lanes.base import Work
from hybridpar.sync.buckets import Bucket, Slot
from hybridpar.sync.direct_reducer import DirectReducer
from hybridpar.sync.kernels import functions, step_sgd_of_signs
from hybridpar.sync.pieces import Sgd
from hybridpar.sync.reducer import Flight, SyncLanes


class CodedReducer(DirectReducer):
    """Sums gradients over the workers as messages of a codec, which the optimizer decodes.

    Args:
        parameters: The model's parameters by name, in its order, float32, equal on all workers.
        replicas: The workers that hold the same stage, at least two.
        lanes: The lanes of this worker.
        compute: The stage's lane; `lanes.caller` where the host runs the passes itself.
        bucket_bytes: Size at which a bucket is full.
        measure: Whether to find out if gradients are finite.
        sync_lanes: Lanes to exchange messages on, each with its group.
        codec: What gradients are sent as, a `Policy.in_one_message` or its text.
        seed: Of what the codec draws at random; equal on all replicas.
        exact: The norm is needed before the optimizer steps; else only whether gradients are finite.

    Raises:
        SyncError: The workers share memory, where only sums can be taken.
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
        *,
        codec: str | Policy,
        seed: int,
        exact: bool,
    ) -> None:
        self._opened = False  # the step, for gradients
        functions()  # so that no step waits for a compiler
        place = (parameters, replicas, lanes, compute, bucket_bytes, measure, sync_lanes)
        super().__init__(*place, codec, seed, exact=exact)

    @staticmethod
    def fits(parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether gradients of these parameters can be encoded: they are dense float32.

        Args:
            parameters: By name.
        """
        return DirectReducer.fits(parameters) and all(one.dtype == torch.float32 for one in parameters.values())

    def start(self, flight: Flight) -> None:
        """Forget the gradients of the step before, and expect those of the next."""
        super().start(flight)
        self._opened = False

    def piece(self, parameter: nn.Parameter) -> int:
        """A message is decoded as a whole."""
        return max(parameter.numel(), 1)

    def _take(self, bucket: Bucket, slot: Slot, gradient: Tensor | None) -> None:
        assert self.compression is not None
        if not self._opened:
            self.compression.open()
            self._opened = True
        began = time.perf_counter()
        self.compression.take(bucket, slot, torch.zeros(slot.parameter.numel()) if gradient is None else gradient)
        bucket.encode_ms += (time.perf_counter() - began) * 1e3

    def _work(self, bucket: Bucket, flight: Flight, lane: Lane, group: SumGroup) -> Work:
        compression = self.compression
        assert compression is not None
        mine = self._measure and bucket.index % self._world.size == self._world.rank

        def exchange() -> None:
            lane.keep(flight.squares)
            encode_ms, bucket.encode_ms = bucket.encode_ms, 0.0
            flight.costs.buckets[bucket.index] = compression.carry(bucket, group, encode_ms)
            if mine and self._exact:
                flight.squares[bucket.index] = torch.stack([self._squares_of(slot) for slot in bucket.slots]).sum()
            elif mine:
                flight.squares[bucket.index] = 0.0 if compression.is_finite(bucket) else float("inf")

        return exchange

    def _add(self, name: str, start: int, out: Tensor) -> None:
        assert self.compression is not None
        self.compression.finish(name, out)

    def _sgd(self, name: str, momentum: Tensor | None, options: Sgd, factor: float, squares: Tensor) -> bool:
        assert self.compression is not None
        full = self.compression.full_of(name)
        if full is not None:
            return self._sgd_of_sum(name, momentum, options, factor, squares, full)
        signs = self.compression.signs_of(name)
        whole = flat_view(self._parameters[name])
        return signs is not None and step_sgd_of_signs(whole, momentum, signs, factor, options, squares)
