"""Why: what a codec does not send is not lost but added to the next gradient, and a step that does not count must
leave it as it was, bit by bit.

A residual has two halves: what the last step that counted left, and what the step under way leaves. Coders read
v = g + factor * r chunk by chunk into the second half, and subtract there what they send, so that the sum costs no pass
of its own. Committing swaps the halves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

#: Key of the residual of what this worker does not send.
WORKER = "worker"


class Residual:
    """No memory at all: v is the gradient, and what is not sent is lost.

    `keeps` says whether a coder should leave v - C(v) in what `take` returns; here it must not touch it.
    """

    keeps = False

    def part(self, start: int, stop: int) -> Residual:
        """The residual of a range of elements."""
        return self

    def take(self, values: Tensor, start: int) -> Tensor:
        """Give v for a range of elements; to be called once in a step for each.

        Args:
            values: The gradient there, of any shape and stride.
            start: Its first element in this residual.

        Returns:
            v, in the shape of `values`.
        """
        return values

    def again(self, values: Tensor, start: int) -> Tensor:
        """What `take` returned, or what has become of it since."""
        return values


class KeptResidual(Residual):
    """What was not sent, in float32.

    Args:
        kept: 1-D, left by the last step that counted.
        pending: 1-D, left by the step under way.
        factor: What the kept half is multiplied with before it is added.
    """

    keeps = True

    def __init__(self, kept: Tensor, pending: Tensor, factor: float = 1.0) -> None:
        self.kept = kept
        self.pending = pending
        self.factor = factor

    @classmethod
    def zeros(cls, count: int, device: torch.device) -> KeptResidual:
        """Nothing is kept yet."""
        return cls(torch.zeros(count, device=device), torch.zeros(count, device=device))

    def part(self, start: int, stop: int) -> KeptResidual:
        """The residual of a range of elements; it shares the memory."""
        return KeptResidual(self.kept[start:stop], self.pending[start:stop], self.factor)

    def take(self, values: Tensor, start: int) -> Tensor:
        """Give v = values + factor * kept, in memory that may be changed."""
        kept = self.kept[start : start + values.numel()].view(values.shape)
        return torch.add(values, kept, alpha=self.factor, out=self.again(values, start))

    def again(self, values: Tensor, start: int) -> Tensor:
        """See `Residual`."""
        return self.pending[start : start + values.numel()].view(values.shape)

    def commit(self) -> None:
        """What the step under way left is what is kept."""
        self.kept, self.pending = self.pending, self.kept


class _Nothing(dict[str, Residual]):
    """For every key the residual that keeps nothing."""

    def __missing__(self, key: str) -> Residual:
        return Residual()


#: No error feedback.
NO_RESIDUAL: Mapping[str, Residual] = _Nothing()
