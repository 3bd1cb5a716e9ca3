"""Exchange of parameters whose messages have their own scales and cannot be summed in transit: stripe by stripe, or all
to all.

With `shard`, each worker owns 1/K of the tensor (Seide et al. 2014, section 3). Each worker encodes its gradient stripe
by stripe and sends stripe k to its owner; the owner decodes what it gets, adds in float32, encodes the sum, and sends
that to all. All workers decode the same bytes, so all have the same result. There are two quantisations and two
residuals: the worker's, as large as the tensor, and the owner's, as large as its stripe.

With `gather`, each worker sends its whole message to all others, which decode and add in float32. For two workers that
is as many bytes, but one quantisation instead of two, one residual and one collective.

What differs between codecs is a `Quantiser`: how a range of numbers becomes bytes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import Coder, Collective, Round, TensorSpec
from hybridpar.compress.memory import OWNER, WORKER, Memory, Scratch
from hybridpar.compress.packing import aligned
from hybridpar.compress.received import Decoded, Messages, Received

#: How messages of a quantiser are exchanged: by what sends fewer bytes, stripe by stripe, or all to all.
Meet = Literal["auto", "shard", "gather"]


class Compiled:
    """Beside `Codec` a base of codecs that have kernels, see `hybridpar.compress.kernels`."""

    def prepare(self, device: torch.device) -> bool:
        """Build or load them."""
        return kernels.table(device) is not None


class Quantiser(ABC):
    """Turns stripes of one parameter into bytes and back. Stripes are ranges of the first dimension of `view`."""

    #: Stripes begin at multiples of this, along the first dimension of `view`.
    unit = 1
    #: Whether anything is left out.
    lossy = True
    #: Whether `begin` starts draws.
    draws = False

    def begin(self, step: int) -> None:  # noqa: B027 - most draw nothing
        """Start the draws of a step.

        Args:
            step: Its number, from which they follow.
        """

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's flat tensor in the shape in which it is cut into stripes; no copy. Here as it is.

        Args:
            flat: 1-D, of the parameter's elements in memory order.
        """
        return flat

    @abstractmethod
    def size(self, shape: Sequence[int]) -> int:
        """Bytes of an encoded stripe, before alignment.

        Args:
            shape: Of the stripe in `view`.
        """

    @abstractmethod
    def encode(self, values: Tensor, memory: Memory, out: Tensor, scratch: Scratch) -> None:
        """Encode a stripe.

        Args:
            values: The gradient, or a sum; it is not changed.
            memory: Gives v, and is left as v - C(v) where it keeps anything.
            out: 1-D uint8 of `size` elements, beginning at a multiple of 8 bytes.
            scratch: Memory to borrow.
        """

    @abstractmethod
    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        """Decode a stripe.

        Args:
            message: What `encode` wrote, 1-D uint8.
            out: C(v) / divisor goes here, or is added to what is here; of the stripe's shape.
            scratch: Memory to borrow.
            divisor: At least 1.
            add: Whether it is added.
        """

    def received(self, coder: Coder, messages: Messages) -> Received:
        """What came of a step, where an optimizer can read messages as they are; here they must be decoded.

        Args:
            coder: Of the parameter.
            messages: What was received.
        """
        return Decoded(coder)


class Plain(Quantiser):
    """Stripes in full precision, cut as those of another quantiser."""

    lossy = False

    def __init__(self, other: Quantiser | None = None) -> None:
        self._other = other

    def view(self, flat: Tensor) -> Tensor:
        return flat if self._other is None else self._other.view(flat)

    def size(self, shape: Sequence[int]) -> int:
        return 4 * math.prod(shape)

    def encode(self, values: Tensor, memory: Memory, out: Tensor, scratch: Scratch) -> None:
        """Nothing is left out, so nothing is left."""
        out.view(torch.float32).view(values.shape).copy_(values)

    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        put(message.view(torch.float32).view(out.shape) / divisor, out, add=add)


