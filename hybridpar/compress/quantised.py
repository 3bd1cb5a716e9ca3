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

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hybridpar.compress.codec import NO_RESIDUAL, WORKER, Coder, Collective, Residual, Round, Scratch, TensorSpec
from hybridpar.compress.noise import Noise, NoisyCoder
from hybridpar.compress.packing import aligned
from hybridpar.compress.received import Received
from hybridpar.errors import check_choice

#: Key of the residual of what this worker, as owner of a stripe, does not send on.
OWNER = "owner"

#: Ranges of `Quantiser.view`, each with the messages whose sum it is.
Messages = list[tuple[int, int, list[Tensor]]]


class Quantiser(ABC):
    """Turns stripes of one parameter into bytes and back. Stripes are ranges of the first dimension of `view`."""

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's flat tensor in the shape in which it is cut into stripes; no copy. Here as it is.

        Args:
            flat: 1-D, of the parameter's elements in memory order.
        """
        return flat

    @property
    def unit(self) -> int:
        """Stripes begin at multiples of this, along the first dimension of `view`."""
        return 1

    @abstractmethod
    def size(self, shape: Sequence[int]) -> int:
        """Bytes of an encoded stripe, before alignment.

        Args:
            shape: Of the stripe in `view`.
        """

    @abstractmethod
    def encode(self, values: Tensor, residual: Residual, out: Tensor, scratch: Scratch) -> None:
        """Encode a stripe.

        Args:
            values: What to add the residual to; it is not changed.
            residual: Gives v, and is left as v - C(v) where it keeps anything.
            out: 1-D uint8 of `size` elements, beginning at a multiple of 8 bytes.
            scratch: Memory to borrow.
        """

    @abstractmethod
    def read(self, message: Tensor, out: Tensor, scratch: Scratch, divisor: int, *, add: bool) -> None:
        """Decode a stripe.

        Args:
            message: What `encode` wrote, 1-D uint8.
            out: C(v) / divisor goes here, or is added to what is here; of the stripe's shape and any stride.
            scratch: Memory to borrow.
            divisor: At least 1.
            add: Whether it is added.
        """

    def received(self, plain: Received, messages: Messages) -> Received:
        """What came of a step, where an optimizer can read messages as they are; here they must be decoded.

        Args:
            plain: What decodes the messages.
            messages: What was received.
        """
        return plain

    def decode(self, message: Tensor, out: Tensor, divisor: int, scratch: Scratch) -> None:
        """Set out = C(v) / divisor; arguments are those of `read`.

        Args:
            message: What `encode` wrote, 1-D uint8.
            out: Of the stripe's shape and any stride.
            divisor: At least 1.
            scratch: Memory to borrow.
        """
        self.read(message, out, scratch, divisor, add=False)

    def add(self, message: Tensor, total: Tensor, scratch: Scratch, divisor: int = 1) -> None:
        """Add C(v) / divisor to `total`; arguments are those of `read`.

        Args:
            message: What `encode` wrote, 1-D uint8.
            total: Of the stripe's shape and any stride.
            scratch: Memory to borrow.
            divisor: At least 1.
        """
        self.read(message, total, scratch, divisor, add=True)


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


class ShardedCoder(Coder):
    """Exchanges one parameter through a quantiser, stripe by stripe."""

    def __init__(
        self,
        spec: TensorSpec,
        quantiser: Quantiser,
        requantise: bool = True,
        process: Callable[[Tensor], None] | None = None,
    ) -> None:
        #: How a stripe becomes bytes.
        self.quantiser = quantiser
        self._requantise = requantise
        self._process = process
        layout = quantiser.view(torch.empty(spec.count, device="meta"))
        self._row = layout[0].numel()
        self._stripes = cut_stripes(len(layout), quantiser.unit, spec.workers)
        shapes = [(stop - start, *layout.shape[1:]) for start, stop in self._stripes]
        sent = tuple(aligned(quantiser.size(shape)) if shape[0] else 0 for shape in shapes)
        full = tuple(aligned((stop - start) * self._row * 4) for start, stop in self._stripes)
        super().__init__(spec, [Round(Collective.SHARD, torch.uint8, sent, sent if requantise else full)])
        self._sizes = [quantiser.size(shape) if shape[0] else 0 for shape in shapes]
        self._own = shapes[spec.rank]
        own_count = self._own[0] * self._row
        self.residuals = {WORKER: spec.count, **({OWNER: own_count} if requantise else {})}
        self._total = torch.empty(own_count, dtype=torch.float32, device=spec.device)
        self._residuals: Mapping[str, Residual] = NO_RESIDUAL

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        super().begin(self.quantiser.view(gradient), residuals)
        self._residuals = residuals

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        for (start, stop), size, out in zip(self._stripes, self._sizes, parts, strict=True):
            if size:
                mine = self._residual.part(start * self._row, stop * self._row)
                self.quantiser.encode(self._gradient[start:stop], mine, out[:size], self._scratch)
                out[size:].zero_()

    def messages(self) -> Messages:
        """What came of the step: ranges of `Quantiser.view`, each with the messages whose sum it is.

        Only where owners of stripes encode the sum.
        """
        received = zip(self._stripes, self._sizes, self._received, strict=True)
        return [(start, stop, [message[:size]]) for (start, stop), size, message in received if size]

    def received(self) -> Received:
        plain = super().received()
        return self.quantiser.received(plain, self.messages()) if self._requantise else plain

    def merge(self, index: int, received: Sequence[Tensor], out: Tensor) -> None:
        size = self._sizes[self.spec.rank]
        if not size:
            return
        self._total.zero_()
        total = self._total.view(self._own)
        for message in received:
            self.quantiser.add(message[:size], total, self._scratch)
        if self._process is not None:
            self._process(self._total)
        if self._requantise:
            self.quantiser.encode(total, self._residuals[OWNER], out[:size], self._scratch)
            out[size:].zero_()
        else:
            out.view(torch.float32)[: total.numel()].copy_(self._total)

    def finish(self, out: Tensor) -> None:
        shaped = self.quantiser.view(out)
        for (start, stop), size, message in zip(self._stripes, self._sizes, self._received, strict=True):
            stripe = shaped[start:stop]
            if not size:
                continue
            if self._requantise:
                self.quantiser.decode(message[:size], stripe, self.spec.divisor, self._scratch)
            else:
                values = message.view(torch.float32)[: stripe.numel()].view(stripe.shape)
                torch.div(values, self.spec.divisor, out=stripe)

    def spread(self, key: str, residual: Tensor, out: Tensor) -> None:
        start = self._stripes[self.spec.rank][0] * self._row if key == OWNER else 0
        out[start : start + residual.numel()].add_(residual)


#: How messages of a quantiser are exchanged: by what sends fewer bytes, stripe by stripe, or all to all.
WAYS = ("auto", "shard", "gather")


class GatheredCoder(Coder):
    """Exchanges one parameter through a quantiser, each worker's message to all."""

    def __init__(self, spec: TensorSpec, quantiser: Quantiser) -> None:
        #: How the tensor becomes bytes.
        self.quantiser = quantiser
        self._shape = quantiser.view(torch.empty(spec.count, device="meta")).shape
        self._size = quantiser.size(self._shape)
        super().__init__(spec, [Round(Collective.GATHER, torch.uint8, (aligned(self._size),))])
        self.residuals = {WORKER: spec.count}

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        super().begin(self.quantiser.view(gradient), residuals)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        (out,) = parts
        self.quantiser.encode(self._gradient, self._residual, out[: self._size], self._scratch)
        out[self._size :].zero_()

    def messages(self) -> Messages:
        """What came of the step: all of `Quantiser.view`, with the messages whose sum it is, by rank."""
        return [(0, self._shape[0], [message[: self._size] for message in self._received])]

    def received(self) -> Received:
        return self.quantiser.received(super().received(), self.messages())

    def finish(self, out: Tensor) -> None:
        """Messages are added by rank, so that all workers get the same bits."""
        shaped, divisor = self.quantiser.view(out), self.spec.divisor
        first, *others = (message[: self._size] for message in self._received)
        self.quantiser.decode(first, shaped, divisor, self._scratch)
        for message in others:
            self.quantiser.add(message, shaped, self._scratch, divisor)


