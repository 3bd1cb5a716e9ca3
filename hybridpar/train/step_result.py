"""The result of a training step, and the end of a training whose steps are not finite any more."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hybridpar.errors import TrainingError
from hybridpar.pipeline.step import StepOutcome

#: Steps in a row that may be bad before training stops.
MAX_BAD_STEPS = 3


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        step: The step's number, from 1.
        outcome: What the workers agreed on.
        lr: Learning rate of the first parameter group.
        host_ms: Time for which the step kept the host.
        staleness: Updates made since the weights that the step's gradient was computed on; None where there are none.
        staged: The model is cut into stages: lanes ran the step, and `outcome.spans` says when.
    """

    step: int
    outcome: StepOutcome
    lr: float
    host_ms: float
    staleness: float | None = None
    staged: bool = False

    @property
    def loss(self) -> float:
        """Mean loss over the global batch. On a GPU, and in a pipeline, reading it waits for the step."""
        return self.outcome.loss

    @property
    def skipped(self) -> bool:
        """Whether the guard rolled the step back on all workers."""
        return not self.outcome.committed

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm before clipping; None with the guard off and no clipping."""
        return self.outcome.grad_norm

    @property
    def step_ms(self) -> float:
        """Time of the whole step on this worker."""
        return self.outcome.spans.step_ms if self.staged else self.host_ms

    @property
    def compute_ms(self) -> float:
        """Time outside the exposed part of the sync."""
        return self.step_ms - self.outcome.exposed_sync_ms


class BadSteps:
    """Ends a training in which nothing but bad steps comes: a gradient or the loss is not finite."""

    def __init__(self, *, late: bool, name_parameter: Callable[[StepOutcome], str | None], allowed: int = 0) -> None:
        self._late = late
        self._most = MAX_BAD_STEPS + allowed
        self._name_parameter = name_parameter
        self._pending: StepResult | None = None
        self._count = 0
        self._first_bad: str | None = None

    def watch(self, result: StepResult) -> None:
        """Look at the latest step."""
        before, self._pending = self._pending, result
        seen = before if self._late else result
        if seen is None or not seen.outcome.is_agreed:  # the others go on
            return
        if seen.outcome.committed and math.isfinite(seen.outcome.loss):
            self._count = 0
            return
        self._count += 1
        if self._count == 1 or self._first_bad is None:
            self._first_bad = self._name_parameter(seen.outcome)
        if self._count >= self._most:
            first, last = seen.step - self._most + 1, seen.step
            raise TrainingError(
                f"loss or gradients were not finite in steps {first} to {last}; first bad parameter: "
                f"{self._first_bad or 'none, only the loss'}",
                f"After {self._most} such steps in a row training stops, on all workers at the same step.",
                "Lower --lr, warm up for longer, or set --clip-grad; --resume goes on from a checkpoint.",
            )

    def forget(self) -> None:
        """Training goes on from elsewhere."""
        self._count, self._pending = 0, None
