"""Numbers that the host knows, copied to a device once: a copy per step would stall a stream and cannot be captured.

The numbers of a step (sizes of micro-batches, momenta, which parameters were used) are the same in nearly every step,
so each list of them is copied once and found again by its values.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
