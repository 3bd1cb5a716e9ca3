"""Runs the shard of a process, as a server of its own or on a thread beside a worker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from hybridpar.compress import read_policy
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError
from hybridpar.server.place import Place, own_host
from hybridpar.server.rules import Rules
from hybridpar.server.serve import ServerOptions, ShardServer
from hybridpar.server.stripe_optimizer import optimizer_of


def make_server(config: TrainConfig, place: Place) -> ShardServer:
    """The server of this process's shard, which tells the others where it listens."""
    assert place.shard is not None
    assert config.parameter_servers is not None
    options = ServerOptions(
        number=place.shard,
        rules=Rules.of(config, place.workers),
        optimizer=optimizer_of(config),
        policy=read_policy(config.compress),
        half=config.parameter_servers.pull == "fp16",
        token=place.token,
        timeout=config.timeout,
    )
    server = ShardServer(options, own_host())
    place.publish(server.address)
    return server


@contextlib.contextmanager
def own_shard(config: TrainConfig, place: Place) -> Iterator[None]:
    """Serve this process's shard on a thread, at the end until the others have left, too."""
    server, given_up = make_server(config, place), threading.Event()

    def serve() -> None:
        with contextlib.suppress(HybridparError):  # all workers have been told
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


def serve_shard(config: TrainConfig, place: Place) -> None:
    """Be a server until all workers have left."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    make_server(config, place).run()
    place.tell_over()
