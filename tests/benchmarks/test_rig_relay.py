"""Tests the relay of the benchmark rig: delay lines on a clock of their own, and emulated links by what sockets see."""

from __future__ import annotations

import hashlib
import itertools
import json
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


@pytest.mark.parametrize(("ranks", "rate", "per_node"), [(4, "loopback", 2), (4, "1gbit", 3), (4, "1gbit", 4)])
def test_nodes_that_make_no_network_are_refused(ranks: int, rate: str, per_node: int) -> None:
    with pytest.raises(UsageError, match="at least two nodes"):
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

# Rank 0 connects to rank 1; both get a socket `peer`, after which their code follows. No torch. Where they may, they
# run before all other processes: links are measured, and not how busy the machine is.
CONNECTED = """
import hashlib, json, os, socket, statistics, time
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
except OSError:
    pass
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

PING_PONG_AND_TRANSFER = """
trips, arrived = [], []
for _ in range(int(os.environ["PINGS"])):
    begin = time.perf_counter()
    if first:
        peer.sendall(b"x")
    peer.recv(1)
    if not first:
        peer.sendall(b"x")
    trips.append(time.perf_counter() - begin)
if first:
    peer.sendall(bytes(size))
    rate = float(peer.recv(100))
    print(json.dumps({"trips": trips, "rate": rate}))
else:
    left = size
    while left:
        left -= len(peer.recv(min(left, 1 << 16)))
        arrived.append((time.perf_counter(), left))
    # TCP needs a while to fill the link, and the bucket lets its first bytes pass at once.
    begin, ahead = next(one for one in arrived if one[1] < size * 0.6)
    peer.sendall(str(ahead * 8 / (arrived[-1][0] - begin)).encode())
"""


@pytest.mark.root
@shaped
@pytest.mark.parametrize(("link", "size", "pings"), [("100mbit+10ms", 8_000_000, 60), ("10mbit+50ms", 1_200_000, 12)])
def test_a_link_has_its_delay_and_its_rate(tmp_path: Path, link: str, size: int, pings: int) -> None:
    output = tmp_path / "output"
    with Network(2, link) as network, output.open("w") as file:
        environment = {"SIZE": str(size), "PINGS": str(pings)}
        code = CONNECTED + PING_PONG_AND_TRANSFER
        launch(["-c", code], network, timeout=60, environment=environment, stdout=file)
    seen = json.loads(output.read_text())
    asked = parse_link(link)
    # The lower quartile, as other processes of the machine can only make a trip longer.
    assert statistics.quantiles(seen["trips"], n=4)[0] == pytest.approx(asked.delay, rel=0.03)
    assert min(seen["trips"]) >= 0.97 * asked.delay
    # Of an IP packet of 1500 bytes, 1448 are payload.
    assert seen["rate"] * 1500 / 1448 == pytest.approx(asked.bits, rel=0.03)


DATAGRAMS = """
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if first:
    peer.recv(1)
    for number in range(size):
        datagrams.sendto(number.to_bytes(4) + bytes(1000), address)
    time.sleep(0.5)  # what is on its way arrives before the word that there is no more
    peer.sendall(b"x")
    print(json.dumps(json.loads(peer.makefile().readline())))
else:
    datagrams.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE: nothing is lost here
    datagrams.bind(address)
    datagrams.setblocking(False)
    peer.sendall(b"x")
    peer.recv(1)
    arrived = []
    try:
        while True:
            arrived.append(int.from_bytes(datagrams.recv(2000)[:4]))
    except BlockingIOError:
        peer.sendall(json.dumps(arrived).encode() + b"\\n")
"""


@pytest.mark.root
@shaped
@pytest.mark.parametrize("loss", [0, 5])
def test_datagrams_arrive_in_order_all_but_the_share_that_is_lost(tmp_path: Path, loss: int) -> None:
    output, count = tmp_path / "output", 4000
    with Network(2, f"100mbit+4ms~4ms+{loss}%") as network, output.open("w") as file:
        launch(["-c", CONNECTED + DATAGRAMS], network, timeout=60, environment={"SIZE": str(count)}, stdout=file)
    arrived = json.loads(output.read_text())
    assert arrived == sorted(set(arrived))
    assert len(arrived) / count == pytest.approx(1 - loss / 100, abs=0.015 if loss else 0)


STREAM = """
data = hashlib.shake_256(b"rig").digest(size)
if first:
    peer.sendall(data)
    print(peer.recv(100).decode())
else:
    arrived = bytearray()
    while len(arrived) < size:
        arrived += peer.recv(1 << 16)
    peer.sendall(hashlib.sha256(arrived).hexdigest().encode())
"""


@pytest.mark.root
@shaped
@pytest.mark.parametrize("link", ["1gbit+200us", "100mbit+2ms~1ms+1%"])
def test_tcp_delivers_everything(tmp_path: Path, link: str) -> None:
    output, size = tmp_path / "output", 2_000_000
    with Network(2, link) as network, output.open("w") as file:
        launch(["-c", CONNECTED + STREAM], network, timeout=120, environment={"SIZE": str(size)}, stdout=file)
    assert output.read_text().strip() == hashlib.sha256(hashlib.shake_256(b"rig").digest(size)).hexdigest()


# Ranks 0 and 1 send to rank 2.
TWO_SENDERS = """
import os, socket, time
rank, size, address = int(os.environ["RANK"]), int(os.environ["SIZE"]), ("10.77.0.3", 5000)
if rank == 2:
    with socket.create_server(address) as server:
        peers = [server.accept()[0] for _ in range(2)]
    begin = None
    for peer in peers:
        peer.sendall(b"x")
    while peers:
        for peer in list(peers):
            peer.settimeout(0.01)
            try:
                if not peer.recv(1 << 20):
                    peers.remove(peer)
            except TimeoutError:
                continue
            begin = begin or time.perf_counter()
    open(os.environ["TO"], "w").write(str(time.perf_counter() - begin))
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.02)
    peer.recv(1)
    peer.sendall(bytes(size))
"""


@pytest.mark.root
@shaped
def test_two_senders_share_the_cable_of_their_receiver(tmp_path: Path) -> None:
    size = 4_000_000
    with Network(3, "100mbit+2ms") as network:
        launch(["-c", TWO_SENDERS], network, environment={"SIZE": str(size), "TO": str(tmp_path / "seconds")})
    # The first bucket passes at once. On a busy machine the receiver may be late to see that.
    rate = (2 * size - burst(1e8)) * 8 * 1500 / 1448 / float((tmp_path / "seconds").read_text())
    assert 0.8e8 <= rate <= 1.2e8


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
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
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
