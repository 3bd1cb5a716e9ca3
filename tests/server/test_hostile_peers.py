"""Whatever strangers send, a server goes on, and its worker gets what it would have got without them."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import random
import re
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hybridpar.comm.handshake import knock
from hybridpar.errors import SyncError
from hybridpar.formats.messages import take_apart, tensor_facts
from hybridpar.server import Rules, serve
from tests.server.serving import TOKEN, Served, Worker, copies, serving

RULES = Rules.soft(2, 2)


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(RULES) as made:
        yield made
    assert not made.problems


@pytest.fixture
def worker(served: Served) -> Iterator[Worker]:
    (model,) = copies(1)
    made = Worker(served, 0, model, RULES)
    made.begin()
    made.step(0)
    yield made
    made.close()


def assert_served(worker: Worker) -> None:
    """It goes on, bit for bit as one that nobody disturbs."""
    worker.step(1)
    with serving(RULES) as other:
        alone = Worker(other, 0, copies(1)[0], RULES)
        alone.begin()
        alone.step(0), alone.step(1)
        pairs = zip(worker.model.state_dict().values(), alone.model.state_dict().values(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
        alone.close()


def connect(served: Served) -> socket.socket:
    server = served.servers[0]
    made = socket.create_connection((server.host, server.port), 10)
    return made


def shaken(served: Served, token: str = TOKEN) -> socket.socket:
    """A connection of somebody who knows the token."""
    made = connect(served)
    knock(made, token, served.servers[0].address)
    return made


def strangers(served: Served) -> list[object]:
    return list(served.servers[0]._door._strangers)


def received(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        assert more, "closed too early"
        found += more
    return found


def assert_closed(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError), connection:  # closed with bytes unread
        while connection.recv(1 << 16):
            pass


def sent(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # closed before all of it was there
        connection.sendall(data)


def frame(kind: str, fields: object = None, size: int | None = None, magic: bytes = b"hyp3") -> bytes:
    """A message as it is on the wire; `size` says something else of its tensors than is true."""
    text, tensors = take_apart(fields or {})
    head = json.dumps([kind, text, tensor_facts(tensors)]).encode()
    data = b"".join(one.numpy().tobytes() for one in tensors)
    return struct.pack("!4sIQ", magic, len(head), len(data) if size is None else size) + head + data


def garbage(text: bytes, size: int = 0) -> bytes:
    return struct.pack("!4sIQ", b"hyp3", len(text), size) + text


HELLO = {
    "worker": 1,
    "model": "f",
    "policy": "none",
}
PUSH = {"learner": 1, "sequence": 1, "clock": 0, "pieces": []}
HOSTILE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    frame("Gradient", PUSH, 1 << 40),
    frame("Hello", HELLO, (1 << 64) - 1),
    garbage(b"[" * 200_000),
    garbage(b'{"kind":' * 50_000),
    garbage(b"\xff\xfe"),
    garbage(json.dumps(["Hello", "{}", [[[1 << 40], "float32"]]]).encode()),
    garbage(json.dumps(["Hello", "{}", [[[-1], "float32"]]]).encode()),
    garbage(json.dumps(["Hello", "{}", [[[1], "no such"]]]).encode(), 4),
    garbage(json.dumps(["Hello", json.dumps({"fields": ["os:system", {}]}), []]).encode()),
    frame("Hello"),
    frame("Hello", {**HELLO, "worker": 2}),
    frame("Hello", {**HELLO, "worker": "x"}),
    frame("Hello", {**HELLO, "worker": 1e400}),
    frame("Gradient", PUSH),
    frame("GatherItem", {"tag": "a/0", "item": 1}),
    frame("Start", {"state": {"values": torch.zeros(3)}}),
    frame("Bye"),
    frame("no such"),
    frame("Gradient", {**PUSH, "pieces": [torch.zeros(100)]})[:-50],
    frame("Hello", HELLO, magic=b"hyp9"),
]


@pytest.mark.parametrize("known", [False, True], ids=["strangers", "with the token"])
def test_no_bytes_end_a_server(served, worker, known, caplog):
    draw = random.Random(0)
    drawn = [draw.randbytes(draw.randint(1, 200)) for _ in range(60)]
    heads = [frame("Hello", HELLO)[: draw.randint(1, 40)] for _ in range(30)]
    with caplog.at_level(logging.WARNING):
        for data in [*HOSTILE, *drawn, *heads]:
            connection = shaken(served) if known else connect(served)
            sent(connection, data)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            assert_closed(connection)
    assert_served(worker)
    texts = [record.getMessage() for record in caplog.records]
    if known:
        for reason in (r"a message of \d+ \+ 1099511627776 bytes, at most \d+ \+ \d+ are", "Hello with fields that do"):
            assert any(re.search(f"closed the connection of a process: {reason}", text) for text in texts)
    else:
        assert len(texts) == 1, "one line for all that come from one place"
        assert "refused a connection from 127.0.0.1" in texts[0]


@pytest.mark.parametrize(
    "wrong",
    [
        frame("Gradient", PUSH, 1 << 40),
        frame("Gradient", PUSH),
        frame("Gradient", {**PUSH, "pieces": [torch.zeros(4)]}),
        frame("Gradient", {**PUSH, "pieces": [[torch.zeros(4)]]}),
        frame("Gradient", {**PUSH, "learner": 0}),
        frame("Gradient", {**PUSH, "clock": 99}),
        frame("Gradient", {**PUSH, "samples": "many"}),
        frame("GatherItem", {"tag": "a/0", "item": None}, 1 << 30),
        frame("Squares", {"squares": 1.0}),
        frame("Start", {**PUSH}),
        frame("Hello", {**HELLO, "worker": 5}),
        frame("Missing"),
    ],
    ids=itertools.count(),
)
def test_a_worker_that_goes_wrong_is_gone_and_the_others_go_on(served, worker, wrong):
    (model,) = copies(1)
    other = Worker(served, 1, model, RULES)
    other.begin()
    link = other.servers.links[0]
    sent(link._connection.socket, wrong)
    assert_closed(link._connection.socket.dup())
    assert_served(worker)
    assert served.servers[0]._workers.keys() == {0}
    other.servers.close(graceful=False)


def test_a_wrong_token_is_refused_and_the_worker_is_told_what_to_look_at(served, worker, monkeypatch):
    monkeypatch.setattr("tests.server.serving.TOKEN", "something else entirely")
    late = Worker(served, 1, copies(1)[0], RULES)
    with pytest.raises(SyncError, match="did not let this worker in; HYBRIDPAR_TOKEN must be equal everywhere"):
        late.begin()
    late.close(graceful=False)
    assert_served(worker)


def test_a_worker_tells_nothing_to_a_server_that_does_not_know_the_token():
    with socket.create_server(("127.0.0.1", 0)) as door, serving(RULES) as served, ThreadPoolExecutor(1) as thread:
        door.settimeout(10)
        served.servers[0].host, served.servers[0].port = door.getsockname()
        late = Worker(served, 0, copies(1)[0], RULES)
        future = thread.submit(late.begin)
        stranger, _ = door.accept()
        stranger.sendall(b"hyp2" + bytes(32))
        reply = received(stranger, 64)
        assert TOKEN.encode() not in reply
        stranger.sendall(reply[32:])
        with pytest.raises(SyncError, match="no server of this job"):
            future.result(10)
        late.close(graceful=False)
        assert stranger.recv(10) == b""
        stranger.close()


def test_who_is_slow_to_reply_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(serve, "HANDSHAKE_SECONDS", 1.0)
    with serving(RULES) as served:
        worker = Worker(served, 0, copies(1)[0], RULES)
        worker.begin()
        silent, slow = connect(served), connect(served)
        received(silent, 36), received(slow, 36)
        slow.sendall(bytes(10))
        worker.step(0)
        assert_closed(silent), assert_closed(slow)
        assert_served(worker)
        worker.close()
