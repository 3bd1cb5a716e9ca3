"""Why: the time of a codec on a CPU is page faults, not arithmetic, if it makes new tensors at every step.

All coders that never work at the same time share one `Scratch`. It grows to what is asked and is never given back, and
the parts are small, because coders work on chunks that fit in a core's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Elements that a coder works on at a time: 256 KB of float32.
CHUNK = 1 << 16


class Scratch:
    """Tensors that are used again and again.

    Args:
        device: Where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, use: str, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A 1-D tensor with anything in it, valid until the same use is taken again.

        Args:
            use: What for. Different uses have different memory.
            count: Elements.
            dtype: Their type.
        """
        found = self._buffers.get((use, dtype))
        if found is None or found.numel() < count:
            found = torch.empty(count, dtype=dtype, device=self._device)
            self._buffers[use, dtype] = found
        return found[:count]
