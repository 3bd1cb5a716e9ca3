"""Tests the relay of the benchmark rig: delay lines on a clock of their own, and emulated links by what sockets see."""

from __future__ import annotations

import hashlib
import itertools
import statistics
from pathlib import Path

import pytest

from benchmarks.rig.launch import launch
from benchmarks.rig.network import Link, Network, missing, parse_link
from benchmarks.rig.relay import DelayLine, burst
from hybridpar.errors import UsageError

# ---------------------------------------------------------------------------------------------------- without root


def packet(number: int, size: int = 100, node: int = 1, version: int = 4) -> bytes:
    """A virtio_net_hdr of zeros, and an IP packet of that many bytes."""
    return bytes(10) + bytes([version << 4]) + bytes(18) + bytes([node + 1]) + number.to_bytes(4) + bytes(size - 24)


def number_of(data: bytes) -> int:
    return int.from_bytes(data[30:34])


def arrivals(line: DelayLine, sent: dict[int, float], step: float = 0.001) -> list[tuple[int, float]]:
    """Numbers of packets and the times at which they arrive, on a clock that goes on in steps."""
    waiting = sorted(sent.items(), key=lambda item: item[1])
    arrived: list[tuple[int, float]] = []
    for tick in itertools.count():
        now = tick * step
        while waiting and waiting[0][1] <= now:
            number, when = waiting.pop(0)
            line.push(packet(number), when)
        arrived += [(number_of(data), now) for data in line.pop(now)]
        if not waiting and line.due == float("inf"):
            return arrived
    raise AssertionError


def test_jitter_keeps_the_order() -> None:
    sent = {number: number * 0.001 for number in range(500)}
    arrived = arrivals(DelayLine(0.010, jitter=0.008), sent)
    assert [number for number, _ in arrived] == list(range(500))
    delays = [when - sent[number] for number, when in arrived]
    assert min(delays) >= 0.002
    assert max(delays) <= 0.0191
    assert statistics.stdev(delays) > 0.001
    # Far apart, packets cannot overtake each other: all delays are alike likely.
    sent = {number: number * 0.1 for number in range(300)}
    apart = [when - sent[number] for number, when in arrivals(DelayLine(0.010, jitter=0.008), sent)]
    assert abs(statistics.mean(apart) - 0.0105) < 0.001  # half a step of the clock later
    assert statistics.stdev(apart) == pytest.approx(0.016 / 12**0.5, rel=0.1)


def test_the_asked_share_is_lost_and_no_more() -> None:
    sent = {number: number * 0.001 for number in range(4000)}
    kept = [number for number, _ in arrivals(DelayLine(0.002, loss=0.1), sent)]
    assert kept == sorted(set(kept))
    assert 1 - len(kept) / 4000 == pytest.approx(0.1, abs=0.015)
    assert kept != [number for number, _ in arrivals(DelayLine(0.002, loss=0.1, seed=1), sent)]
    assert len(arrivals(DelayLine(0.002), sent)) == 4000


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
    ours, theirs = ((one.bits or 0, one.delay, one.jitter, one.loss) for one in (parsed, link))
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
