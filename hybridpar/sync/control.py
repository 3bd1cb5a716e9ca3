"""The small messages by which workers agree on a step, and the step's outcome.

A stage sends two messages per step, summed over its replicas on a lane of their own. The *forward report* is sent after
its last forward pass, and overlaps with the backward pass. The *backward report* is sent after its last bucket. The sum
of squares in it is finite exactly where all gradients are, so one number serves the guard and clipping; all workers
read the same sum, so all decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridpar.errors import SyncError

# Layout of a forward report; BatchNorm sums follow.
LOSS, _SAMPLES, _STOP, SAVE, _LAYOUT, _LAYOUT_SQUARED, HEAD = range(7)
#: Place of the decision (1 or 0) and of the squared norm in the values of a step's outcome.
COMMIT, SQUARES = 4, 5


#: Lists that are kept; a training run needs a few for each size of batch. What is kept is never let go, because a
#: captured graph may read it.
_MOST = 4096


class Constants:
    """Short lists of numbers on a device. To be used on one lane, which orders the copy before its uses.

    Args:
        device: Where they are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[float, ...], Tensor] = {}

    def of(self, *values: float) -> Tensor:
        """The values as a 1-D float64 tensor, which others hold too: it must not be written to."""
        known = self._known.get(values)
        if known is None:
            known = torch.tensor(values, dtype=torch.float64).to(self._device)
            if len(self._known) < _MOST:
                self._known[values] = known
        return known


def start_copy(values: Tensor) -> Tensor:
    """A copy on the host, which is there when the current stream is; on a CPU the values themselves."""
    if values.device.type == "cpu":
        return values
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return copy.copy_(values, non_blocking=True)


def forward_report(
    loss: Tensor,
    samples: int,
    *,
    stop: bool = False,
    save: bool = False,
    layout: int,
    batch_norm: Tensor | None,
    flags: Tensor | None = None,
    constants: Constants | None = None,
) -> Tensor:
    """The message of a stage after its last forward pass, 1-D float64: `HEAD` numbers, then BatchNorm sums.

    Args:
        loss: This worker's part of the mean loss, 0-d.
        samples: Samples of this worker.
        stop: This worker wants to stop.
        save: This worker wants a checkpoint.
        layout: Fingerprint of the buckets, 16 bits.
        batch_norm: Sums of the BatchNorm layers.
        flags: `stop` and `save` as a float64 tensor on the device of the loss, instead of what the host says.
        constants: Numbers that were copied to the device before.
    """
    known = constants or Constants(loss.device)
    if flags is None:
        flags = known.of(float(stop), float(save))
    head = (loss.double().reshape(1), known.of(samples), flags, known.of(layout, layout * layout))
    return torch.cat(head if batch_norm is None else (*head, batch_norm))


def check_layout(report: Tensor, workers: int) -> None:
    """Refuse to go on where workers cut different buckets.

    All fingerprints h are equal exactly where K sum(h^2) = sum(h)^2; with 16 bits the sums are exact in float64.
    On a GPU nothing is checked, because reading the sums would stall it.

    Raises:
        SyncError: They differ.
    """
    if workers == 1 or report.device.type != "cpu":
        return
    head = report[:HEAD].tolist()
    if workers * head[_LAYOUT_SQUARED] != head[_LAYOUT] ** 2:
        raise SyncError(
            "the workers do not train the same parameters",
            "Names, shapes, memory formats and requires_grad of all parameters must be equal on all workers.",
            "Build and freeze the model in the same way on every worker.",
        )


def backward_report(squares: Tensor, used: Sequence[bool], constants: Constants | None = None) -> Tensor:
    """The message of a stage after its last bucket, 1-D float64.

    Args:
        squares: This worker's part of the squared norm of the gradient, 0-d float64.
        used: For each parameter whether this worker used it.
        constants: Numbers that were copied to the device before.
    """
    return torch.cat((squares.reshape(1), (constants or Constants(squares.device)).of(*used)))


def decide(report: Tensor, squares: Tensor, *, guard: bool, measured: bool) -> Tensor:
    """The values of a `StepOutcome`, from the summed reports.

    Args:
        report: The summed forward report.
        squares: Squared norm of the reduced gradient.
        guard: Whether a non-finite gradient rolls the step back.
        measured: Whether anybody computed the norm.
    """
    commit = torch.isfinite(squares).double() if guard else torch.ones_like(squares)
    known = squares if measured else torch.full_like(squares, -1.0)
    return torch.cat((report[: SAVE + 1], torch.stack((commit, known))))
