"""Collectives over sockets give what those of a process group give, and their failures are told."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch

from hybridpar.compress import Collective, TorchGroup
from hybridpar.compress import sockets as module
from hybridpar.compress.sockets import SocketGroup, open_sockets
from tests.ranks import run_ranks


def compare(world):
    (mine,) = open_sockets(world.rank, range(world.size), world.gather, 20.0, 1)
    theirs, generator = TorchGroup(), torch.Generator().manual_seed(world.rank)
    try:
        for count in (1, 7, 8191, 3 << 18):
            for dtype in (torch.float32, torch.float64, torch.int32, torch.bfloat16):
                start = torch.randint(-99, 99, (count,), generator=generator).to(dtype)
                for collective in (Collective.SUM, Collective.MAX):
                    ours, other = start.clone(), start.clone()
                    mine.all_reduce(ours, collective)
                    theirs.all_reduce(other, collective)
                    assert torch.equal(ours, other), (count, dtype, collective)
            words = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
            ours, other = words.clone(), words.clone()
            mine.all_reduce(ours, Collective.AND)
            theirs.all_reduce(other, Collective.AND)
            assert torch.equal(ours, other)
            rows, other = (torch.empty(world.size * count, dtype=torch.uint8) for _ in range(2))
            mine.all_gather(rows, words)
            theirs.all_gather(other, words)
            assert torch.equal(rows, other)
        # What worker a sends b has a + 2 b elements; also none.
        sent = [world.rank + 2 * other for other in range(world.size)]
        received = [other + 2 * world.rank for other in range(world.size)]
        inp = torch.arange(sum(sent)) + 1000 * world.rank
        ours, other = torch.empty(sum(received), dtype=inp.dtype), torch.empty(sum(received), dtype=inp.dtype)
        mine.all_to_all(ours, inp, received, sent)
        theirs.all_to_all(other, inp, received, sent)
        assert torch.equal(ours, other)
        mine.all_reduce(torch.empty(0))
        return world.gather(None) and True
    finally:
        mine.close()
        mine.close()


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_give_what_a_process_group_gives(size):
    assert run_ranks(compare, size) == [True] * size


def pair(timeout=20.0):
    """Two groups of two workers in this process."""
    one, other = socket.socketpair()
    return SocketGroup(0, {1: one}, timeout), SocketGroup(1, {0: other}, timeout)


def test_a_peer_that_leaves_is_told():
    first, second = pair()
    second.close()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        first.all_reduce(torch.ones(4))


@pytest.mark.parametrize("count", [4, 1 << 22])
def test_a_silent_peer_is_told(count):
    first, second = pair(timeout=0.2)
    with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.2 s for a peer"):
        first.all_reduce(torch.ones(count))
    second.close()


@pytest.mark.parametrize("count", [4, 1 << 22])
def test_a_peer_that_is_busy_is_waited_for(count):
    one, other = socket.socketpair()
    asked, threads = [], []

    def wait_on():
        asked.append(True)
        if len(asked) == 2:
            second = SocketGroup(1, {0: other}, 20.0)
            threads.append(threading.Thread(target=second.all_reduce, args=[torch.ones(count)]))
            threads[0].start()
        return True

    first, mine = SocketGroup(0, {1: one}, 0.05, wait_on), torch.ones(count)
    first.all_reduce(mine)
    threads[0].join(20)
    assert len(asked) >= 2
    assert mine.eq(2).all()


def test_a_group_that_is_left_ends_the_wait_of_another_thread():
    first, second = pair()
    errors = []

    def wait():
        try:
            first.all_reduce(torch.ones(4))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    second._peers[0].recv(1, socket.MSG_PEEK)  # its message has left
    first.close()
    thread.join(20)
    assert errors
    with pytest.raises(RuntimeError, match="has left the job"):
        first.all_reduce(torch.ones(4))


def test_a_caller_without_the_token_is_turned_away():
    door = module._listen(4)
    deadline, token = time.monotonic() + 20, "ab" * module._TOKEN_BYTES
    address, port = door.getsockname()[:2]
    stranger = socket.create_connection((address, port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b" " * module._HEADER.size)
    silent = socket.create_connection((address, port))
    friend = module._call((address, port, token), 1, 0, deadline)
    peers = [{}]
    module._answer(door, token, peers, 1, deadline)
    assert list(peers[0]) == [1]
    stranger.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    for one in (door, stranger, silent, friend, peers[0][1]):
        one.close()


def cannot_listen(world):
    before = module.gloo_address
    if world.rank == 1:
        module.gloo_address = lambda: "192.0.2.1"
    try:
        open_sockets(world.rank, range(world.size), world.gather, 20.0, 1)
    except OSError as error:
        return str(error)
    finally:
        module.gloo_address = before
    return ""


def test_where_one_worker_cannot_listen_all_are_told():
    answers = run_ranks(cannot_listen, 2)
    assert answers[0] == answers[1]
    assert "worker 1 cannot listen" in answers[0]


def test_a_silent_peer_is_told_also_where_another_is_done_and_leaves():
    (one, first), (two, second) = socket.socketpair(), socket.socketpair()
    group, count = SocketGroup(0, {1: one, 2: two}, 0.3), 1 << 22

    def take_part_and_leave():
        first.sendall(bytes(count))
        left = count
        while left:
            left -= len(first.recv(left))
        first.close()

    thread = threading.Thread(target=take_part_and_leave)
    thread.start()
    with pytest.raises(RuntimeError, match="Timed out"):
        group.all_gather(torch.empty(3 * count, dtype=torch.uint8), torch.zeros(count, dtype=torch.uint8))
    thread.join()
    group.close()
    second.close()


def test_a_poll_that_reports_what_is_not_there_ends_nothing(monkeypatch):
    def poll():
        real = select_poll()
        return Mock(wraps=real, poll=lambda wait: [(one, event | select.POLLIN) for one, event in real.poll(wait)])

    select_poll = select.poll
    monkeypatch.setattr(module.select, "poll", poll)
    first, second = pair()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(one.all_reduce, torch.ones(1 << 22)) for one in (first, second)]:
            done.result()
    first.close()
    second.close()
