"""Tests how workers of a run with parameter servers exchange facts before they come to the servers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hybridpar.errors import SyncError, UsageError
from hybridpar.server.process import Process
from hybridpar.server.world import ServerWorld
from tests.server.serving import TOKEN, together


def worlds(store, token=TOKEN):
    return [ServerWorld(Process(rank, 3, 1, store, token), torch.device("cpu"), 5.0) for rank in range(3)]


def test_who_takes_the_place_of_a_worker_hears_what_was_decided():
    store = dist.HashStore()

    def start(world, answer):
        return world.from_main(lambda: answer), world.gather(world.rank), world.from_main(lambda: 2 * answer)

    for answer in (1, 100):  # of the second start nothing is taken
        heard = together([lambda world=world, answer=answer: start(world, answer) for world in worlds(store)])
        assert heard == [(1, [0, 1, 2], 2)] * 3


def test_an_error_of_one_worker_at_the_start_is_that_of_all():
    def start(world):
        def act():
            if world.rank == 1:
                raise UsageError("worker 1 has no data")

        with pytest.raises(UsageError, match="worker 1 has no data"):
            world.on_all(act)

    together([lambda world=world: start(world) for world in worlds(dist.HashStore())])


def test_what_strangers_write_into_the_store_is_refused():
    store = dist.HashStore()
    worlds(store, "a token of somebody else")[0]._say("start/1/0", b"anything")
    with pytest.raises(SyncError, match="from nobody who knows the job's token"):
        worlds(store)[0].gather(None)
