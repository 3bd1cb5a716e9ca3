"""Accuracy and loss over a test set divided among workers, in which every sample counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.errors import UsageError
from hybridpar.models.outputs import main_output


@dataclass(frozen=True)
class Evaluation:
    """Result over a whole test set, counts summed over the workers.

    Attributes:
        accuracy: Fraction of samples (of pixels, where every pixel has a target) whose largest output is the target,
            0..1; 0 where targets are not class numbers, or the model returns no scores.
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
) -> Evaluation:
    """Accuracy and loss over a test set; a collective.

    Args:
        forward: The model, in evaluation mode.
        loss: Mean loss of outputs and targets.
        batches: This worker's share, on its device; shares may be uneven or empty, and must not overlap.
        world: The workers.

    Raises:
        UsageError: No worker has a single sample.
        SyncError: A worker died or did not answer in time.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    for inputs, targets in batches:
        outputs = forward(inputs)
        mean = loss(outputs, targets)
        count = int(targets.shape[0])
        hits = _hits(outputs, targets)
        correct = hits * count / max(1, targets.numel())  # a sample of many pixels counts as one
        values = (correct, mean.double() * count, count)
        sums += torch.stack([torch.as_tensor(value, device=sums.device).double() for value in values])
    if world.size > 1:
        with world.named_errors("adding up the evaluation"):
            dist.all_reduce(sums, group=world.control)
    correct_sum, loss_sum, total = sums.tolist()
    if total == 0:
        raise UsageError("the test set is empty", "An accuracy needs at least one sample.")
    return Evaluation(correct_sum / total, loss_sum / total, round(total))


def _hits(outputs: Any, targets: Tensor) -> Tensor | int:
    try:
        scores = main_output(outputs)
    except UsageError:  # the loss is the user's own
        return 0
    return (scores.argmax(dim=1) == targets).sum() if scores.ndim == targets.ndim + 1 else 0
