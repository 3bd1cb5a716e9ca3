"""Error feedback: adds what a codec left out to the gradient of the next step.

Error feedback (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error Feedback
Fixes SignSGD", ICML 2019):

    v = g + r        C(v) is sent        r' = v - C(v)

The residual r is subtracted from v, not from g: what was left out twice is still there. It is in units of the gradient,
so the learning rate of the step that sends it counts; `rescale` makes it that of the step that left it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybridpar.compress.codec import (
    NO_RESIDUAL,
    Codec,
    Coder,
    Full,
    Product,
    Residual,
    TensorSpec,
    WarmUpCoder,
    as_inner,
)
from hybridpar.errors import CheckpointError, check, check_choice

#: What residuals may be kept in.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class KeptResidual(Residual):
    """What was not sent, in float32 or bfloat16.

    In bfloat16 half as much memory is read and written in a step, and what is left is rounded once more: the rounding
    errors, up to 2^-8 of each value, are lost. v itself is always float32.
    """

    keeps = True

    def __init__(self, kept: Tensor, pending: Tensor, factor: float = 1.0) -> None:
        self._kept = kept
        self.pending = pending
        self.factor = factor
        # Where v is until the step counts, if that is not the pending half; shared with parts, which begin at `_start`.
        self._wide: list[Tensor] = []
        self._start, self._count = 0, kept.numel()
        self._owed: Product | None = None  # by the kept half
        self._owing: Product | None = None  # by the pending one

    @property
    def kept(self) -> Tensor:
        """What the last step that counted left."""
        if self._owed is not None:
            product, self._owed = self._owed, None
            product.subtract_from(self._kept)
        return self._kept

    @kept.setter
    def kept(self, kept: Tensor) -> None:
        self._kept = kept

    @classmethod
    def zeros(cls, count: int, device: torch.device, dtype: torch.dtype = torch.float32) -> KeptResidual:
        """Nothing is kept yet."""
        return cls(torch.zeros(count, dtype=dtype, device=device), torch.zeros(count, dtype=dtype, device=device))

    def part(self, start: int, stop: int) -> KeptResidual:
        """The residual of a range of elements; it shares the memory."""
        part = KeptResidual(self.kept[start:stop], self.pending[start:stop], self.factor)
        part._wide, part._start, part._count = self._wide, self._start + start, self._count
        return part

    def take(self, values: Tensor, start: int) -> Tensor:
        """Give v = values + factor * kept, in memory that may be changed."""
        kept = self.kept[start : start + values.numel()].view(values.shape)
        return torch.add(values, kept, alpha=self.factor, out=self.again(values, start))

    def again(self, values: Tensor, start: int) -> Tensor:
        if self.pending.dtype == torch.float32:
            return self.pending[start : start + values.numel()].view(values.shape)
        if not self._wide:
            self._wide.append(torch.empty(self._count, dtype=torch.float32, device=self.kept.device))
        start += self._start
        return self._wide[0][start : start + values.numel()].view(values.shape)

    def owe(self, product: Product) -> None:
        self._owing = product

    def unsettled(self) -> tuple[Tensor, Product | None]:
        """What is kept, for a kernel that reads all of it, and what has yet to be subtracted from it."""
        return self._kept, self._owed

    def halves(self) -> tuple[Tensor, Tensor]:
        """What is kept and what is pending, for a kernel that reads all of the one and writes all of the other."""
        self._wide.clear()
        return self.kept, self.pending

    def commit(self) -> None:
        """What the step under way left is what is kept."""
        owing, self._owing = self._owing, None
        if self._wide:
            wide = self._wide.pop()
            if owing is not None:  # before it is rounded
                owing.subtract_from(wide)
                owing = None
            self.pending.copy_(wide)
        self._kept, self.pending, self._owed = self.pending, self._kept, owing


def lay_together(residuals: Sequence[Residual]) -> None:
    """Move residuals of one size to where `stacked` finds them, unless they are there; before they are taken."""
    kept = [residual for residual in residuals if isinstance(residual, KeptResidual)]
    if len(kept) < max(len(residuals), 2):
        return
    if stacked([one.kept for one in kept]) is None:
        for one, half in zip(kept, torch.stack([one.kept for one in kept]), strict=True):
            one.kept = half
    if stacked([one.pending for one in kept]) is None:
        for one, half in zip(kept, torch.stack([one.pending for one in kept]), strict=True):
            one.pending = half


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


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Another codec, with error feedback around it.

    Attributes:
        inner: The codec.
        decay: The residual is multiplied with it at every step, which damps what momentum makes unstable.
        warmup: Number of first steps that are sent in full precision.
        rescale: Multiply the residual with old / new where the learning rate changes, so that what was left out has
            the weight that it would have had.
        residual: What residuals are kept in: `fp32`, or `bf16` for half of the memory and of the traffic with it.
    """

    inner: Codec
    decay: float = 1.0
    warmup: int = 0
    rescale: bool = False
    residual: str = "fp32"
    name = "feedback"
    biased = True
    stateful = True
    at_once: ClassVar[bool] = as_inner("at_once")

    def __post_init__(self) -> None:
        check(
            0 < self.decay <= 1, f"decay={self.decay:g}", "It is above 0 and at most 1.", "Use 1, or 0.9 with momentum."
        )
        check(self.warmup >= 0, f"warmup={self.warmup}", "It is a number of steps.", "Use 0 or more.")
        check_choice("residual", self.residual, _DTYPES, "It says how residuals are kept.")

    def fits(self, shape: Sequence[int]) -> bool:
        """As the codec inside."""
        return self.inner.fits(shape)

    def bind(self, spec: TensorSpec) -> FeedbackCoder:
        return FeedbackCoder(self, spec)


