"""Who does not know the token learns nothing from a handshake that helps with another one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from hybridpar.comm.handshake import HandshakeError, job_token, knock, let_in
from hybridpar.errors import UsageError
from hybridpar.machine.supervise import TOKEN_VARIABLE, new_token

HERE, THERE = "10.0.0.1:4000", "10.0.0.2:4000"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A server's end of a connection, and a worker's."""
    server, worker = socket.socketpair()
    with server, worker:
        server.settimeout(10), worker.settimeout(10)
        yield server, worker


def received(connection: socket.socket, count: int) -> bytes:
    return connection.recv(count, socket.MSG_WAITALL)


def served(connection: socket.socket, token: str = "token", more: int = 0) -> Future[bytes]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(let_in, connection, token, HERE, 10.0, more)
    pool.shutdown(wait=False)
    return future


def replies(pair, greeting: bytes) -> bytes:
    """What a worker replies to a greeting."""
    server, worker = pair
    server.sendall(greeting)
    pool = ThreadPoolExecutor(1)
    pool.submit(knock, worker, "token", HERE)
    pool.shutdown(wait=False)
    return received(server, 64)


def test_both_ends_know_the_token_and_the_worker_says_more(pair):
    token = new_token()
    future = served(pair[0], token, 5)
    knock(pair[1], token, HERE, b"hello")
    assert future.result(10) == b"hello"


@pytest.mark.parametrize(("token", "address"), [("another token of a job", HERE), ("the token of this job", THERE)])
def test_another_token_or_address_fails_at_both_ends(pair, token, address):
    future = served(pair[0], "the token of this job")
    pool = ThreadPoolExecutor(1)
    worker = pool.submit(knock, pair[1], token, address)
    with pytest.raises(HandshakeError, match="does not know the job's token"):
        future.result(10)
    pair[0].sendall(bytes(32))
    with pytest.raises(HandshakeError, match="no server of this job"):
        worker.result(10)


def test_what_was_recorded_fits_no_other_connection(pair):
    first = replies(pair, b"hyp2" + bytes(32))
    server, worker = socket.socketpair()
    with server, worker:
        future = served(server)
        assert first not in received(worker, 36)
        worker.sendall(first)
        with pytest.raises(HandshakeError):
            future.result(10)


@pytest.mark.parametrize("greeting", [b"HTTP" + bytes(32), b"hyp1" + bytes(32)])
def test_what_is_no_greeting_is_said_so(pair, greeting):
    pair[0].sendall(greeting)
    with pytest.raises(HandshakeError, match="no server of this version"):
        knock(pair[1], "token", HERE)


def test_the_token_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "sixteen letters!")
    assert job_token() == "sixteen letters!"
    monkeypatch.setenv(TOKEN_VARIABLE, "guess me")
    with pytest.raises(UsageError, match="HYBRIDPAR_TOKEN has 8 characters"):
        job_token()
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(UsageError, match="HYBRIDPAR_TOKEN is not set"):
        job_token()
