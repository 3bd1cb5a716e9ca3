"""The fingerprint of a model's architecture, by which plans, profiles and checkpoints know it, and its size."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def model_fingerprint(model: nn.Module) -> str:
    """Sixteen hex digits over names, shapes and dtypes of all parameters and persistent buffers, in order.

    Values do not count: the same architecture has the same fingerprint before and after training.

    Args:
        model: The model.

    Returns:
        The fingerprint.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
    return digest.hexdigest()[:16]


def parameter_count(model: nn.Module) -> int:
    """Number of elements in all parameters; a shared one counts once.

    Args:
        model: The model.

    Returns:
        The number.
    """
    return sum(parameter.numel() for parameter in model.parameters())