class _NoisyShardedCoder(NoisyCoder, ShardedCoder):
    def __init__(self, spec: TensorSpec, quantiser: Quantiser, noise: Noise) -> None:
        super().__init__(spec, quantiser)
        self._noise = noise


class _NoisyGatheredCoder(NoisyCoder, GatheredCoder):
    def __init__(self, spec: TensorSpec, quantiser: Quantiser, noise: Noise) -> None:
        super().__init__(spec, quantiser)
        self._noise = noise


def check_meet(meet: str) -> None:
    """Check the option `meet`, which says how messages are reduced."""
    check_choice("meet", meet, WAYS, "It says how messages meet.")


def quantised_coder(
    spec: TensorSpec, quantiser: Quantiser, meet: str, noise: Noise | None = None
) -> ShardedCoder | GatheredCoder:
    """A coder whose messages are exchanged in one of `WAYS`.

    Args:
        spec: The parameter, and who exchanges it.
        quantiser: How a stripe becomes bytes.
        meet: One of `WAYS`.
        noise: What the quantiser draws from, if it rounds at random; the coder begins, commits and saves it.
    """
    gather = meet == "gather" or (meet == "auto" and spec.workers <= 2)
    if noise is not None:
        return (_NoisyGatheredCoder if gather else _NoisyShardedCoder)(spec, quantiser, noise)
    return GatheredCoder(spec, quantiser) if gather else ShardedCoder(spec, quantiser)
