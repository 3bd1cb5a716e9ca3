"""Runs the shards of a process, as a server of its own or on threads beside a worker."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from hybridpar.compress import read_policy
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, SyncError
from hybridpar.server.peers import ServerOptions
from hybridpar.server.place import Place, own_host
from hybridpar.server.rules import Rules
from hybridpar.server.serve import ShardServer
from hybridpar.server.stripe_optimizer import optimizer_of
from hybridpar.server.stripes import MOST_PARTS

#: Where worker 0 tells how many shards a process holds, which follows from the model.
_PARTS = "parts"


class OwnShards:
    """The shards of this process, each on a thread; a context manager that stays until all workers have left.

    Args:
        config: The run's options.
        place: What this process is.
        parts: How many shards a process holds.

    Raises:
        UsageError: The options contradict the number of workers.
    """

    def __init__(self, config: TrainConfig, place: Place, parts: int) -> None:
        assert place.host is not None
        self._timeout = config.timeout
        self._given_up = threading.Event()
        self._problems: list[HybridparError] = []
        servers = []
        for number in range(place.host, place.hosts * parts, place.hosts):
            options = ServerOptions(
                number=number,
                shards=place.hosts * parts,
                rules=Rules.of(config, place.learners),
                optimizer=optimizer_of(config),
                policy=read_policy(config.compress),
                half=config.pull == "fp16",
                token=place.token,
                timeout=config.timeout,
            )
            servers.append(ShardServer(options, own_host()))
            place.publish(number, servers[-1].address)
        self._threads = [threading.Thread(target=self._serve, args=(one,), daemon=True) for one in servers]
        for thread in self._threads:
            thread.start()

    def _serve(self, server: ShardServer) -> None:
        try:
            server.run(self._given_up.is_set)
        except HybridparError as error:  # all workers have been told
            self._problems.append(error)
            self._given_up.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all workers have left.

        Args:
            timeout: Seconds.

        Raises:
            SyncError: An update waits for a worker that is gone.
        """
        for thread in self._threads:
            thread.join(timeout)
        if self._problems:
            raise self._problems[0]

    def __enter__(self) -> OwnShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Serve until the others have left, too; after an error they will fail with this worker."""
        if error is not None:
            self._given_up.set()
        for thread in self._threads:
            thread.join(self._timeout)
        self._given_up.set()


def tell_parts(place: Place, parts: int) -> None:
    """Worker 0: tell the servers how many shards each of them holds.

    Args:
        place: What this process is.
        parts: How many.
    """
    place.store.set(_PARTS, str(parts))


def serve_shards(config: TrainConfig, place: Place) -> None:
    """Be a server until all workers have left.

    Args:
        config: Options of the run.
        place: What this process is.

    Raises:
        SyncError: An update waits for a worker that is gone, or the store says what no worker writes.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    # Worker 0 says it once it has data and model, which may have to be downloaded; the launcher ends us if it dies.
    told = place.wait_for(_PARTS, float("inf"))
    most = MOST_PARTS * place.positions
    parts = int(told) if told.isascii() and told.isdigit() and len(told) <= len(str(most)) else 0
    if not 1 <= parts <= most:
        raise SyncError(
            f"{told[:20]!r} shards in a process",
            f"There are 1 to {most}.",
            "Another program writes to the store of this job; use a network that you trust.",
        )
    with OwnShards(config, place, parts) as own:
        own.wait()
    place.tell_over()
