"""What coders remember from step to step, in two halves: a step reads what counts and writes what would count.

`State` is a tensor of a codec. `Memory` is where a coder takes its values from and leaves what it did not send: the
base class forgets that, and `Residual` adds it to the gradient of the next step. That is error feedback (Seide et al.,
"1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019):

    v = g + r        C(v) is sent        r' = v - C(v)

The residual r is subtracted from v, not from g: what was left out twice is still there. So a step that is not committed
leaves no trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.errors import CheckpointError

#: Key of the residual of what this worker does not send.
WORKER = "worker"
#: Key of the residual of what this worker, as owner of a stripe, does not send on.
OWNER = "owner"


class Scratch:
    """Tensors that are used again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, use: str, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A 1-D tensor with anything in it, valid until the same use is taken again."""
        buffer = self._buffers.get((use, dtype))
        if buffer is None or buffer.numel() < count:
            self._buffers[use, dtype] = buffer = torch.empty(count, dtype=dtype, device=self._device)
        return buffer[:count]


class State:
    """A tensor of which a step makes a new version, which counts from `commit` on."""

    def __init__(self, now: Tensor) -> None:
        self.now, self.next = now, torch.zeros_like(now)

    def commit(self) -> None:
        """What the step under way made counts."""
        self.now, self.next = self.next, self.now

    def load(self, saved: Tensor, name: str) -> None:
        """Take over what was saved of a parameter."""
        if saved.shape != self.now.shape:
            raise CheckpointError(
                f"the state of {name!r} has shape {tuple(saved.shape)}, and {tuple(self.now.shape)} is needed",
                "It depends on the codec's options, the parameter's shape, the number of workers and the rank.",
                "Resume with the options of the run that wrote the checkpoint.",
            )
        self.now = saved.to(self.now.device, self.now.dtype, copy=True)


@dataclass(frozen=True, eq=False)
class Product(ABC):
    """A matrix left^T right of float32.

    Attributes:
        left: A few rows, as long as the matrix has rows.
        right: As many rows, as long as those of the matrix.
    """

    left: Tensor
    right: Tensor

    @abstractmethod
    def subtract_from(self, values: Tensor) -> None:
        """Subtract the matrix."""


class Memory:
    """No memory at all: v is the gradient, and what is not sent is lost.

    `keeps` says whether a coder should leave v - C(v) in what `take` returns; here it must not touch it.
    """

    keeps = False

    def part(self, start: int, stop: int) -> Memory:
        """The memory of a range of elements."""
        return self

    def take(self, values: Tensor, start: int = 0) -> Tensor:
        """Give v for a range of elements; to be called once in a step for each."""
        return values

    def addresses(self, count: int) -> tuple[int, int, float]:
        """For a kernel that reads what is left of so many values and writes what will be; and the factor of the former.

        Null where nothing is remembered.
        """
        return 0, 0, 1.0

    def owe(self, product: Product) -> None:
        """Say that what is left of the step is v without a matrix. It is subtracted by who next reads what is left."""

    def commit(self) -> None:
        """The step counts."""


class Residual(Memory):
    """What was not sent; the step under way leaves what will count in `pending`, and v is made there."""

    keeps = True

    def __init__(self, left: Tensor, pending: Tensor, factor: float = 1.0) -> None:
        self._left = left
        #: What the step under way leaves.
        self.pending = pending
        self._factor = factor  # what is left from before is multiplied with it
        self._owed: Product | None = None  # by what is left
        self._owing: Product | None = None  # by the pending half

    @property
    def left(self) -> Tensor:
        """What the last step that counted left; 1-D, not a copy."""
        if self._owed is not None:
            product, self._owed = self._owed, None
            product.subtract_from(self._left)
        return self._left

    @classmethod
    def zeros(cls, count: int, device: torch.device, factor: float = 1.0) -> Residual:
        """Nothing is left yet."""
        left, pending = (torch.zeros(count, dtype=torch.float32, device=device) for _ in range(2))
        return cls(left, pending, factor)

    def part(self, start: int, stop: int) -> Residual:
        return Residual(self.left[start:stop], self.pending[start:stop], self._factor)

    def take(self, values: Tensor, start: int = 0) -> Tensor:
        """Give v = values + factor * left, in memory that may be changed."""
        part = slice(start, start + values.numel())
        left, pending = self.left[part].view(values.shape), self.pending[part].view(values.shape)
        return torch.add(values, left, alpha=self._factor, out=pending)

    def owe(self, product: Product) -> None:
        self._owing = product

    def unsettled(self) -> tuple[Tensor, Product | None, float]:
        """What is left, for a kernel that reads all of it, what has yet to be subtracted from it, and its factor."""
        return self._left, self._owed, self._factor

    def addresses(self, count: int) -> tuple[int, int, float]:
        left = self._left if self._owed is None else self.left
        assert left.numel() == self.pending.numel() == count
        return left.data_ptr(), self.pending.data_ptr(), self._factor

    def commit(self) -> None:
        self._left, self.pending = self.pending, self._left
        self._owed, self._owing = self._owing, None


def lay_together(memories: Sequence[Memory]) -> None:
    """Move residuals of one size to where `stacked` finds them, unless they are there; before they are taken."""
    residuals = [memory for memory in memories if isinstance(memory, Residual)]
    if len(residuals) < max(len(memories), 2):
        return
    left, pending = [residual.left for residual in residuals], [residual.pending for residual in residuals]
    if stacked(left) is None:
        for residual, half in zip(residuals, torch.stack(left), strict=True):
            residual._left = half
    if stacked(pending) is None:
        for residual, half in zip(residuals, torch.stack(pending), strict=True):
            residual.pending = half


def stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors of one shape as one with a further dimension in front, which is not a copy."""
    first, *others = tensors
    starts = [tensor.storage_offset() for tensor in tensors]
    distance = starts[1] - starts[0] if others else 0
    for number, tensor in enumerate(others, 1):
        if (
            starts[number] != starts[0] + number * distance
            or tensor.stride() != first.stride()
            or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return None
    return first.as_strided((len(tensors), *first.shape), (distance, *first.stride())) if distance >= 0 else None
