"""The workers of a run with parameter servers, as a `World`, so that what is written for workers in a process group
runs unchanged with them: finding the run directory, testing, writing checkpoints.

At the start they exchange facts over the store of the launcher, under a code of the job's token. Who replaces a worker
that died reads there what was decided then. Later workers that are in step exchange facts over shard 0, and
each of the others is a world by itself: worker 0 tests, and writes checkpoints, alone.
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

#: Seconds that workers wait for each other where some may be downloading a data set or weights.
_DOWNLOAD_SECONDS = 24 * 3600.0
_CODE_BYTES = hashlib.sha256().digest_size


class ServerWorld(World):
    """The workers of a run with servers."""

    def __init__(self, process: Process, device: torch.device, timeout: float) -> None:
        super().__init__(process.rank, process.workers, device, timeout)
        self.process, self.addresses = process, process.addresses(timeout)
        self._servers: Servers | None = None  # until the start is over
        self._patience = timeout
        # A store may outlive an attempt to train, and the servers of that do not.
        self._occasion, self._number = f"start/{self.addresses[0]}", 0

    def go_over(self, servers: Servers) -> None:
        """The start is over: workers in step exchange facts over shard 0, and others none."""
        self._servers, self._occasion, self._number = servers, "run", 0
        if not servers.barrier:
            self.rank, self.size, self.members = 0, 1, (self.rank,)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, this worker exchanges nothing with the others."""
        usual, self._occasion = self._occasion, ""
        try:
            yield
        finally:
            self._occasion = usual

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Inside, workers wait for each other for as long as a download may take."""
        self._patience = _DOWNLOAD_SECONDS
        try:
            yield
        finally:
            self._patience = self.timeout

    def gather(self, item: object) -> list[object]:
        """Every worker's item, by rank."""
        if self.size == 1 or not self._occasion:
            return [item]
        self._number += 1
        tag = f"{self._occasion}/{self._number}"
        if self._servers is None:
            self._say(f"{tag}/{self.rank}", pack(item))
            return [unpack(self._hear(f"{tag}/{rank}")) for rank in range(self.size)]
        return list(self._servers.gather(tag, item).values())

    def from_main(self, decide: Callable[[], _T], *, long: bool = False) -> _T:
        """What worker 0 decides, or decided before the worker died that this process replaces."""
        # First all say whether they had a problem, then worker 0 what it decided; it may have died between the two.
        if self._servers is None and self._is_said(f"{self._occasion}/{self._number + 2}/0"):
            return super().from_main(lambda: None, long=long)  # type: ignore[return-value]
        return super().from_main(decide, long=long)

    def _say(self, key: str, data: bytes) -> None:
        if not self._is_said(key):
            self.process.store.set(key, self._code(key, data) + data)

    def _is_said(self, key: str) -> bool:
        """Whether the worker that died, which this one replaces, has said something at the start."""
        return self.process.joins and bool(self.process.store.check([key]))

    def _hear(self, key: str) -> bytes:
        sealed = self.process.wait_for(key, self._patience)
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
