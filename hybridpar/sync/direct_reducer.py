"""Gradients that are taken in the hook, and summed where the optimizer uses them.

`DirectReducer` takes a gradient as soon as autograd has made it, while it is in the cache, and drops it, so that the
next one takes the same memory. Once the workers have agreed on the step, the optimizer asks for the sums, piece by
piece (`hybridpar.sync.pieces`). No sum is ever written to memory.

How a gradient is taken, sent and added is a subclass's: through memory that workers of one machine share
(`hybridpar.sync.shared_reducer`), or as messages of a codec (`hybridpar.sync.coded_reducer`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hybridpar.comm.transport import flat_view, is_dense
from hybridpar.comm.world import World
from hybridpar.compress import Policy
from hybridpar.lanes import Lane, Lanes
from hybridpar.sync.buckets import Bucket, Slot, sum_of_squares
from hybridpar.sync.kernels import functions, step_sgd
from hybridpar.sync.pieces import PIECE, Sgd
from hybridpar.sync.reducer import Flight, GradientReducer, SyncLanes


class DirectReducer(GradientReducer):
    """Base of reducers that take gradients in the hook and give sums to the optimizer.

    It has the calls of `GradientReducer` in a step, and those of `hybridpar.sync.pieces.Pieces` after the agreement.
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
        *,
        exact: bool,
    ) -> None:
        functions()  # so that no step waits for a compiler
        self._exact = exact
        self._factor: Tensor | None = None
        self._unused: frozenset[str] = frozenset()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        super().__init__(parameters, replicas, lanes, compute, bucket_bytes, measure, sync_lanes, codec, seed)

    @staticmethod
    def fits(parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether gradients of these parameters can be taken so."""
        return all(one.is_floating_point() and is_dense(one) for one in parameters.values())

    # ------------------------------------------------------------------ a step

    def start(self, flight: Flight) -> None:
        """Forget the gradients of the step before, and expect those of the next."""
        super().start(flight)
        self._factor, self._unused = None, frozenset()

    def _collect(self, bucket: Bucket, flight: Flight) -> None:
        """Gradients were taken one by one."""

    def flush(self) -> list[bool]:
        """After the last backward pass: take and send what is left, zeros for parameters that were not used here."""
        flight = self._flight
        assert flight is not None
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.ready != flight.number:
                    self._arrived(bucket, slot)
        return super().flush()

    def _arrived(self, bucket: Bucket, slot: Slot) -> None:
        """A gradient is complete: take it, and drop it."""
        self._refuse_sparse((slot,))
        parameter = slot.parameter
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        self._take(bucket, slot, None if gradient is None else flat_view(gradient))

    def keep_used(self, users: Tensor, used: list[bool]) -> list[str]:
        """Leave out parameters used on no worker; return their names."""
        unused = super().keep_used(users, used)
        self._unused = frozenset(unused)
        return unused

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a factor, 0-d, when they are read."""
        self._factor = factor

    # ------------------------------------------------------------------ pieces

    def parameters(self) -> Sequence[nn.Parameter]:
        """Those that have a gradient in this step."""
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        return [slot.parameter for slot in slots if slot.name not in self._unused]

    def piece(self, parameter: nn.Parameter) -> int:
        """Elements that are best read at a time."""
        return PIECE * torch.get_num_threads()

    def read(self, parameter: nn.Parameter, start: int, out: Tensor) -> None:
        """Add up a piece of a parameter's gradients."""
        self._add(self._names[id(parameter)], start, out)
        if self._factor is not None:
            out.mul_(self._factor.to(out.dtype))

    def sgd(self, parameter: nn.Parameter, momentum: Tensor | None, options: Sgd, squares: Tensor) -> bool:
        """Take a step of SGD on the sum in one pass, where there is a kernel for it."""
        factor = 1.0 if self._factor is None else float(self._factor)
        return self._sgd(self._names[id(parameter)], momentum, options, factor, squares)

    @property
    def unmeasured(self) -> bool:
        """Whether the norm of the sums is wanted and not known yet."""
        return self._measure and not self._exact

    def materialise(self) -> Tensor | None:
        """Write all sums to `.grad`."""
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
            if name in self._places:
                whole = torch.empty(parameter.numel(), dtype=parameter.dtype)
                self._add(name, 0, whole)
                if not bool(torch.isfinite(whole).all()):
                    return name
        return None

    def _squares_of(self, slot: Slot) -> Tensor:
        """Sum of the squares of a parameter's sum, 0-d float64."""
        count, size = slot.parameter.numel(), self.piece(slot.parameter)
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, count, size):
            piece = torch.empty(min(size, count - start), dtype=slot.parameter.dtype)
            self._add(slot.name, start, piece)
            total += sum_of_squares(piece)
        return total

    def _sgd_of_sum(
        self, name: str, momentum: Tensor | None, options: Sgd, factor: float, squares: Tensor, *given: Tensor
    ) -> bool:
        """As `_sgd`, where the sum is that of some tensors, which are as far from each other in memory as the next."""
        whole = flat_view(self._parameters[name])
        apart = given[1].data_ptr() - given[0].data_ptr() if len(given) > 1 else 0
        done = step_sgd(whole, momentum, given[0], apart, len(given), factor, options, squares)
        if done is None:
            return False
        if done < whole.numel():  # elements that fill no vector
            rest = torch.empty_like(whole)
            self._add(name, 0, rest)
            rest = rest[done:].mul_(factor)
            squares += torch.dot(rest, rest)
            options.step(whole[done:], rest, None if momentum is None else momentum[done:])
        return True

    # ----------------------------------------------------------- of subclasses

    @abstractmethod
    def _take(self, bucket: Bucket, slot: Slot, gradient: Tensor | None) -> None:
        """Take a gradient, 1-D in memory order; zeros for None."""

    @abstractmethod
    def _add(self, name: str, start: int, out: Tensor) -> None:
        """As `read`, without the factor."""

    @abstractmethod
    def _sgd(self, name: str, momentum: Tensor | None, options: Sgd, factor: float, squares: Tensor) -> bool:
        """As `sgd`, with `factor` times the sum."""
