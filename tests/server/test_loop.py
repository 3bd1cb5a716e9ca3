"""Whatever strangers send, a server goes on, and its worker gets what it would have got without them."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hybridpar.comm.handshake import GREETING_BYTES, PROOF_BYTES, WorkerHandshake
from hybridpar.errors import SyncError
from hybridpar.formats.messages import pack
from hybridpar.server import Rules
from hybridpar.server.loop import HANDSHAKE_SECONDS
from tests.server.serving import TOKEN, Clock, Served, Worker, copies, serving

RULES = Rules.asynchronous(2)


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
    made, handshake = connect(served), WorkerHandshake(token, served.servers[0].address)
    made.sendall(handshake.reply(received(made, GREETING_BYTES)))
    handshake.check(received(made, PROOF_BYTES))
    return made


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


def frame(meta: object, length: int = 0, payload: bytes = b"", magic: bytes = b"hyp1") -> bytes:
    text = meta if isinstance(meta, bytes) else json.dumps(meta).encode()
    return struct.pack("!4sIQ", magic, len(text), length or len(payload)) + text + payload


HELLO = {
    "kind": "hello",
    "worker": 1,
    "session": "s",
    "fingerprint": "f",
    "stripe": "s",
    "policy": "none",
    "buffers": 0,
    "rows": None,
}
HOSTILE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    frame({"kind": "push"}, 1 << 40),
    frame({"kind": "init"}, 1 << 20),
    frame({"kind": "hello"}, (1 << 64) - 1),
    frame(b"[" * 200_000),
    frame(b'{"kind":' * 50_000),
    frame({"kind": "hello"}),
    frame({"kind": ["hello"]}),
    frame({"kind": "push"}),
    frame({**HELLO, "worker": 2}),
    frame({**HELLO, "worker": "x"}),
    frame({**HELLO, "worker": 1e400}),
    frame({"kind": "gather", "tag": "a/0"}, payload=b"x"),
    frame({"kind": "init"}, payload=b"x"),
    frame({"kind": "bye"}),
    frame({"kind": "no such"}),
    frame(b"\xff\xfe"),
    frame({"kind": "push"}, 100, b"half of it"),
    frame({"kind": "push"}, magic=b"hyp9"),
]


@pytest.mark.parametrize("known", [False, True], ids=["strangers", "with the token"])
def test_no_bytes_end_a_server(served, worker, known, caplog):
    draw = random.Random(0)
    drawn = [draw.randbytes(draw.randint(1, 200)) for _ in range(60)]
    heads = [frame({"kind": "hello"}, payload=draw.randbytes(9))[: draw.randint(1, 40)] for _ in range(30)]
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
        for reason in ("a frame of 16 + 1099511627776 bytes", "init with 1048576 bytes, at most 0 are expected"):
            assert any(f"closed the connection of a process: {reason}" in text for text in texts)
    else:
        assert len(texts) == 1, "one line for all that come from one place"
        assert "refused a connection from 127.0.0.1" in texts[0]


@pytest.mark.parametrize(
    "wrong",
    [
        frame({"kind": "push", "coded": False, "sequence": 1, "clock": 0, "warm": [], "rate": 1.0}, 1 << 40),
        frame({"kind": "push", "coded": False, "sequence": 1, "clock": 0, "warm": [], "rate": 1.0}, payload=b"1234"),
        frame({"kind": "end"}, payload=b"1234" * 100),
        frame({"kind": "gather", "tag": "a/0"}, 1 << 30),
        frame({"kind": "coders"}, payload=b"1234"),
    ],
    ids=itertools.count(),
)
def test_a_worker_that_goes_wrong_is_gone_and_the_others_go_on(served, worker, wrong):
    (model,) = copies(1)
    other = Worker(served, 1, model, RULES)
    other.begin()
    link = other.links.links[0]
    sent(link._socket, wrong + frame({"kind": "end", "stop": False, "save": False}))
    assert_closed(link._socket.dup())
    assert_served(worker)
    assert served.servers[0]._peers.keys() == {0}
    other.links.close(graceful=False)


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


def test_who_is_slow_to_reply_is_not_waited_for():
    clock = Clock()
    with serving(RULES, clock=clock) as served:
        worker = Worker(served, 0, copies(1)[0], RULES)
        worker.begin()
        silent, slow = connect(served), connect(served)
        received(silent, GREETING_BYTES), received(slow, GREETING_BYTES)
        slow.sendall(bytes(10))
        clock.seconds += HANDSHAKE_SECONDS - 1
        slow.sendall(bytes(10))
        worker.step(0)
        assert len(served.servers[0]._strangers) == 2
        clock.seconds += 2
        assert_closed(silent), assert_closed(slow)
        assert_served(worker)
        worker.close()


def test_many_who_wait_for_nothing_keep_nobody_out(served, worker, monkeypatch):
    server = served.servers[0]
    server._most_waiting = 5
    crowd = [connect(served) for _ in range(20)]
    for one in crowd:
        received(one, GREETING_BYTES)
    other = Worker(served, 1, copies(1)[0], RULES)
    other.begin()
    assert len(server._strangers) <= 5
    for one in crowd[:15]:
        assert_closed(one)
    other.close()
    assert_served(worker)
    for one in crowd:
        one.close()


def test_objects_of_workers_are_read_without_running_code(served, worker):
    connection = shaken(served)
    item = pack(["hello"]).replace(b"hello", b"'\";#%")
    sent(connection, frame(HELLO, payload=item + b"more"))
    assert_closed(connection)
    assert_served(worker)
