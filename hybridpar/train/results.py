"""What a training step and a test came to, and the end of a training whose steps are not finite any more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.errors import TrainingError, UsageError
from hybridpar.models.outputs import main_output
from hybridpar.pipeline.step import StepOutcome

if TYPE_CHECKING:
    from hybridpar.train.engine import Engine

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
        staged: The model is cut into stages: lanes ran the step, and `outcome.spans` says when.
    """

    step: int
    outcome: StepOutcome
    lr: float
    host_ms: float
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
    def staleness(self) -> float | None:
        """Updates made since the weights that the step's gradient was computed on; None where there are none."""
        return self.outcome.staleness

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

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._most = MAX_BAD_STEPS + sum(scale.falls for scale in engine.loss_scales[:1])
        self._pending: StepResult | None = None
        self._count = 0
        self._first_bad: str | None = None

    def watch(self, result: StepResult) -> None:
        """Look at the latest step."""
        before, self._pending = self._pending, result
        seen = before if self._engine.late else result
        if seen is None or not seen.outcome.is_agreed:  # the others go on
            return
        if seen.outcome.committed and math.isfinite(seen.outcome.loss):
            self._count = 0
            return
        self._count += 1
        if self._count == 1 or self._first_bad is None:
            self._first_bad = self._engine.bad_parameter(seen.outcome)
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


@dataclass(frozen=True)
class Evaluation:
    """Result over a whole test set, counts summed over the workers.

    Attributes:
        accuracy: Fraction of samples (of pixels, where every pixel has a target) whose largest output is the target,
            0..1; where a sample may have several classes, of those whose positive outputs are exactly its classes; 0
            where targets are neither class numbers nor zeros and ones.
        loss: Mean loss.
        samples: Number of samples.
    """

    accuracy: float
    loss: float
    samples: int


@torch.no_grad()
def evaluate(
    forward: Callable[..., Any],
    loss: Callable[[Any, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    world: World,
    note: Callable[[Any, Tensor], object] | None = None,
    count: Callable[[Tensor], Tensor | float] | None = None,
) -> Evaluation:
    """Accuracy and loss over a test set; a collective."""
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)
    for inputs, targets in batches:
        outputs = forward(inputs)
        if outputs is None:  # of a stage that is not the last one
            continue
        result = loss(outputs, targets).double()
        samples = int(targets.shape[0])
        weighed = (result * samples, samples) if count is None else (result, count(targets))
        correct = _correct(outputs, targets)
        if note is not None:
            note(outputs, targets)
        values = (correct, *weighed, samples)
        sums += torch.stack([torch.as_tensor(value, device=sums.device).double() for value in values])
    everybodys: list[Any] = world.gather(sums.tolist())
    correct_sum, loss_sum, counted, total = map(sum, zip(*everybodys, strict=True))
    if total == 0:
        raise UsageError("the test set is empty", "An accuracy needs at least one sample.")
    return Evaluation(correct_sum / total, loss_sum / (counted or 1), round(total))


def _correct(outputs: Any, targets: Tensor) -> Tensor | float:
    """How many samples are right; one of many pixels counts as one."""
    try:
        scores: Tensor = main_output(outputs)
    except UsageError:  # the loss is the user's own
        return 0.0
    if scores.ndim == targets.ndim + 1:
        return (scores.argmax(dim=1) == targets).sum() * targets.shape[0] / max(1, targets.numel())
    if targets.ndim == 2 and scores.shape == targets.shape:
        several = ((targets == 0) | (targets == 1)).all()
        return ((scores > 0) == (targets > 0)).all(dim=1).sum() * several
    return 0.0
