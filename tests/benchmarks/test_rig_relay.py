"""Tests the relay of the benchmark rig: delay lines on a clock of their own, and emulated links by what sockets see."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from benchmarks.rig.launch import launch
from benchmarks.rig.network import Link, Network, missing, parse_link
from benchmarks.rig.relay import burst
from hybridpar.errors import UsageError

# ---------------------------------------------------------------------------------------------------- without root


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("loopback", Link()),
        ("100mbit", Link("100mbit", 1e8)),
        ("1gbit+1ms", Link("1gbit", 1e9, 0.001)),
        ("2.5gbit+250us", Link("2.5gbit", 2.5e9, 0.00025)),
        ("10mbit+0.05s~5ms", Link("10mbit", 1e7, 0.05, 0.005)),
        ("100mbit+0.5%", Link("100mbit", 1e8, loss=0.005)),
        ("100mbit+10ms~10ms+2%", Link("100mbit", 1e8, 0.01, 0.01, 0.02)),
    ],
)
def test_links(text: str, link: Link) -> None:
    parsed = parse_link(text)
    assert parsed.rate == link.rate
    ours, theirs = ((each.bits or 0, each.delay, each.jitter, each.loss) for each in (parsed, link))
    assert ours == pytest.approx(theirs)
    assert parsed.relayed == ("+" in text)


@pytest.mark.parametrize("text", ["1gbit+", "1gbit+1", "1gbit+1ms~2ms", "1gbit~1ms", "1gbit+100%", "1gbit+1%+1ms"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"Try 1gbit, 100mbit\+10ms"):
        parse_link(text)


def test_ranks_that_make_no_network_are_refused() -> None:
    for ranks, per_node, said in ((4, 4, "at least two nodes"), (65, 1, "64 ranks")):
        with pytest.raises(UsageError, match=said):
            Network(ranks, "1gbit", per_node)


# ---------------------------------------------------------------------------------------------------- with root

shaped = pytest.mark.skipif(bool(missing()), reason=missing() or "can shape links")

# Rank 0 connects to rank 1; both get a socket `peer`, after which their code follows. No torch.
CONNECTED = """
import hashlib, os, socket, time
first, size = os.environ["RANK"] == "0", int(os.environ.get("SIZE", 0))
address = ("10.77.0.2", 5000)
if first:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.02)
else:
    with socket.create_server(address) as server:
        peer, _ = server.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
"""

STREAM = """
data = hashlib.shake_256(b"rig").digest(size)
if first:
    begin = time.perf_counter()
    peer.sendall(b"x")
    peer.recv(1)
    trip = time.perf_counter() - begin
    peer.sendall(data)
    print(peer.recv(100).decode(), trip, time.perf_counter() - begin - trip)
else:
    peer.sendall(peer.recv(1))
    arrived = bytearray()
    while len(arrived) < size:
        arrived += peer.recv(1 << 16)
    peer.sendall(hashlib.sha256(arrived).hexdigest().encode())
"""


@pytest.mark.root
@shaped
@pytest.mark.parametrize("link", ["1gbit+200us", "100mbit+2ms~1ms+1%"])
def test_tcp_delivers_everything_and_no_faster_than_the_link(tmp_path: Path, link: str) -> None:
    output, size = tmp_path / "output", 2_000_000
    with Network(2, link) as network, output.open("w") as file:
        launch(["-c", CONNECTED + STREAM], network, timeout=120, environment={"SIZE": str(size)}, stdout=file)
    digest, trip, seconds = output.read_text().split()
    assert digest == hashlib.sha256(hashlib.shake_256(b"rig").digest(size)).hexdigest()
    asked = parse_link(link)
    assert asked.bits is not None
    assert float(trip) >= asked.delay - asked.jitter
    assert float(seconds) >= (size - burst(asked.bits)) * 8 / asked.bits
