"""Gradients of workers on one machine, handed over through memory that all share.

Each worker copies a gradient there as soon as autograd has made it. When all workers have done so, each adds all
gradients in the optimizer's one pass. Only one message per step is needed. The sum is in the order of the ranks, so all
workers get the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.group import Group
from hybridpar.comm.shared_memory import SharedSegment
from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.compress import Phase, PhaseTimer
from hybridpar.lanes import Lane, Lanes
from hybridpar.lanes.base import Work
from hybridpar.sync.buckets import Bucket, Slot, sum_of_squares
from hybridpar.sync.direct_reducer import DirectReducer
from hybridpar.sync.figures import BucketCost
from hybridpar.sync.kernels import hand_over
from hybridpar.sync.pieces import Sgd
from hybridpar.sync.reducer import Flight, SyncLanes

#: Slots begin at whole cache lines.
_ALIGN = 64

#: A larger sum of squares counts as not finite: below it, the sum of all workers' gradients cannot overflow.
_MOST_SQUARES = 1e70


class SharedReducer(DirectReducer):
    """Sums gradients over the workers of one machine, piece by piece, when the optimizer asks for them."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        replicas: World,
        lanes: Lanes,
        compute: Lane,
        measure: bool,
        sync_lanes: SyncLanes,
        *,
        exact: bool,
    ) -> None:
        self._squares = torch.zeros(len(parameters), dtype=torch.float64)
        # One end of a step is told and awaited for each step that handed gradients over, and no other: a stage that is
        # frozen has none, and what is told must never pile up or be read in the place of something else.
        self._is_handing = False  # gradients of this step are there, or will be
        self._awaits_end = False  # other workers may still read those of the step before
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, parameter in parameters.items():
            size = parameter.numel() * parameter.element_size()
            places[name] = end, size
            end += -(-size // _ALIGN) * _ALIGN
        count = max(end, _ALIGN) * replicas.size
        me = replicas.rank, replicas.size
        self._segment = SharedSegment(*me, replicas.gather, replicas.timeout, count, replicas.wait_on)
        slots = self._segment.view(torch.uint8).view(replicas.size, -1)
        self._slots = {
            name: [slot[start : start + size].view(parameters[name].dtype) for slot in slots]
            for name, (start, size) in places.items()
        }
        own = (parts[replicas.rank] for parts in self._slots.values())
        self._own = dict(zip(self._slots, zip(own, self._squares, strict=True), strict=True))
        super().__init__(parameters, replicas, lanes, compute, 1 << 62, measure, sync_lanes[:1], exact=exact)
        self._observed = None  # the order of gradients makes no difference

    def start(self, flight: Flight) -> None:
        """Forget the gradients of the step before, and expect those of the next."""
        super().start(flight)
        self._squares.zero_()

    def is_due(self) -> bool:
        """Whether the parameters that are trained have changed."""
        return not self.is_cut()

    def close_step(self) -> None:
        """After the step was applied or rolled back: the gradients of this step are needed no more."""
        super().close_step()
        if self._is_handing:
            self._is_handing, self._awaits_end = False, True
            with suppress(RuntimeError):  # a worker that has left after its last step needs not know
                self._segment.ring("ending a step")

    def _take(self, bucket: Bucket, slot: Slot, gradient: Tensor | None) -> None:
        self._is_handing = True
        if self._awaits_end:
            self._awaits_end = False
            with self._world.named_errors("waiting for the end of the last step"):
                self._segment.wait("waiting for the end of the last step")
        out, squares = self._own[slot.name]
        if gradient is None:
            out.zero_()
        else:
            hand_over(gradient, out, squares)

    def _work(self, bucket: Bucket, flight: Flight, lane: Lane, group: Group) -> Work:
        # Buckets, one for each type of parameters, leave together, with the last one.
        is_last = bucket is self.buckets[-1]

        def meet() -> None:
            timer = PhaseTimer(torch.device("cpu"))
            lane.keep(flight.squares)
            if is_last:
                self._segment.ring("handing over gradients")
                self._segment.wait("handing over gradients")
                if self._exact:
                    flight.squares[bucket.index] = self._share_of_squares()
                elif self._measure:
                    flight.squares[bucket.index] = self._own_squares()
            timer.end(Phase.WIRE)
            sent = all_reduce_bytes(bucket.bytes, self._world.size)
            flight.costs.buckets[bucket.index] = BucketCost(sent, sent, timer)

        return meet

    def _own_squares(self) -> Tensor:
        """Sum of the squares of this worker's own gradients, 0-d float64: infinite where sums could overflow."""
        total = self._squares.sum()
        if not bool(torch.isfinite(total)):
            own = [slots[self._world.rank] for name, slots in self._slots.items() if name in self._places]
            total = torch.stack([sum_of_squares(one) for one in own]).sum()
        return total if float(total) < _MOST_SQUARES else total * float("inf")

    def _share_of_squares(self) -> Tensor:
        """This worker's part of the squared norm of all sums: that of every K-th parameter."""
        slots = sorted(
            (slot for bucket in self.buckets for slot in bucket.slots), key=lambda slot: slot.parameter.numel()
        )
        own = [self._squares_of(slot) for slot in slots[self._world.rank :: self._world.size]]
        return torch.stack(own).sum() if own else torch.zeros((), dtype=torch.float64)

    def _add(self, name: str, start: int, out: Tensor) -> None:
        first, second, *others = self._slots[name]
        place = slice(start, start + out.numel())
        torch.add(first[place], second[place], out=out)
        for other in others:
            out.add_(other[place])

    def _sgd(self, name: str, momentum: Tensor | None, options: Sgd, factor: float, squares: Tensor) -> bool:
        return self._sgd_of_sum(name, momentum, options, factor, squares, *self._slots[name])

    # ------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The order of parameters, which makes no difference here."""
        return {"order": list(self._order), "settled": False}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is no state to restore."""

    def close(self) -> None:
        """Remove all hooks and let go of the memory."""
        super().close()
        self._slots, self._own = {}, {}
        self._segment.close()
