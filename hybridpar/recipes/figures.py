"""Why: the best number of workers follows from figures of one worker, and a model and a batch are all they need."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridpar.errors import UsageError
from hybridpar.recipes.gain import BestWorkers, best_workers

#: Times that are taken of each figure; the median counts.
REPEATS = 5


@dataclass(frozen=True)
class WorkerFigures:
    """What `best_workers` wants of a model on a device.

    Attributes:
        sample_s: T_frm, seconds of forward and backward pass per sample.
        pass_s: T_post, seconds of one element-wise pass over the model.
        update_s: T_upd, seconds to add an update to the model.
        gradient_bytes: Of all gradients as they are.
    """

    sample_s: float
    pass_s: float
    update_s: float
    gradient_bytes: int

    def best(
        self, samples: int, bytes_per_second: float, compression: float = 1.0, *, passes: float = 3, half: bool = True
    ) -> BestWorkers:
        """The number of workers at which a link is saturated.

        Args:
            samples: Of a minibatch over all workers.
            bytes_per_second: What the link of a worker carries. An exchange by stripes sends and receives all gradients
                twice, whatever the number of workers, but for the own stripe.
            compression: What the bytes are divided by.
            passes: See `best_workers`.
            half: See `best_workers`.

        Raises:
            UsageError: The link carries nothing, or another figure is none.
        """
        if not bytes_per_second > 0:
            raise UsageError(f"a link of {bytes_per_second} bytes per second", "It is greater than 0.")
        return best_workers(
            samples,
            self.sample_s,
            passes=passes,
            pass_s=self.pass_s,
            float_s=2 * self.gradient_bytes / bytes_per_second,
            compression=compression,
            update_s=self.update_s,
            half=half,
        )


def measure_figures(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> WorkerFigures:
    """Measure a model on the device where it is; its weights, gradients and buffers stay as they are.

    Args:
        model: The model.
        inputs: Of a worker's part of a batch, on that device.
        targets: Likewise.
        loss: Mean loss of outputs and targets; default: cross-entropy.
    """
    parameters = [one for one in model.parameters() if one.requires_grad]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    measure = loss or nn.functional.cross_entropy

    def compute() -> None:
        torch.autograd.grad(measure(model(inputs), targets), parameters, allow_unused=True)

    flat = torch.cat([one.detach().reshape(-1) for one in parameters])
    other = torch.zeros_like(flat)
    copies = [one.detach().clone() for one in parameters]
    updates = [torch.zeros_like(one) for one in copies]

    def update() -> None:
        torch._foreach_add_(copies, updates, alpha=-1.0)

    figures = WorkerFigures(
        sample_s=_seconds(compute, inputs.device) / inputs.shape[0],
        pass_s=_seconds(lambda: other.mul_(0.9).add_(flat), inputs.device) / 2,
        update_s=_seconds(update, inputs.device),
        gradient_bytes=flat.numel() * flat.element_size(),
    )
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return figures


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time of some work, after a first time that does not count."""
    times = []
    for number in range(REPEATS + 1):
        _synchronise(device)
        started = time.perf_counter()
        work()
        _synchronise(device)
        if number:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
