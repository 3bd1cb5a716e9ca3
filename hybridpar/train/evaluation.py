"""Accuracy and loss over a test set divided among workers, in which every sample counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.errors import UsageError
from hybridpar.models.outputs import main_output


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