def put(values: Tensor, out: Tensor, *, add: bool) -> None:
    """Copy decoded values to where they go, or add them to what is there."""
    if add:
        out.add_(values)
    else:
        out.copy_(values)


def cut_stripes(length: int, unit: int, workers: int) -> list[tuple[int, int]]:
    """Cut a length into one stripe per worker, at multiples of a unit; the first ones take what is left over.

    The rule of CNTK's aggregator: stripe k has floor(n / K) units and one more where k < n mod K. It may be empty.
    """
    units = -(-length // unit)
    ends = [(units // workers * k + min(k, units % workers)) * unit for k in range(workers + 1)]
    return [(min(start, length), min(stop, length)) for start, stop in pairwise(ends)]


class QuantisedCoder(Coder):
    """Exchanges one parameter through a quantiser.

    Args:
        spec: The parameter.
        quantiser: How a stripe becomes bytes.
        meet: How messages are exchanged.
    """

    def __init__(self, spec: TensorSpec, quantiser: Quantiser, meet: Meet) -> None:
        #: How a stripe, and the sum of a stripe, becomes bytes.
        self.quantiser = quantiser
        gather = meet == "gather" or (meet == "auto" and spec.workers <= 2)
        layout = quantiser.view(torch.empty(spec.count, device="meta"))
        self._shape = layout.shape
        row = layout[0].numel()
        self._stripes = cut_stripes(len(layout), quantiser.unit, 1 if gather else spec.workers)
        self._ranges = [range(start * row, stop * row) for start, stop in self._stripes]
        self._shapes = [(stop - start, *layout.shape[1:]) for start, stop in self._stripes]
        self._sizes = [quantiser.size(shape) if shape[0] else 0 for shape in self._shapes]
        collective = Collective.GATHER if gather else Collective.SHARD
        super().__init__(spec, [Round(collective, torch.uint8, tuple(map(aligned, self._sizes)))])
        if quantiser.lossy:
            self.residuals[WORKER] = range(spec.count)
            if not gather:
                self.residuals[OWNER] = self._ranges[spec.rank]
        self._total = torch.empty(0 if gather else self._shapes[spec.rank], dtype=torch.float32, device=spec.device)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        memory, values = self.memory[WORKER], self.gradient.view(self._shape)
        if self.quantiser.draws:
            self.quantiser.begin(self.steps)
        for (start, stop), part, size, out in zip(self._stripes, self._ranges, self._sizes, parts, strict=True):
            if size:
                mine = memory if len(parts) == 1 else memory.part(part.start, part.stop)
                self.quantiser.encode(values[start:stop], mine, out[:size], self.scratch)
                out[size:].zero_()

    def merge(self, index: int, received: Sequence[Tensor], out: Tensor) -> None:
        size = self._sizes[self.spec.rank]
        if not size:
            return
        self._total.zero_()
        for message in received:
            self.quantiser.read(message[:size], self._total, self.scratch, 1, add=True)
        self._process(self._total.view(-1))
        self.quantiser.encode(self._total, self.memory[OWNER], out[:size], self.scratch)
        out[size:].zero_()

    def _process(self, total: Tensor) -> None:
        """What the owner of a stripe does to the sum, 1-D, before it is sent; nothing here."""

    def by_stripe(self) -> Messages:
        """What came of the step."""
        stripes = list(zip(self._stripes, self._sizes, strict=True))
        if self.rounds[0].collective is Collective.GATHER:
            ((start, stop), size), *_ = stripes
            return [(start, stop, [message[:size] for message in self.messages])]
        received = zip(stripes, self.messages, strict=True)
        return [(start, stop, [message[:size]]) for ((start, stop), size), message in received if size]

    def received(self) -> Received:
        return self.quantiser.received(self, self.by_stripe())

    def finish(self, out: Tensor) -> None:
        """Messages are added by rank, so that all workers get the same bits."""
        shaped, divisor = out.view(self._shape), self.spec.divisor
        for start, stop, messages in self.by_stripe():
            for number, message in enumerate(messages):
                self.quantiser.read(message, shaped[start:stop], self.scratch, divisor, add=number > 0)
