"""Tests the relay of the benchmark rig: delay lines on a clock of their own, and emulated links by what sockets see."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import socket
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rig import load
from benchmarks.rig import network as network_module
from benchmarks.rig.launch import launch, rank_environment
from benchmarks.rig.network import Link, Network, missing, parse_link
from benchmarks.rig.relay import LONGEST_QUEUE, DelayLine, burst, relay
from hybridpar.errors import LaunchError, UsageError
from tests.benchmarks.test_rig_network import namespaces_of, pids_in, start_owner
from tests.waiting import eventually, running

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


def test_packets_take_the_delay() -> None:
    line = DelayLine(0.005)
    assert line.due == float("inf")
    line.push(packet(1), 1.0)
    line.push(packet(2), 1.003)
    assert line.due == 1.005
    assert list(line.pop(1.00499)) == []
    assert [number_of(data) for data in line.pop(1.005)] == [1]
    assert [number_of(data) for data in line.pop(9.0)] == [2]


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


def test_a_receivers_cable_has_a_rate_and_a_queue() -> None:
    line, at_most = DelayLine(0.001, rate=8e6), burst(8e6)  # a byte per microsecond
    for number in range(at_most // 1000 + 10):
        line.push(packet(number, 1000), 1.0)
    at_once = len(list(line.pop(1.001)))
    assert at_once == at_most // 1000  # a full bucket; what comes after it waits for tokens
    assert line.due == pytest.approx(1.001 + (at_once + 1) * 0.001 - at_most * 1e-6)
    assert len(list(line.pop(1.1))) == 10
    for number in range(1000):  # the bucket is full again, and the queue holds what passes in its time
        line.push(packet(number, 1000), 9.0)
    assert len(list(line.pop(99.0))) == (at_most + int(LONGEST_QUEUE * 1e6)) // 1000


@pytest.fixture
def nodes() -> Iterator[list[socket.socket]]:
    """Sockets that stand for the nodes' ends of three devices, whose other ends a relay serves."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(3)]
    stop, stopper = os.pipe()
    for ours, theirs in pairs:
        ours.settimeout(30)
        theirs.setblocking(False)
    lines = [DelayLine(0.001) for _ in pairs]
    thread = threading.Thread(target=relay, args=([theirs.fileno() for _, theirs in pairs], lines, stop))
    thread.start()
    yield [ours for ours, _ in pairs]
    os.close(stopper)
    thread.join(30)
    assert not thread.is_alive()
    os.close(stop)
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def test_packets_go_to_the_node_that_their_address_names(nodes: list[socket.socket]) -> None:
    for number in range(200):
        nodes[0].send(packet(number, node=1 + number % 2))
        nodes[0].send(packet(0, node=9))  # nobody
        nodes[0].send(packet(0, node=-1))  # the subnet itself
        nodes[0].send(packet(0, version=6))  # what kernels say unasked
    for receiver, first in ((nodes[1], 0), (nodes[2], 1)):
        assert [number_of(receiver.recv(200)) for _ in range(100)] == list(range(first, 200, 2))
    nodes[2].send(packet(7, node=0))
    assert number_of(nodes[0].recv(200)) == 7


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


@pytest.mark.parametrize(
    ("ranks", "rate", "per_node", "said"),
    [
        (4, "loopback", 2, "at least two nodes"),
        (4, "1gbit", 3, "at least two nodes"),
        (4, "1gbit", 4, "at least two nodes"),
        (1, "1gbit", 1, "64 ranks"),
        (65, "1gbit", 1, "64 ranks"),
    ],
)
def test_ranks_that_make_no_network_are_refused(ranks: int, rate: str, per_node: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Network(ranks, rate, per_node)


def test_a_machine_without_tun_devices_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network_module, "missing", lambda: "")
    monkeypatch.setattr(network_module, "_TUN", str(tmp_path / "tun"))
    monkeypatch.setattr(network_module, "_run", lambda *command: pytest.fail(f"ran {command}"))
    with pytest.raises(LaunchError, match="kernel module tun"), Network(2, "1gbit+1ms"):
        pytest.fail("entered")


def test_the_relays_work_is_no_foreign_load(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(2)
    assert "RIG_RELAY" not in rank_environment(0, network, 1)
    network.relay = os.getpid()
    monkeypatch.setenv("RIG_RELAY", rank_environment(0, network, 1)["RIG_RELAY"])
    assert 0 < load.relay_seconds() <= load.process_seconds()
    monkeypatch.delenv("RIG_RELAY")
    assert load.relay_seconds() == 0


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


@pytest.mark.root
@shaped
def test_ranks_of_a_node_share_its_namespace(tmp_path: Path) -> None:
    code = "import os; open(os.environ['TO'] + os.environ['RANK'], 'w').write(os.readlink('/proc/self/ns/net'))"
    with Network(4, "1gbit", per_node=2) as network:
        assert network.link == rank_environment(0, network, 1)["RIG_LINK"] == "1gbit:2x2"
        launch(["-c", code], network, environment={"TO": f"{tmp_path}/"})
    homes = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert homes[0] == homes[1] != homes[2] == homes[3]


def relays_of(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        if "relay.py" in command and f"hprig-{pid}-" in command:
            found.append(int(folder.name))
    return found


@pytest.mark.root
@shaped
def test_a_relay_that_ends_ends_the_run() -> None:
    with Network(2, "1gbit+1ms") as network:
        code = f"import os, time\nif os.environ['RANK'] == '0': os.kill({network.relay}, 9)\ntime.sleep(300)"
        with pytest.raises(LaunchError, match=r"relay of the 1gbit\+1ms link ended with status -9"):
            launch(["-c", code], network)


@pytest.mark.root
@shaped
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_relay_outlives_its_owner(tmp_path: Path, number: signal.Signals) -> None:
    owner = start_owner("100mbit+10ms", tmp_path)
    pids_in(tmp_path)
    (carrier,) = relays_of(owner.pid)
    owner.send_signal(number)
    owner.wait(timeout=60)
    eventually(lambda: not running(carrier))
    if number == signal.SIGKILL:
        network_module.sweep()
    assert namespaces_of(owner.pid) == []
