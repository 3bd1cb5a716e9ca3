"""The processes of a run with parameter servers: which of them this is, where the shards are, and serving one.

Of the W + K processes of a job the first W are workers and the last K are servers; with K = 0 every worker serves a
stripe beside its work. They find each other at the store of torch.distributed that the launcher hosts (ours,
torchrun's, or that of process 0 under any other launcher that sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and
`MASTER_PORT`).

At the start the workers exchange facts over that store, under a code of the job's token. Who replaces a worker that
died reads there what was decided then. Later workers that are in step exchange facts over shard 0, and each of the
others is a world by itself: worker 0 tests, and writes checkpoints, alone. A `ServerWorld` does so, that what is
written for workers in a process group runs unchanged: finding the run directory, testing, writing checkpoints.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hybridpar.comm.handshake import job_token
from hybridpar.comm.rendezvous import job_store
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, LaunchError, SyncError, UsageError, counted
from hybridpar.formats.messages import pack, unpack
from hybridpar.machine.addresses import address_towards
from hybridpar.machine.supervise import new_token
from hybridpar.optim.build import expand
from hybridpar.server.link import Servers
from hybridpar.server.rules import Rules
from hybridpar.server.serve import ShardServer

#: Seconds that workers wait for each other where some may be downloading a data set or weights.
_DOWNLOAD_SECONDS = 24 * 3600.0
_CODE_BYTES = hashlib.sha256().digest_size

#: Set by our launcher for a process that replaces a worker that died.
JOINS_VARIABLE = "HYBRIDPAR_JOINS"

#: Where servers say that all workers have left, and how many seconds after that they have said so.
_OVER, _OVER_SECONDS = "over", 5.0


@dataclass(frozen=True)
class Process:
    """What a process is.

    Attributes:
        rank: Its number among all processes.
        workers: Number of workers.
        servers: Number of server processes.
        store: Where the processes find each other; any process that reaches it can read and change it.
        token: What lets a worker in at a server.
        joins: Whether it replaces a worker that died.
    """

    rank: int
    workers: int
    servers: int
    store: Any
    token: str = field(repr=False)
    joins: bool = False

    @property
    def is_worker(self) -> bool:
        """Whether it trains."""
        return self.rank < self.workers

    def wait_for(self, key: str, timeout: float) -> bytes:
        """What another process has set under a key, once it has."""
        deadline = time.monotonic() + timeout
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                raise SyncError(
                    f"no process wrote {key!r} within {timeout:g} s", "All processes of a job must be started."
                )
            time.sleep(0.02)
        value: bytes = self.store.get(key)
        return value

    def is_over(self) -> bool:
        """Whether servers that cannot be reached have ended because all workers had left."""
        try:
            self.wait_for(_OVER, _OVER_SECONDS)
        except SyncError:
            return False
        return True

    def addresses(self, timeout: float) -> list[str]:
        """Address of every shard: of each server, or of each worker where there are none."""
        shards = range(self.servers or self.workers)
        return [self.wait_for(f"shard/{number}", timeout).decode() for number in shards]

    def open_server(self, config: TrainConfig) -> ShardServer:
        """The server of this process's shard; the others find its address."""
        number = self.rank - self.workers if self.servers else self.rank
        config = expand(config, total_steps=None, replicas=1)  # learning rates per sample
        server = ShardServer(config, Rules.of(config, self.workers), number, self.token, this_host())
        self.store.set(f"shard/{number}", server.address)
        return server

    def serve(self, config: TrainConfig) -> None:
        """Be a server until all workers have left."""
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        self.open_server(config).run()
        self.store.set(_OVER, "1")

    @contextlib.contextmanager
    def serving(self, config: TrainConfig) -> Iterator[None]:
        """Where there are no servers, serve this worker's shard on a thread, in the end until the others have left."""
        if self.servers:
            yield
            return
        server, given_up = self.open_server(config), threading.Event()

        def serve() -> None:
            with contextlib.suppress(HybridparError):  # all workers have heard of it
                server.run(given_up.is_set)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            given_up.set()  # the others will fail with this worker
            raise
        finally:
            thread.join(config.timeout)
            given_up.set()


def find_process(config: TrainConfig) -> Process:
    """What this process is, from the environment that a launcher made."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    assert config.parameter_servers is not None
    servers = config.parameter_servers.servers
    if size <= servers:
        raise UsageError(
            f"{counted(size, 'process')} and servers={servers}",
            "The last processes of a job are the servers; at least one more has to train.",
            "Start more processes, or say servers=0, with which every worker serves a stripe.",
        )
    config.parameter_servers.split_count(size - servers)
    if size == 1:
        return Process(0, 1, 0, dist.HashStore(), new_token())  # type: ignore[attr-defined]
    token = job_token()
    try:
        store = job_store(datetime.timedelta(seconds=config.timeout))
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise LaunchError(
            f"process {rank} of {size} cannot reach the launcher: {error}",
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must describe a job whose processes reach each other.",
            "Start with `hybridpar train --nproc N`, or with torchrun.",
        ) from error
    # Documented, but torch.distributed declares no exports.
    apart = dist.PrefixStore("servers", store)  # type: ignore[attr-defined]
    return Process(rank, size - servers, servers, apart, token, os.environ.get(JOINS_VARIABLE) == "1")


def this_host() -> str:
    """The address of this host by which the others of the job reach it."""
    host = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    if host.startswith("127.") and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return address_towards("192.0.2.1")  # by no name of ours: an address reserved for documentation, RFC 5737
    return host


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
