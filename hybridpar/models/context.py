"""The seed under which a model is built, and the precision in which it runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_everything(seed: int) -> None:
    """Seed torch on all devices, so that a model built next is the same everywhere.

    Args:
        seed: The seed.
    """
    import torch

    torch.manual_seed(seed)


def autocast(amp: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a model's forward pass runs.

    Args:
        amp: `none`, `bf16` or `fp16`, the option `--amp`.
        device: The model's device.

    Returns:
        Autocast to bfloat16 or float16, or a context that does nothing.
    """
    import torch

    if amp == "none":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if amp == "bf16" else torch.float16)
