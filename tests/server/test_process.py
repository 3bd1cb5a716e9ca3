"""Tests how workers of a run with parameter servers exchange facts before they come to the servers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridpar.errors import SyncError, UsageError
from hybridpar.formats.messages import pack
from hybridpar.server.process import Process, ServerWorld
from tests.server.serving import TOKEN, together


def worlds(store, token=TOKEN, address="here:1", timeout=5.0, **more):
    store.set("shard/0", address)
    return [ServerWorld(Process(rank, 3, 1, store, token, **more), torch.device("cpu"), timeout) for rank in range(3)]


def start(world, answer):
    return world.from_main(lambda: answer), world.gather(world.rank), world.from_main(lambda: 2 * answer)


def test_who_replaces_a_worker_hears_what_was_decided():
    store = dist.HashStore()
    assert together([lambda w=w: start(w, 1) for w in worlds(store)]) == [(1, [0, 1, 2], 2)] * 3
    for world in worlds(store, joins=True):
        assert start(world, 100) == (1, [0, 1, 2], 2)


def test_who_replaces_worker_0_decides_what_it_had_not_said():
    """Worker 0 dies when it has said that it had no problem, and before it says what it decided."""
    store = dist.HashStore()
    dying, *others = worlds(store)
    with mock.patch.object(dying, "_hear", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        start(dying, 1)
    instead = worlds(store, joins=True)[0]
    assert together([lambda w=w: start(w, 100) for w in (instead, *others)]) == [(100, [0, 1, 2], 200)] * 3


def test_a_problem_of_who_replaces_worker_0_is_raised_where_it_had_had_none():
    def fail():
        raise UsageError("the disk is full")

    store = dist.HashStore()
    for world in worlds(store):
        world._say(f"start/here:1/1/{world.rank}", pack(None))
    with pytest.raises(UsageError, match="the disk is full"):
        worlds(store, joins=True)[0].from_main(fail)


def test_another_attempt_decides_anew_where_the_store_is_still_there():
    store = dist.HashStore()
    for answer in (1, 100):
        heard = together([lambda w=w, a=answer: start(w, a) for w in worlds(store, address=f"here:{answer}")])
        assert heard == [(answer, [0, 1, 2], 2 * answer)] * 3


def test_an_error_of_one_worker_at_the_start_is_that_of_all():
    def fail(world):
        def act():
            if world.rank == 1:
                raise UsageError("worker 1 has no data")

        with pytest.raises(UsageError, match="worker 1 has no data"):
            world.on_all(act)

    together([lambda world=world: fail(world) for world in worlds(dist.HashStore())])


def test_who_does_not_come_is_an_error_unless_it_may_be_downloading():
    first = worlds(dist.HashStore(), timeout=0.1)[0]
    with pytest.raises(SyncError, match=r"no process wrote 'start/here:1/1/1' within 0.1 s"):
        first.gather(0)

    def wait(world):
        with world.patient():
            return world.gather(world.rank)

    first, second, third = worlds(dist.HashStore(), timeout=0.1)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait, world) for world in (first, second)]
        with pytest.raises(TimeoutError):
            waiting[0].result(0.3)
        assert wait(third) == waiting[0].result() == waiting[1].result() == [0, 1, 2]


def test_what_strangers_write_into_the_store_is_refused():
    store = dist.HashStore()
    worlds(store, "a token of somebody else")[0]._say("start/here:1/1/0", b"anything")
    with pytest.raises(SyncError, match="from nobody who knows the job's token"):
        worlds(store)[1].gather(None)
