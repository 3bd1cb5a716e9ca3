"""Why: between two workers nobody saves bytes by owning a stripe, and encoding the sum again is an error for nothing.

Where stripes are sharded a worker sends (K - 1) / K of its message to their owners, and about as much again of sums.
Where everybody sends its message to everybody it is K - 1 messages. For K = 2 both are one message; but with the
latter what arrives is decoded and added in full precision, so there is one quantisation instead of two, one residual
and one collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridpar.compress.codec import Coder, Collective, Round, TensorSpec
from hybridpar.compress.packing import aligned
from hybridpar.compress.residual import NO_RESIDUAL, WORKER, Residual
from hybridpar.compress.sharded import Quantiser, ShardedCoder
from hybridpar.errors import UsageError, nearest

#: How messages of a quantiser may meet: by whatever sends fewer bytes, stripe by stripe, or everybody's at everybody.
WAYS = ("auto", "shard", "gather")


class GatheredCoder(Coder):
    """Exchanges one parameter through a quantiser, each worker's message to all.

    Args:
        spec: The parameter.
        quantiser: How the tensor becomes bytes.
    """

    def __init__(self, spec: TensorSpec, quantiser: Quantiser) -> None:
        super().__init__(spec)
        #: How the tensor becomes bytes.
        self.quantiser = quantiser
        self._size = quantiser.size(quantiser.view(torch.empty(spec.count, device="meta")).shape)
        self._rounds = (Round(Collective.GATHER, torch.uint8, (aligned(self._size),)),)
        self.residuals = {WORKER: spec.count}
        self._messages: Sequence[Tensor] = ()
        self._gradient = torch.empty(0)
        self._residual = Residual()

    @property
    def rounds(self) -> tuple[Round, ...]:
        """One round, gathered."""
        return self._rounds

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        """See `Coder`."""
        self._gradient = self.quantiser.view(gradient)
        self._residual = residuals[WORKER]

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        """See `Coder`."""
        (out,) = parts
        self.quantiser.encode(self._gradient, self._residual, out[: self._size], self._scratch)
        out[self._size :].zero_()

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        """See `Coder`."""
        self._messages = [part[: self._size] for part in parts]

    def finish(self, out: Tensor) -> None:
        """See `Coder`. Messages are added by rank, so that all workers get the same bits."""
        shaped, divisor = self.quantiser.view(out), self.spec.divisor
        first, *others = self._messages
        self.quantiser.decode(first, shaped, divisor, self._scratch)
        for message in others:
            self.quantiser.add(message, shaped, self._scratch, divisor)

    def spread(self, key: str, residual: Tensor, out: Tensor) -> None:
        """See `Coder`."""
        shaped = self.quantiser.view(out)
        shaped.add_(self.quantiser.lay(residual, shaped.shape))


def check_meet(meet: str) -> None:
    """Check how messages are to meet.

    Raises:
        UsageError: There is no such way.
    """
    if meet not in WAYS:
        raise UsageError(f"meet={meet}", "It says how messages meet.", nearest(meet, WAYS))


def quantised_coder(spec: TensorSpec, quantiser: Quantiser, meet: str) -> ShardedCoder | GatheredCoder:
    """A coder whose messages meet in one of `WAYS`."""
    gather = meet == "gather" or (meet == "auto" and spec.workers <= 2)
    return GatheredCoder(spec, quantiser) if gather else ShardedCoder(spec, quantiser)
