"""Why: a server is a process like any other of the job, or a thread beside a worker that masters a stripe itself."""

from __future__ import annotations

import logging
import os
import threading
from types import TracebackType

import torch

from hybridpar.compress import read_policy
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError
from hybridpar.server.optimize import optimizer_of
from hybridpar.server.place import Place, own_host
from hybridpar.server.rules import Rules
from hybridpar.server.serve import ServerOptions, ShardServer

_log = logging.getLogger(__name__)


def open_server(config: TrainConfig, place: Place) -> ShardServer:
    """Open the shard that is this process's, and tell the others where it is.

    Raises:
        UsageError: The options contradict the number of workers.
    """
    assert place.shard is not None
    options = ServerOptions(
        number=place.shard,
        shards=place.shards,
        rules=Rules.of(config, place.workers),
        optimizer=optimizer_of(config),
        policy=read_policy(config.compress),
        half=config.pull == "fp16",
        token=os.urandom(16).hex(),
        timeout=config.timeout,
    )
    server = ShardServer(options, own_host())
    place.publish(server.address, options.token)
    return server


def serve_shard(config: TrainConfig, place: Place) -> None:
    """Be a server until all workers have left.

    Raises:
        SyncError: An update waits for a worker that is gone.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    open_server(config, place).run()


class OwnShard:
    """A shard on a thread of this worker.

    Args:
        config: The run's options.
        place: What this process is.
    """

    def __init__(self, config: TrainConfig, place: Place) -> None:
        self._server = open_server(config, place)
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shard", daemon=True)
        self._timeout = config.timeout
        self._thread.start()

    def _run(self) -> None:
        try:
            self._server.run(self._given_up.is_set)
        except HybridparError as error:
            _log.debug("the shard of this worker ended: %s", error)  # all workers have been told, this one too

    def __enter__(self) -> OwnShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Serve until the others have left, too; after an error they will fail with us."""
        if error is not None:
            self._given_up.set()
        self._thread.join(self._timeout)
        self._given_up.set()
        self._thread.join(5)
