"""The sum over workers that gradient sync uses, and its implementation by a process group of torch.

Which one a world uses is decided once, at the start.
"""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class SumGroup(Protocol):
    """Adds a tensor over all workers, in place. Calls come in the same order on all workers."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor, which is dense and 1-D, by its sum over the workers.

        On a CPU this blocks until the sum is there, on a GPU it is enqueued on the current stream.

        Raises:
            RuntimeError: A peer died or did not come in time.
        """

    def close(self) -> None:
        """Leave the group. Safe to call twice."""


class BackendSum(SumGroup):
    """All-reduce of a process group of torch.distributed, which stays its owner's to destroy."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        #: The process group.
        self.group = group

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def close(self) -> None:
        """Do nothing: the group belongs to its maker."""
