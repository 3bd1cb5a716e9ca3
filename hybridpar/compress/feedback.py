"""Error feedback: adds what a codec left out to the gradient of the next step, see `hybridpar.compress.memory`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from hybridpar.compress.codec import Full, TensorSpec, WarmUpCoder, Wrapper
from hybridpar.compress.memory import Residual
from hybridpar.errors import CheckpointError
from hybridpar.spec import AT_LEAST_0, AT_MOST_1


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Another codec, with error feedback around it.

    Attributes:
        decay: The residual is multiplied with it at every step, which damps what momentum makes unstable.
        warmup: Number of first steps that are sent in full precision.
    """

    decay: Annotated[float, AT_MOST_1] = 1.0
    warmup: Annotated[int, AT_LEAST_0] = 0

    def bind(self, spec: TensorSpec) -> FeedbackCoder:
        return FeedbackCoder(self, spec)


class FeedbackCoder(WarmUpCoder):
    """Remembers what the inner coder does not send."""

    def __init__(self, config: ErrorFeedback, spec: TensorSpec) -> None:
        super().__init__(spec, config.warmup, Full(spec), config.inner.bind(spec))
        #: Residuals by key of the inner coder's `residuals`.
        self.unsent = {
            key: Residual.zeros(len(part), spec.device, config.decay) for key, part in self.lasting.residuals.items()
        }
        self.lasting.memory.update(self.unsent)

    def residual_squares(self) -> Tensor:
        """Sum of squares of what this worker has not sent yet, 0-d, in a pass over it."""
        lefts = [residual.left for residual in self.unsent.values()]
        return sum((torch.dot(left, left) for left in lefts), start=torch.zeros((), device=self.spec.device))

    def state_dict(self) -> dict[str, Any]:
        """Residuals by key, how many steps counted, and the inner coder's state."""
        residuals = {key: residual.left.clone() for key, residual in self.unsent.items()}
        shape = list(self.spec.shape)
        return {"shape": shape, "steps": self.steps, "residuals": residuals, "inner": self._later.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved: Mapping[str, Tensor] = state["residuals"]
        sizes = {key: residual.numel() for key, residual in saved.items()}
        needed = {key: len(part) for key, part in self.lasting.residuals.items()}
        shape = list(self.spec.shape)
        if sizes != needed or state["shape"] != shape:
            raise CheckpointError(
                f"the residuals of {self.spec.name!r} have sizes {sizes} for the shape {state['shape']}, and {needed} "
                f"for {shape} are needed",
                "They depend on the codec, its options, the number of workers and the worker's rank.",
                "Resume with the same of these, or without residuals.",
            )
        self._later.load_state_dict(state["inner"])
        for key, residual in saved.items():
            self.unsent[key].left.copy_(residual)
        self.steps = int(state["steps"])
        self._choose()
