"""A `World` of the workers of a run with parameter servers, which exchange facts over shard 0.

Code that was written for workers in a process group, such as writing checkpoints, runs unchanged with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridpar.comm.world import World
from hybridpar.errors import SyncError
from hybridpar.server.link import Links


class PresentWorkers(World):
    """The workers that take part in one occasion."""

    def __init__(
        self, links: Links, occasion: str, worker: int, workers: Sequence[int], device: torch.device, timeout: float
    ) -> None:
        super().__init__(workers.index(worker), len(workers), device, timeout, members=tuple(workers))
        self._links, self._occasion, self._number = links, occasion, 0

    def gather(self, item: object) -> list[object]:
        """Exchange an item with all workers of the occasion."""
        self._number += 1
        items = self._links.gather(f"{self._occasion}/{self._number}", item)
        if tuple(items) != self.members:
            raise SyncError(
                f"of workers {list(self.members)} only {list(items)} are left in the middle of {self._occasion!r}",
                "What workers do together needs all who began it.",
                "It is tried again the next time.",
            )
        return list(items.values())