class FeedbackCoder(WarmUpCoder):
    """Keeps what the inner coder does not send."""

    def __init__(self, config: ErrorFeedback, spec: TensorSpec) -> None:
        super().__init__(spec, Full(spec), config.inner.bind(spec))
        self._config = config
        dtype = _DTYPES[config.residual]
        self._kept = {
            key: KeptResidual.zeros(count, spec.device, dtype) for key, count in self._later.residuals.items()
        }
        self._learning_rate = 0.0  # of the coming steps
        self._rate_now = self._rate_before = 0.0  # of the step under way and of the last that counted; 0 where not told

    @property
    def warm(self) -> bool:
        """Whether the next step is sent in full precision."""
        return self._steps < self._config.warmup

    @property
    def at_work(self) -> Coder:
        return self._current

    def residual_squares(self) -> Tensor | None:
        squares = [torch.dot(kept, kept) for kept in (one.kept.float() for one in self._kept.values())]
        return torch.stack(squares).sum() if squares else None

    def residual(self, key: str) -> Tensor:
        """What is kept under a key of the inner coder's `residuals`; 1-D, as the option `residual` says; not a copy."""
        return self._kept[key].kept

    def unsent(self) -> Tensor:
        """All that this worker keeps, in the layout of the gradient; 1-D float32, new.

        Summed over the workers, and added to what was received so far, it is all that their gradients ever were.
        """
        out = torch.zeros(self.spec.count, dtype=torch.float32, device=self.spec.device)
        for key, kept in self._kept.items():
            self._later.spread(key, kept.kept.float(), out)
        return out

    def rescale(self, learning_rate: float) -> None:
        """Without the option `rescale` it has no effect."""
        self._learning_rate = learning_rate

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        last = self._rate_before
        now = self._rate_now = self._learning_rate or last  # at a rate of 0 nothing moves, and nothing is left out
        factor = self._config.decay * (last / now if self._config.rescale and last and now else 1.0)
        for kept in self._kept.values():
            kept.factor = factor
        self._current.begin(gradient, NO_RESIDUAL if self.warm else self._kept)

    def commit(self) -> None:
        """A step of the warm-up leaves the residuals as they are: zero."""
        self._current.commit()
        if not self.warm:
            for kept in self._kept.values():
                kept.commit()
        self._steps += 1
        self._rate_before = self._rate_now

    def state_dict(self) -> dict[str, Any]:
        """Residuals by key, how many steps counted, the last learning rate, and the inner coder's state."""
        return {
            "steps": self._steps,
            "learning_rate": self._rate_before,
            "residuals": {key: kept.kept.to(torch.float32, copy=True) for key, kept in self._kept.items()},
            "inner": self._later.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved: Mapping[str, Tensor] = state["residuals"]
        sizes = {key: residual.numel() for key, residual in saved.items()}
        if sizes != dict(self._later.residuals):
            raise CheckpointError(
                f"the residuals of {self.spec.name!r} have sizes {sizes}, and {dict(self._later.residuals)} are needed",
                "They depend on the codec, its options, the number of workers and the worker's rank.",
                "Resume with the same of these, or without residuals.",
            )
        self._later.load_state_dict(state["inner"])
        for key, residual in saved.items():
            self._kept[key].kept.copy_(residual)
        self._steps, self._rate_before = int(state["steps"]), float(state["learning_rate"])
