"""Puts the buffers of a model back when a step is rolled back.

Stock BatchNorm moves its running statistics in every forward call, and one NaN in them would stay for ever: training
goes on unharmed, and every evaluation after it is ruined. So the buffers that a forward pass may write to are copied
at the beginning of a step. They are small; what is pooled (`hybridpar.sync.batchnorm`) needs no copy.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class BufferRollback:
    """Puts the buffers of a model back to what they were at the beginning of a step.

    Args:
        model: The model.
        spared: Modules whose buffers no forward pass writes to.
    """

    def __init__(self, model: nn.Module, spared: Iterable[nn.Module] = ()) -> None:
        ignored = {id(buffer) for module in spared for buffer in module.buffers()}
        self._buffers = [buffer for buffer in model.buffers() if id(buffer) not in ignored]
        self._saved = [buffer.detach().clone() for buffer in self._buffers]

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the buffers; called before the first forward pass of a step."""
        if self._buffers:
            torch._foreach_copy_(self._saved, self._buffers)

    @torch.no_grad()
    def restore(self, unless: Tensor | None = None) -> None:
        """Put back what `keep` saw.

        Args:
            unless: Optional 0-d tensor; where it is not zero nothing changes. Keeps the decision on the device.
        """
        for saved, buffer in zip(self._saved, self._buffers, strict=True):
            buffer.copy_(saved if unless is None else torch.where(unless != 0, buffer, saved))
