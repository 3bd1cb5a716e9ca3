"""Training and evaluation mode belong to the user: who changes a module's mode for a while gives it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def same_modes(model: nn.Module) -> Iterator[None]:
    """Give every module of a model its own mode back on exit, whatever `train()` of any of them does."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
