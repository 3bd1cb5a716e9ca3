"""The workers of a run with parameter servers, as a `World`, so that what is written for workers in a process group
runs unchanged with them: finding the run directory, testing, writing checkpoints.

At the start they exchange facts over the store of the launcher, under a code of the job's token. Who takes the place of
a worker that died finds there what was decided then. Later facts go over shard 0: between all workers where these are
in step, and else on occasions alone, such as a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from hybridpar.comm.world import World
from hybridpar.errors import SyncError
from hybridpar.formats.messages import pack, unpack
from hybridpar.server.link import Servers
from hybridpar.server.process import Process

_T = TypeVar("_T")

#: Seconds that workers wait for each other at the start, when worker 0 may be downloading a data set.
_START_SECONDS = 24 * 3600.0
_CODE_BYTES = hashlib.sha256().digest_size


class ServerWorld(World):
    """The workers of a run with servers."""

    def __init__(self, process: Process, device: torch.device, timeout: float) -> None:
        super().__init__(process.rank, process.workers, device, timeout)
        self.process = process
        self._servers: Servers | None = None  # until the start is over
        self._occasion, self._number = "start", 0

    def go_over(self, servers: Servers) -> None:
        """The start is over: exchange facts over shard 0."""
        self._servers, self._occasion, self._number = servers, "run" if servers.barrier else "", 0

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, this worker exchanges nothing with the others."""
        usual, self._occasion = self._occasion, ""
        try:
            yield
        finally:
            self._occasion = usual

    @contextlib.contextmanager
    def meeting(self, occasion: str) -> Iterator[None]:
        """Inside, the workers that take part in an occasion exchange facts; those that are in step always do."""
        assert self._servers is not None
        if self._servers.barrier:
            yield
            return
        usual = self.rank, self.size, self.members
        there = tuple(self._servers.gather(f"{occasion}/0", None))
        if 0 not in there:
            raise SyncError(f"worker 0 is gone, without which nothing comes of {occasion!r}")
        self.rank, self.size, self.members = there.index(self.rank), len(there), there
        self._occasion, self._number = occasion, 0
        try:
            yield
        finally:
            self.rank, self.size, self.members = usual
            self._occasion = ""

    def gather(self, item: object) -> list[object]:
        """Every worker's item, by rank; only this worker's where workers are not in step and meet on no occasion."""
        if not self._occasion:
            return [item]
        self._number += 1
        tag = f"{self._occasion}/{self._number}"
        if self._servers is None:
            self._say(f"{tag}/{self.rank}", pack(item))
            return [unpack(self._hear(f"{tag}/{rank}")) for rank in range(self.size)]
        items = self._servers.gather(tag, item)
        if tuple(items) != self.members:
            raise SyncError(
                f"of workers {list(self.members)} only {list(items)} are left in the middle of {self._occasion!r}",
                "What workers do together needs all who began it.",
                "It is tried again the next time.",
            )
        return list(items.values())

    def from_main(self, decide: Callable[[], _T], patience: float | None = None) -> _T:
        """What worker 0 decides, or has decided before the worker died whose place this one takes."""
        if self._servers is None and self.process.store.check([f"{self._occasion}/{self._number + 1}/{self.rank}"]):
            return super().from_main(lambda: None, patience)  # type: ignore[return-value]
        return super().from_main(decide, patience)

    def _say(self, key: str, data: bytes) -> None:
        """Tell the others something at the start; the first time counts."""
        if not self.process.store.check([key]):
            self.process.store.set(key, self._code(key, data) + data)

    def _hear(self, key: str) -> bytes:
        sealed = self.process.wait_for(key, _START_SECONDS)
        code, data = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(key, data)):
            raise SyncError(
                f"what is at {key!r} in the launcher's store is from nobody who knows the job's token",
                "Anybody who reaches the store can write to it.",
                "Set the same HYBRIDPAR_TOKEN on all hosts, and keep strangers out of the network.",
            )
        return data

    def _code(self, key: str, data: bytes) -> bytes:
        return hmac.new(self.process.token.encode(), key.encode() + data, hashlib.sha256).digest()
