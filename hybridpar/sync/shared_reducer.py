"""Gradients of workers on one machine, summed where the optimizer uses them.

Each worker copies a gradient into memory that all share as soon as autograd has made it, while it is in the cache, and
drops it, so that the next one takes the same memory. When all workers have done so, each adds all gradients piece by
piece, and steps the optimizer on each piece. No sum is ever written to memory, and only one message per step is needed.

The sum is in the order of the ranks, so all workers get the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.shared_memory import SharedSegment
from hybridpar.comm.transport import flat_view, is_dense
from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.compress import Phase, PhaseTimer
from hybridpar.errors import SyncError
from hybridpar.lanes import Lane, Lanes
from hybridpar.sync.buckets import Bucket, Slot, sum_of_squares
from hybridpar.sync.figures import BucketCost
from hybridpar.sync.kernels import functions, hand_over, step_sgd
from hybridpar.sync.pieces import PIECE, Sgd
from hybridpar.sync.reducer import Flight, GradientReducer, SyncLanes

#: Slots begin at whole cache lines.
_ALIGN = 64

#: A larger sum of squares counts as not finite: below it, the sum of all workers' gradients cannot overflow.
_MOST_SQUARES = 1e70


class SharedReducer(GradientReducer):
    """Sums gradients over the workers of one machine, piece by piece, when the optimizer asks for them.

    It has the calls of `GradientReducer` in a step, and those of `hybridpar.sync.pieces.Pieces`: after the agreement on
    the step, `read` adds up a piece, or `materialise` writes all sums to `.grad`.

    Args:
        parameters: The model's parameters by name, in its order, equal on all workers.
        replicas: The workers, on one machine.
        lanes: The lanes of this worker.
        compute: `lanes.caller`: the host runs the passes.
        measure: Whether to find out if gradients are finite.
        sync_lanes: The first of these lanes waits for the other workers.
        clips: The norm is needed before the optimizer steps.

    Raises:
        OSError: There is not enough shared memory.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        replicas: World,
        lanes: Lanes,
        compute: Lane,
        measure: bool,
        sync_lanes: SyncLanes,
        *,
        clips: bool,
    ) -> None:
        self._clips = clips
        self._factor: Tensor | None = None
        self._unused: frozenset[str] = frozenset()
        self._squares = torch.zeros(len(parameters), dtype=torch.float64)
        self._unread = False  # by other workers, as far as this one knows
        self._owner = {id(parameter): name for name, parameter in parameters.items()}
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, parameter in parameters.items():
            size = parameter.numel() * parameter.element_size()
            places[name] = end, size
            end += -(-size // _ALIGN) * _ALIGN
        self._segment = SharedSegment(
            replicas.rank, replicas.size, replicas.gather, replicas.timeout, max(end, _ALIGN) * replicas.size
        )
        slots = self._segment.view(torch.uint8).view(replicas.size, -1)
        self._slots = {
            name: [slot[start : start + size].view(parameters[name].dtype) for slot in slots]
            for name, (start, size) in places.items()
        }
        self._bytes_apart = slots.shape[1]
        self._own = {
            name: (parts[replicas.rank], self._squares[index])
            for index, (name, parts) in enumerate(self._slots.items())
        }
        functions()  # so that no step waits for a compiler
        super().__init__(parameters, replicas, lanes, compute, 1 << 62, measure, sync_lanes)
        self._observed = None  # the order of gradients makes no difference

    @staticmethod
    def fits(parameters: Mapping[str, nn.Parameter], replicas: World) -> bool:
        """Whether these workers can hand over these gradients so.

        Args:
            parameters: By name.
            replicas: The workers.
        """
        dense = all(one.is_floating_point() and is_dense(one) for one in parameters.values())
        return dense and replicas.transport == "shared memory"

    # ------------------------------------------------------------------ a step

    def start(self, flight: Flight) -> None:
        """Forget the gradients of the step before, and expect those of the next."""
        super().start(flight)
        self._squares.zero_()
        self._factor, self._unused = None, frozenset()

    def gradient_ready(self, name: str) -> None:
        """Called by autograd when a parameter's gradient has been accumulated: hand it over, and drop it."""
        flight = self._flight
        if flight is None or name not in self._places:
            return
        _, slot = self._places[name]
        slot.seen = flight.number
        if flight.releasing:
            self._note_ready(slot, flight)
            self._take(slot)

    def flush(self) -> list[bool]:
        """After the last backward pass: hand over what is left, with zeros for parameters that were not used here."""
        flight = self._flight
        assert flight is not None
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        for slot in slots:
            if slot.ready != flight.number:
                self._take(slot)
        if self.unmeasured:
            flight.squares[0] = self._own_squares()
        for bucket in self.buckets:
            if flight.on_ready is not None:
                flight.on_ready(bucket.index)
        with self._lanes.on_behalf():
            self._meet(flight)
        return [slot.seen == flight.number for slot in slots]

    def is_due(self) -> bool:
        """Whether the parameters that are trained have changed."""
        return not self.is_cut()

    def keep_used(self, users: Tensor, used: list[bool]) -> list[str]:
        """Leave out parameters used on no worker; return their names."""
        if all(used):
            return []
        names = [slot.name for bucket in self.buckets for slot in bucket.slots]
        self._unused = frozenset(name for name, count in zip(names, users.tolist(), strict=True) if count == 0)
        return sorted(self._unused)

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a factor, 0-d, when they are read."""
        self._factor = factor

    def close_step(self) -> None:
        """After the step was applied or rolled back: the gradients of this step are needed no more."""
        super().close_step()
        with suppress(RuntimeError):  # a worker that has left after its last step needs not know
            self._segment.ring("ending a step")

    # ------------------------------------------------------------------ pieces

    def parameters(self) -> Sequence[nn.Parameter]:
        """Those that have a gradient in this step."""
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        return [slot.parameter for slot in slots if slot.name not in self._unused]

    def read(self, parameter: nn.Parameter, start: int, out: Tensor) -> None:
        """Add up a piece of a parameter's gradients.

        Args:
            parameter: One of `parameters`.
            start: Its first element, in memory order.
            out: 1-D, of the parameter's type; as many elements as are wanted.
        """
        first, second, *others = self._slots[self._owner[id(parameter)]]
        place = slice(start, start + out.numel())
        torch.add(first[place], second[place], out=out)
        for other in others:
            out.add_(other[place])
        if self._factor is not None:
            out.mul_(self._factor.to(out.dtype))

    def sgd(self, parameter: nn.Parameter, momentum: Tensor | None, options: Sgd, squares: Tensor) -> bool:
        """Take a step of SGD on the sum in one pass, where there is a kernel for it.

        Args:
            parameter: One of `parameters`.
            momentum: Its momentum, 1-D in memory order.
            options: Of the step.
            squares: One element, float64; replaced by the sum of the squares of the sum.

        Returns:
            Whether that was done; else nothing was changed.
        """
        first = self._slots[self._owner[id(parameter)]][0]
        apart, factor = self._bytes_apart, 1.0 if self._factor is None else float(self._factor)
        rest = step_sgd(flat_view(parameter), momentum, first, apart, self._world.size, factor, options, squares)
        if rest is None:
            return False
        if rest < parameter.numel():  # elements that fill no vector
            whole = flat_view(parameter)[rest:]
            gradient = torch.empty_like(whole)
            self.read(parameter, rest, gradient)
            squares += torch.dot(gradient, gradient)
            options.step(whole, gradient, None if momentum is None else momentum[rest:])
        return True

    @property
    def unmeasured(self) -> bool:
        """Whether the norm of the sums is wanted and not known yet."""
        return self._measure and not self._clips

    def materialise(self) -> Tensor | None:
        """Write all sums to `.grad`.

        Returns:
            The sum of their squares, 0-d float64, where it was `unmeasured`.
        """
        squares = []
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.grad = torch.empty_like(parameter)
                self.read(parameter, 0, flat_view(parameter.grad))
                if self.unmeasured:
                    squares.append(sum_of_squares(flat_view(parameter.grad)))
        self._factor = None
        return torch.stack(squares).sum() if squares else None

    def first_bad(self) -> str | None:
        """Name of the first parameter, in the model's order, whose gradient is not finite."""
        for name, parameter in self._parameters.items():
            if name in self._places and not bool(torch.isfinite(self._sum(parameter)).all()):
                return name
        return None

    # ----------------------------------------------------------------- sending

    def _take(self, slot: Slot) -> None:
        """Copy a gradient to where all workers see it, and drop it."""
        if self._unread:
            self._unread = False
            with self._world.named_errors("waiting for the end of the last step"):
                self._segment.wait("waiting for the end of the last step")
        parameter, (out, squares) = slot.parameter, self._own[slot.name]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            out.zero_()
            return
        if gradient.is_sparse:
            raise SyncError(
                f"the gradient of {slot.name!r} is sparse",
                "Gradients are sent as dense tensors.",
                "Build the layer with sparse=False.",
            )
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        hand_over(flat_view(gradient), out, squares)

    def _own_squares(self) -> Tensor:
        """Sum of the squares of this worker's own gradients, 0-d float64: infinite where sums could overflow."""
        total = self._squares.sum()
        if not bool(torch.isfinite(total)):
            own = [slots[self._world.rank] for name, slots in self._slots.items() if name in self._places]
            total = torch.stack([sum_of_squares(one) for one in own]).sum()
        return total if float(total) < _MOST_SQUARES else total * float("inf")

    def _meet(self, flight: Flight) -> None:
        """Have a lane wait until all workers have handed over their gradients."""
        lane, _ = self._sync_lanes[0]
        self._check_peers(lane, flight)
        lane.wait(self._lanes.caller.record())
        for bucket in self.buckets:
            work = self._meeting(bucket, flight)
            lane.submit(flight.wrap(bucket.index, work) if flight.wrap is not None else work)
            flight.landed.append(lane.record())
        self._unread = True

    def _meeting(self, bucket: Bucket, flight: Flight) -> Any:
        def meet() -> None:
            timer = PhaseTimer(torch.device("cpu"))
            if bucket.index == 0:
                self._segment.ring("handing over gradients")
                self._segment.wait("handing over gradients")
                if self._clips:
                    flight.squares[0] = self._share_of_squares()
            timer.end(Phase.WIRE)
            sent = all_reduce_bytes(bucket.bytes, self._world.size)
            flight.costs.buckets[bucket.index] = BucketCost(sent, sent, timer)

        return meet

    def _share_of_squares(self) -> Tensor:
        """This worker's part of the squared norm of all sums: that of every K-th piece."""
        total = torch.zeros((), dtype=torch.float64)
        number = 0
        for bucket in self.buckets:
            for slot in bucket.slots:
                count = slot.parameter.numel()
                for start in range(0, count, PIECE):
                    if number % self._world.size == self._world.rank:
                        piece = torch.empty(min(PIECE, count - start), dtype=slot.parameter.dtype)
                        self.read(slot.parameter, start, piece)
                        total += sum_of_squares(piece)
                    number += 1
        return total

    def _sum(self, parameter: nn.Parameter) -> Tensor:
        whole = torch.empty(parameter.numel(), dtype=parameter.dtype)
        self.read(parameter, 0, whole)
        return whole

    # ------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The order of parameters, which makes no difference here."""
        return {"order": list(self._order), "settled": False}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is no state to restore."""

    def close(self) -> None:
        """Remove all hooks and let go of the memory."""
        super().close()
        self._slots = {}
        self._segment.close()
