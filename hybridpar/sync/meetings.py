"""What becomes of the gradients of one bucket: the ways in which workers add them.

- `SharedMeeting`: workers of one machine hand gradients over through memory that all share;
- `EncodedMeeting`: a codec encodes each gradient in the hook, and the optimizer decodes what came;
- `FlatMeeting`: gradients are brought together in one flat tensor, which is added as it is, by a codec, or by a codec
  between nodes.

The first two take a gradient as soon as autograd has made it, while it is in the cache, and drop it, so that the next
one takes the same memory. Their sums are written to memory only where somebody needs that (`hybridpar.sync.pieces`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from hybridpar.comm.connections import Connected, connect
from hybridpar.comm.group import Group
from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.compress import Exchange, PhaseTimer
from hybridpar.compress.received import Received, Sum, hand_over
from hybridpar.sync.buckets import Bucket, sum_of_squares
from hybridpar.sync.figures import BucketCost
from hybridpar.sync.pieces import PIECE

#: Slots of shared memory begin at whole cache lines.
_ALIGN = 64


class Meeting(ABC):
    """Adds the gradients of one bucket over the workers.

    The calls of a step: `open`; `take` for each gradient, in the hook; `gather` when all are taken; `meet`, on a sync
    lane; then `received` and `squares` are there. What codecs remember is committed for all buckets together, if
    the step counts.

    Args:
        bucket: The parameters whose gradients are added.
    """

    #: Whether `take` is done with a gradient, so that `.grad` can be dropped.
    drops = True
    #: What a sync lane works on, of other lanes.
    memory: Sequence[Tensor] = ()
    #: What came of each parameter's gradients, once the bucket has met; nothing where the sums are in `.grad`.
    received: Sequence[Received] = ()

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def open(self) -> None:  # noqa: B027 - most have nothing to prepare
        """The gradients of a step are about to be taken."""

    def take(self, index: int, gradient: Tensor) -> None:  # noqa: B027 - those that leave it in `.grad` are given none
        """Take a parameter's gradient, in the hook that autograd calls.

        Args:
            index: Index of the parameter in the bucket.
            gradient: 1-D in memory order.
        """

    def gather(self) -> None:  # noqa: B027 - most have nothing to bring together
        """All gradients were taken: bring them together."""

    @abstractmethod
    def meet(self, group: Group) -> BucketCost:
        """Exchange what was taken with the other workers, on a sync lane.

        Args:
            group: The workers.
        """

    def squares(self, world: World, *, exact: bool) -> Tensor | float | None:
        """This worker's part of the sum of squares of the sums; not finite exactly where an element is not.

        None where the bucket is another worker's to measure.

        Args:
            world: The workers.
            exact: Whether the sum is wanted; else 0 or infinity is enough.
        """
        if self.bucket.index % world.size != world.rank:
            return None
        if not exact:
            for received in self.received:
                if not received.is_finite():
                    return float("inf")
            return 0.0
        slots = zip(self.received, self.bucket.slots, strict=True)
        return torch.stack([_squares_of(received, slot.parameter) for received, slot in slots]).sum()


class FlatMeeting(Meeting):
    """Gradients in one flat tensor, which `add` replaces by the sum; until all are there they stay in `.grad`.

    Then each `.grad` is a view of the tensor.
    """

    drops = False

    def __init__(self, bucket: Bucket, add: Callable[[Bucket, Tensor, Group], BucketCost]) -> None:
        super().__init__(bucket)
        self._add = add

    def gather(self) -> None:
        self.memory = (self.bucket.collect(),)

    def meet(self, group: Group) -> BucketCost:
        return self._add(self.bucket, self.memory[0], group)

    def squares(self, world: World, *, exact: bool) -> Tensor | float | None:
        return sum_of_squares(self.memory[0]) if self.bucket.index % world.size == world.rank else None


class EncodedMeeting(Meeting):
    """Gradients as messages of codecs that take them at once (`Codec.at_once`)."""

    def __init__(self, bucket: Bucket, exchange_of: Callable[[Bucket], Exchange]) -> None:
        super().__init__(bucket)
        self._exchange_of = exchange_of
        self._exchange: Exchange
        self._wire, self._encode_ms = 0, 0.0

    def open(self) -> None:
        # It is another where codecs were loaded, or begin anew.
        self._exchange = self._exchange_of(self.bucket)
        self._wire = self._exchange.open().wire

    def take(self, index: int, gradient: Tensor) -> None:
        began = time.perf_counter()
        self._exchange.take(index, gradient)
        self._encode_ms += (time.perf_counter() - began) * 1e3

    def meet(self, group: Group) -> BucketCost:
        encode_ms, self._encode_ms = self._encode_ms, 0.0
        timer = self._exchange.carry(group, encode_ms)
        self.received = self._exchange.received
        return BucketCost(all_reduce_bytes(self.bucket.bytes, group.size), self._wire, timer)


class SharedGradients:
    """Memory that all workers of a machine share, with room for all their gradients.

    It is an OSError, on all of them, where they cannot be connected for it.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for name, parameter in parameters.items():
            size = parameter.numel() * parameter.element_size()
            offsets[name] = end, size
            end += -(-size // _ALIGN) * _ALIGN
        party, count = [range(world.size)], max(end, _ALIGN)
        (segment,) = connect(
            Connected, world.rank, party, world.gather, world.timeout, world.wait_on, memory_bytes=count
        )
        assert segment is not None
        self._segment = segment
        rows = self._segment.view(torch.uint8).view(world.size, -1)
        #: By parameter the gradient of each worker, by rank.
        self.slots = {
            name: [row[start : start + size].view(parameters[name].dtype) for row in rows]
            for name, (start, size) in offsets.items()
        }
        self.world = world
        # The end of a step is reported and awaited for each step that handed gradients over, and no other: a stage that
        # is frozen has none, and what is reported must never pile up or be read in the place of something else.
        self._is_handing = False  # gradients of this step are there, or will be
        self._awaits_end = False  # other workers may still read those of the step before

    def begin_handing(self) -> None:
        """Wait until nobody reads the gradients of the step before."""
        self._is_handing = True
        if self._awaits_end:
            self._awaits_end = False
            with self.world.named_errors("waiting for the end of the last step"):
                self._segment.wait()

    def meet(self) -> None:
        """Wait until all workers have handed over a bucket's gradients."""
        self._segment.ring()
        self._segment.wait()

    def end_step(self) -> None:
        """The gradients of this step are needed no more."""
        if self._is_handing:
            self._is_handing, self._awaits_end = False, True
            with suppress(RuntimeError):  # a worker that has left after its last step needs not know
                self._segment.ring()

    def close(self) -> None:
        """Let go of the memory."""
        self.slots = {}
        self._segment.close()


class SharedMeeting(Meeting):
    """Gradients that each worker copies to shared memory; the optimizer adds those of all workers in its one pass.

    The sum is in the order of the ranks, so all workers get the same bits.
    """

    def __init__(self, bucket: Bucket, shared: SharedGradients) -> None:
        super().__init__(bucket)
        self._shared = shared
        self._sent = all_reduce_bytes(bucket.bytes, shared.world.size)
        self._terms = [shared.slots[slot.name] for slot in bucket.slots]
        self._mine = [terms[shared.world.rank] for terms in self._terms]
        self.received = [Sum(terms) for terms in self._terms]
        self._squares = torch.zeros(len(bucket.slots), dtype=torch.float64)
        # Below this sum of squares the sum of all workers' gradients cannot overflow.
        self._safe_squares = min(torch.finfo(bucket.dtype).max / shared.world.size, 1e150) ** 2
        self._into = self._squares.unbind()

    def take(self, index: int, gradient: Tensor) -> None:
        self._shared.begin_handing()
        hand_over(gradient, self._mine[index], self._into[index])

    def meet(self, group: Group) -> BucketCost:
        timer = PhaseTimer(torch.device("cpu"))
        self._shared.meet()
        timer.end("wire")
        return BucketCost(self._sent, self._sent, timer)

    def squares(self, world: World, *, exact: bool) -> Tensor | float | None:
        """With `exact` those of the sums of every K-th parameter; else of this worker's gradients 0 or infinity."""
        if exact:
            order = sorted(range(len(self._terms)), key=lambda index: self._terms[index][0].numel())
            mine = [
                _squares_of(self.received[index], self.bucket.slots[index].parameter)
                for index in order[world.rank :: world.size]
            ]
            return torch.stack(mine).sum() if mine else 0.0
        if float(self._squares.sum()) < self._safe_squares:
            return 0.0
        for received, mine in zip(self.received, self._mine, strict=True):  # only the sums themselves tell
            out = torch.empty_like(mine)
            received.write(out)
            if not bool(torch.isfinite(out).all()):
                return float("inf")
        return 0.0


def _squares_of(received: Received, parameter: nn.Parameter) -> Tensor:
    """Sum of the squares of a parameter's sum, 0-d float64."""
    count = parameter.numel()
    size = PIECE * torch.get_num_threads() if received.in_pieces else max(count, 1)
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, count, size):
        piece = torch.empty(min(size, count - start), dtype=parameter.dtype)
        received.write(piece, start)
        total += sum_of_squares(piece)
    return total
