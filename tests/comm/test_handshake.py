"""Who does not know the token learns nothing from a handshake that helps with another one."""

from __future__ import annotations

import pytest

from hybridpar.comm.handshake import (
    GREETING_BYTES,
    PROOF_BYTES,
    REPLY_BYTES,
    HandshakeError,
    ServerHandshake,
    WorkerHandshake,
    job_token,
)
from hybridpar.errors import UsageError
from hybridpar.machine.supervise import TOKEN_VARIABLE, new_token

HERE, THERE = "10.0.0.1:4000", "10.0.0.2:4000"


def test_both_ends_know_the_token():
    token = new_token()
    server, worker = ServerHandshake(token, HERE), WorkerHandshake(token, HERE)
    reply = worker.reply(server.greeting)
    proof = server.proof(reply)
    worker.check(proof)
    assert [len(one) for one in (server.greeting, reply, proof)] == [GREETING_BYTES, REPLY_BYTES, PROOF_BYTES]
    assert not any(token.encode() in one or bytes.fromhex(token) in one for one in (server.greeting, reply, proof))


@pytest.mark.parametrize(("token", "address"), [("another token of a job", HERE), ("the token of this job", THERE)])
def test_another_token_or_address_fails_at_both_ends(token, address):
    server, worker = ServerHandshake("the token of this job", HERE), WorkerHandshake(token, address)
    with pytest.raises(HandshakeError, match="does not know the job's token"):
        server.proof(worker.reply(server.greeting))
    with pytest.raises(HandshakeError, match="no server of this job"):
        worker.check(server.proof(WorkerHandshake("the token of this job", HERE).reply(server.greeting)))


def test_what_was_recorded_fits_no_other_connection():
    first, second = ServerHandshake("token", HERE), ServerHandshake("token", HERE)
    reply = WorkerHandshake("token", HERE).reply(first.greeting)
    proof = first.proof(reply)
    with pytest.raises(HandshakeError):
        second.proof(reply)
    later = WorkerHandshake("token", HERE)
    later.reply(first.greeting)
    with pytest.raises(HandshakeError):
        later.check(proof)


def test_a_servers_proof_is_no_workers_reply():
    """Else a stranger could let a server answer for it."""
    server = ServerHandshake("token", HERE)
    reply = WorkerHandshake("token", HERE).reply(server.greeting)
    with pytest.raises(HandshakeError):
        server.proof(reply[:32] + server.proof(reply))


@pytest.mark.parametrize("greeting", [b"", b"HTTP" + bytes(32), b"hyp1" + bytes(32), b"hyp2"])
def test_what_is_no_greeting_is_said_so(greeting):
    with pytest.raises(HandshakeError, match="no server of this version"):
        WorkerHandshake("token", HERE).reply(greeting)


def test_the_token_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "sixteen letters!")
    assert job_token() == "sixteen letters!"
    monkeypatch.setenv(TOKEN_VARIABLE, "guess me")
    with pytest.raises(UsageError, match="HYBRIDPAR_TOKEN has 8 characters"):
        job_token()
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(UsageError, match="HYBRIDPAR_TOKEN is not set"):
        job_token()
