"""Gradients that are encoded in the hook and decoded in the optimizer's pass.

For codecs that take gradients at once (`Codec.at_once`). A gradient is encoded while it is in the cache, and dropped; a
sync lane has little to do but to exchange messages; and SGD reads what came, signs and levels or two factors, so that
the sums of `onebit` and `powersgd` are never written to memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hybridpar.comm.group import Group
from hybridpar.comm.transport import flat_view
from hybridpar.compress.coders import has_rows
from hybridpar.lanes import Lane
from hybridpar.lanes.base import Work
from hybridpar.sync.buckets import Bucket, Slot
from hybridpar.sync.direct_reducer import DirectReducer
from hybridpar.sync.kernels import step_sgd_of_product, step_sgd_of_signs
from hybridpar.sync.pieces import Sgd
from hybridpar.sync.reducer import Flight


class CodedReducer(DirectReducer):
    """Sums gradients over the workers as messages of a codec, which the optimizer decodes.

    Its arguments are those of `DirectReducer`, with float32 parameters and a policy that takes gradients `at_once`.
    """

    _opened = False  # the step, for gradients

    @staticmethod
    def fits(parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether gradients of these parameters can be encoded: they are dense float32, row after row."""
        plain = all(one.dtype == torch.float32 and has_rows(one) for one in parameters.values())
        return plain and DirectReducer.fits(parameters)

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
        if gradient is None:
            gradient = slot.parameter.new_zeros(slot.parameter.numel())
        self.compression.take(bucket, slot, gradient)
        bucket.encode_ms += (time.perf_counter() - began) * 1e3

    def _work(self, bucket: Bucket, flight: Flight, lane: Lane, group: Group) -> Work:
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
        whole = flat_view(self._parameters[name])
        found = self.compression.product_of(name)
        if found is not None:
            return step_sgd_of_product(whole, momentum, *found, factor, options, squares)
        signs = self.compression.signs_of(name)
        return signs is not None and step_sgd_of_signs(whole, momentum, signs, factor, options, squares)
