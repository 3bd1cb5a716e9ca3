"""A `World` of the workers of a run with parameter servers, which exchange facts over shard 0.

Code that was written for workers in a process group, such as writing checkpoints, runs unchanged with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hybridpar.comm.world import World
from hybridpar.errors import SyncError
from hybridpar.server.shard_link import ShardLink
from hybridpar.server.wire import unpack


class PresentWorkers(World):
    """The workers that take part in one occasion, and exchange facts over shard 0."""

    def __init__(
        self,
        meet: Callable[[str, object], tuple[list[int], list[object]]],
        occasion: str,
        worker: int,
        workers: Sequence[int],
        device: torch.device,
        timeout: float,
    ) -> None:
        super().__init__(workers.index(worker), len(workers), device, timeout, members=tuple(workers))
        self._meet, self._occasion, self._number = meet, occasion, 0

    def gather(self, item: object) -> list[object]:
        """Exchange an item with all workers of the occasion."""
        self._number += 1
        workers, items = self._meet(f"{self._occasion}/{self._number}", item)
        if tuple(workers) != self.members:
            raise SyncError(
                f"of workers {list(self.members)} only {workers} are left in the middle of {self._occasion!r}",
                "What workers do together needs all who began it.",
                "It is tried again the next time.",
            )
        return items


def exchange(link: ShardLink, tag: str, item: object) -> tuple[list[int], list[object]]:
    """Tell all workers something, and hear what they say under the same tag."""
    meta, payload = link.submit(link.ask, {"kind": "gather", "tag": tag}, [item]).result()
    items = [item for part in torch.split(payload, meta["sizes"]) for item in unpack(part)]
    return list(meta["workers"]), items
