"""Error feedback: adds what a codec left out to the gradient of the next step, see `hybridpar.compress.memory`.

The residual is in units of the gradient, so the learning rate of the step that sends it counts; `rescale` makes it that
of the step that left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from hybridpar.compress.codec import Full, TensorSpec, WarmUpCoder, Wrapper
from hybridpar.compress.memory import Residual
from hybridpar.errors import CheckpointError
from hybridpar.spec import AT_LEAST_0, AT_MOST_1

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Another codec, with error feedback around it.

    Attributes:
        decay: The residual is multiplied with it at every step, which damps what momentum makes unstable.
        warmup: Number of first steps that are sent in full precision.
        rescale: Multiply the residual with old / new where the learning rate changes, so that what was left out has
            the weight that it would have had.
        residual: What residuals are stored in: `fp32`, or `bf16` for half of the memory and of the traffic with it.
    """

    decay: Annotated[float, AT_MOST_1] = 1.0
    warmup: Annotated[int, AT_LEAST_0] = 0
    rescale: bool = False
    residual: Literal["fp32", "bf16"] = "fp32"

    def bind(self, spec: TensorSpec) -> FeedbackCoder:
        return (RescaledCoder if self.rescale else FeedbackCoder)(self, spec)


class FeedbackCoder(WarmUpCoder):
    """Remembers what the inner coder does not send."""

    def __init__(self, config: ErrorFeedback, spec: TensorSpec) -> None:
        super().__init__(spec, config.warmup, Full(spec), config.inner.bind(spec))
        self._config = config
        dtype = _DTYPES[config.residual]
        self._residuals = {
            key: Residual.zeros(len(part), spec.device, dtype) for key, part in self.lasting.residuals.items()
        }
        self.lasting.memory.update(self._residuals)
        self._set_factor(config.decay)

    def residual_squares(self) -> Tensor:
        """Sum of squares of what this worker has not sent yet, 0-d, in a pass over it."""
        lefts = [residual.left.float() for residual in self._residuals.values()]
        return sum((torch.dot(left, left) for left in lefts), start=torch.zeros((), device=self.spec.device))

    def residual(self, key: str) -> Tensor:
        """What is left under a key of the inner coder's `residuals`; 1-D, as the option `residual` says; not a copy."""
        return self._residuals[key].left

    def _set_factor(self, factor: float) -> None:
        for residual in self._residuals.values():
            residual.factor = factor

    def state_dict(self) -> dict[str, Any]:
        """Residuals by key, how many steps counted, and the inner coder's state."""
        return {
            "steps": self.steps,
            "residuals": {key: value.left.to(torch.float32, copy=True) for key, value in self._residuals.items()},
            "inner": self._later.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved: Mapping[str, Tensor] = state["residuals"]
        sizes = {key: residual.numel() for key, residual in saved.items()}
        needed = {key: len(part) for key, part in self.lasting.residuals.items()}
        if sizes != needed:
            raise CheckpointError(
                f"the residuals of {self.spec.name!r} have sizes {sizes}, and {needed} are needed",
                "They depend on the codec, its options, the number of workers and the worker's rank.",
                "Resume with the same of these, or without residuals.",
            )
        self._later.load_state_dict(state["inner"])
        for key, residual in saved.items():
            self.residual(key).copy_(residual)
        self.steps = int(state["steps"])
        self._choose()


class RescaledCoder(FeedbackCoder):
    """Multiplies what is left with old / new where the learning rate changes."""

    def __init__(self, config: ErrorFeedback, spec: TensorSpec) -> None:
        super().__init__(config, spec)
        self._rate_now = self._rate_before = 0.0  # of the step under way and of the last that counted; 0: not known

    def set_rate(self, learning_rate: float) -> None:
        """Say which learning rate the coming steps use, in any unit."""
        self._rate_now = learning_rate or self._rate_before  # at a rate of 0 nothing moves, and nothing is left out
        self._rescale()

    def _rescale(self) -> None:
        last, now = self._rate_before, self._rate_now
        self._set_factor(self._config.decay * (last / now if last and now else 1.0))

    def commit(self) -> None:
        super().commit()
        self._rate_before = self._rate_now
        self._rescale()

    def state_dict(self) -> dict[str, Any]:
        """As of any, and the last learning rate."""
        return {**super().state_dict(), "learning_rate": self._rate_before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rate_before = float(state["learning_rate"])
        self._rescale()
