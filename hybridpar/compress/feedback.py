"""Why: a biased codec converges only if what it left out is sent later, and that rule is the same for all of them.

Error feedback (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error Feedback
Fixes SignSGD", ICML 2019):

    v = g + r        C(v) is sent        r' = v - C(v)

The residual r is subtracted from v, not from g: what was left out twice is still there. It is in units of the gradient,
so the learning rate of the step that sends it counts; `rescale` makes it that of the step that left it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress.codec import Codec, Coder, Round, TensorSpec
from hybridpar.compress.codecs.none import Full
from hybridpar.compress.redivide import divide
from hybridpar.compress.residual import NO_RESIDUAL, KeptResidual, Residual
from hybridpar.compress.scratch import Scratch
from hybridpar.errors import CheckpointError, UsageError


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Another codec, with error feedback around it.

    Attributes:
        inner: The codec.
        decay: The residual is multiplied with it at every step, which damps what momentum makes unstable.
        warmup: So many first steps travel in full precision.
        rescale: Multiply the residual with old / new where the learning rate changes, so that what was left out has
            the weight that it would have had.
    """

    inner: Codec
    decay: float = 1.0
    warmup: int = 0
    rescale: bool = False
    name = "feedback"
    biased = True
    stateful = True

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise UsageError(f"decay={self.decay:g}", "It is above 0 and at most 1.", "Use 1, or 0.9 with momentum.")
        if self.warmup < 0:
            raise UsageError(f"warmup={self.warmup}", "It is a number of steps.", "Use 0 or more.")

    def fits(self, shape: Sequence[int]) -> bool:
        """As the codec inside."""
        return self.inner.fits(shape)

    def bind(self, spec: TensorSpec) -> FeedbackCoder:
        """See `Codec`."""
        return FeedbackCoder(self, spec)


@dataclass
class _Progress:
    """How far a coder has come, apart from its residuals."""

    steps: int = 0
    learning_rate: float = 0.0  # of the last step that counted; 0 where none was told


@dataclass
class _Flight:
    """The step under way."""

    warm: bool
    coder: Coder
    learning_rate: float
    residuals: Mapping[str, Residual] = field(default_factory=dict)


class FeedbackCoder(Coder):
    """Keeps what the inner coder does not send.

    Args:
        config: Which codec, and how its residuals are treated.
        spec: The parameter.
    """

    def __init__(self, config: ErrorFeedback, spec: TensorSpec) -> None:
        super().__init__(spec)
        self._config = config
        self._inner = config.inner.bind(spec)
        self._full = Full(spec)
        self._kept = {key: KeptResidual.zeros(count, spec.device) for key, count in self._inner.residuals.items()}
        self._progress = _Progress()
        self._learning_rate = 0.0
        self._flight: _Flight | None = None

    def use(self, scratch: Scratch) -> None:
        """See `Coder`."""
        self._inner.use(scratch)
        self._full.use(scratch)

    @property
    def warm(self) -> bool:
        """Whether the next step travels in full precision."""
        return self._progress.steps < self._config.warmup

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Those of the codec inside, or of full precision while warming up."""
        return (self._full if self.warm else self._inner).rounds

    @property
    def lasting_rounds(self) -> tuple[Round, ...]:
        """See `Coder`."""
        return self._inner.rounds

    def residual_squares(self) -> Tensor | None:
        """See `Coder`."""
        squares = [torch.dot(kept.kept, kept.kept) for kept in self._kept.values()]
        return torch.stack(squares).sum() if squares else None

    def residual(self, key: str) -> Tensor:
        """What is kept under a key of the inner coder's `residuals`; 1-D float32, not a copy."""
        return self._kept[key].kept

    def unsent(self) -> Tensor:
        """All that this worker keeps, in the layout of the gradient; 1-D float32, new.

        Summed over the workers, and added to what was received so far, it is all that their gradients ever were.
        """
        out = torch.zeros(self.spec.count, device=self.spec.device)
        for key, kept in self._kept.items():
            self._inner.spread(key, kept.kept, out)
        return out

    def rescale(self, learning_rate: float) -> None:
        """See `Coder`. Without the option `rescale` it has no effect."""
        self._learning_rate = learning_rate

    def set_batch_scale(self, samples: float) -> None:
        """See `Coder`."""
        self._inner.set_batch_scale(samples)

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        """See `Coder`."""
        last = self._progress.learning_rate
        now = self._learning_rate or last  # at a rate of 0 nothing moves, and nothing is left out
        if self.warm:
            self._flight = _Flight(True, self._full, now)
            self._full.begin(gradient)
            return
        factor = self._config.decay * (last / now if self._config.rescale and last and now else 1.0)
        for kept in self._kept.values():
            kept.factor = factor
        self._flight = _Flight(False, self._inner, now)
        self._inner.begin(gradient, self._kept)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        """See `Coder`."""
        self._current.coder.write(index, parts)

    def merge(self, index: int, received: Sequence[Tensor], out: Tensor) -> None:
        """See `Coder`."""
        self._current.coder.merge(index, received, out)

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        """See `Coder`."""
        self._current.coder.read(index, parts)

    def finish(self, out: Tensor) -> None:
        """See `Coder`."""
        self._current.coder.finish(out)

    def commit(self) -> None:
        """See `Coder`. A step of the warm-up leaves the residuals as they are: zero."""
        flight = self._current
        flight.coder.commit()
        if not flight.warm:
            for kept in self._kept.values():
                kept.commit()
        self._progress = _Progress(self._progress.steps + 1, flight.learning_rate)
        self._flight = None

    def rollback(self) -> None:
        """See `Coder`."""
        if self._flight is not None:
            self._flight.coder.rollback()
        self._flight = None

    def state_dict(self) -> dict[str, Any]:
        """Residuals by key, how many steps counted, the last learning rate, and the inner coder's state."""
        return {
            "steps": self._progress.steps,
            "learning_rate": self._progress.learning_rate,
            "residuals": {key: kept.kept.clone() for key, kept in self._kept.items()},
            "inner": self._inner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Coder`."""
        saved: Mapping[str, Tensor] = state["residuals"]
        sizes = {key: residual.numel() for key, residual in saved.items()}
        if sizes != dict(self._inner.residuals):
            raise CheckpointError(
                f"the residuals of {self.spec.name!r} have sizes {sizes}, and {dict(self._inner.residuals)} are needed",
                "They depend on the codec, its options, the number of workers and the worker's rank.",
                "Resume with the same of these, or without residuals.",
            )
        self._inner.load_state_dict(state["inner"])
        self._take_over(state, saved)

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """See `Coder`. What other than these many workers had not sent is divided as `divide` says."""
        if len(states) == self.spec.workers:
            self.load_state_dict(states[self.spec.rank])
            return
        residuals = divide(self._config.inner, self.spec, [state["residuals"] for state in states])
        self._inner.load_states([state["inner"] for state in states])
        self._take_over(states[0], residuals)

    def _take_over(self, state: Mapping[str, Any], residuals: Mapping[str, Tensor]) -> None:
        for key, residual in residuals.items():
            self._kept[key].kept.copy_(residual)
        self._progress = _Progress(int(state["steps"]), float(state["learning_rate"]))
        self._flight = None

    @property
    def _current(self) -> _Flight:
        assert self._flight is not None, "begin() starts a step"
        return self._flight
