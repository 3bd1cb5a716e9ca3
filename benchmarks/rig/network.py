"""Emulates links between nodes of one machine, with network namespaces: their rate, delay, jitter and loss.

One network namespace per node, joined by veth, each egress shaped by a token bucket. Two nodes are wired directly. More
are joined by a bridge in a namespace of its own, whose ports are shaped too: a real switch also delivers no faster than
the cable to the receiver, which counts as soon as several nodes send to one.

Where a link has more than a rate, a relay (`benchmarks.rig.relay`) takes the place of veth and bridge.

Nothing but the namespaces made here is ever touched, and they go away however their owner ends: an exception, SIGINT,
SIGTERM or SIGHUP runs the context manager's exit; after SIGKILL the next start finds them by the dead owner in their
names. The relay ends by itself as soon as its owner is gone.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType

from benchmarks.rig import relay
from hybridpar.errors import LaunchError, UsageError

LOOPBACK = "loopback"
#: The shaped interface, named the same in every node's namespace.
INTERFACE = relay.INTERFACE

_TUN = "/dev/net/tun"
_SUBNET = "10.77.0.0/24"
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"\d+(?:\.\d+)?"
_LINK = re.compile(
    rf"(?P<rate>{_NUMBER}(?:kbit|mbit|gbit))"
    rf"(?:\+(?P<delay>{_NUMBER}(?:us|ms|s))(?:~(?P<jitter>{_NUMBER}(?:us|ms|s)))?)?"
    rf"(?:\+(?P<loss>{_NUMBER})%)?"
)
# Owner's pid and start time (a pid alone may have been taken by another process since), then a count within the owner.
_NAME = re.compile(r"hprig-(?P<pid>\d+)-(?P<started>\d+)-\d+-(?:r\d+|bridge)")
# Nodes and ranks of each, where that is more than one.
_LAYOUT = re.compile(r":\d+x\d+$")
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_serial = itertools.count()


@dataclass(frozen=True)
class Link:
    """What connects a node to all others, each way alike.

    Args:
        rate: As tc writes it, "100mbit"; empty for the loopback.
        bits: The rate in bits per second; None for the loopback, which is not shaped.
        delay: Seconds that a round trip takes.
        jitter: Seconds by which a round trip may be faster or slower.
        loss: Share of frames that is lost, each way.
    """

    rate: str = ""
    bits: float | None = None
    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0

    @property
    def relayed(self) -> bool:
        """Whether the link has more than a rate, so that packets must go through the relay."""
        return self.delay > 0 or self.loss > 0


def parse_link(text: str) -> Link:
    """Parse a link.

    Args:
        text: "loopback", or a rate as tc writes it, "100mbit"; then perhaps a round-trip delay, "100mbit+10ms", with
            jitter, "100mbit+10ms~2ms"; then perhaps loss, "100mbit+10ms+0.1%".

    Raises:
        UsageError: None of these forms, a rate of zero, jitter above the delay, or a loss of everything.
    """
    if text == LOOPBACK:
        return Link()
    match = _LINK.fullmatch(text)
    link = match and Link(
        match["rate"],
        _amount(match["rate"], _BITS),
        _amount(match["delay"], _SECONDS),
        _amount(match["jitter"], _SECONDS),
        _amount(match["loss"], {"": 0.01}),
    )
    if link is None or not link.bits or link.jitter > link.delay or link.loss >= 1:
        raise UsageError(
            f"link rate {text!r}",
            "A link is 'loopback', or a positive rate with kbit, mbit or gbit, and then, as far as wanted, '+' and a "
            "round-trip delay with us, ms or s, '~' and a jitter no larger than it, '+' and a loss below 100%.",
            "Try 1gbit, 100mbit+10ms, 10mbit+50ms~5ms or 100mbit+10ms+0.1%.",
        )
    return link


def _amount(text: str | None, units: Mapping[str, float]) -> float:
    """A number with its unit; 0 where there is none."""
    if text is None:
        return 0.0
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    return float(number) * units[text.removeprefix(number)]


def bits_per_second(link: str) -> float | None:
    """The rate of a link as `parse_link` takes it, or as a table's column `link` has it; None for the loopback.

    Raises:
        UsageError: It is no link.
    """
    return parse_link(_LAYOUT.sub("", link)).bits


def missing() -> str:
    """What this machine lacks for shaped links, as one clause; empty when nothing is known to be missing."""
    if sys.platform != "linux":
        return f"network namespaces exist on Linux only, this is {sys.platform}"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} not found (package iproute2)"
    with open("/proc/self/status") as status:
        effective = int(next(line for line in status if line.startswith("CapEff:")).split()[1], 16)
    if not (effective >> _CAP_NET_ADMIN & 1 and effective >> _CAP_SYS_ADMIN & 1):
        return "this process is not root (capabilities CAP_NET_ADMIN and CAP_SYS_ADMIN)"
    return ""


def sweep() -> list[str]:
    """Remove the namespaces of owners that are dead, with the processes left in them.

    Returns:
        Names of the namespaces that were removed.
    """
    stale = [name for name in _namespaces() if (owner := _NAME.fullmatch(name)) and not _alive(owner)]
    for name in stale:
        _remove(name)
    return stale


class Network:
    """The network that connects the ranks of one benchmark; a context manager.

    Args:
        ranks: Number of ranks.
        rate: Each node's link, as `parse_link` takes it: "1gbit", "100mbit+10ms"; or "loopback".
        per_node: Ranks that share a node and its link; they reach each other without it.

    Attributes:
        ranks: Number of ranks.
        link: What the ranks are connected by, as a table says it: the link as it was given, then ":2x4" where there are
            2 nodes of 4 ranks.
        interface: Network interface to bind to, in every rank.
        address: Address of rank 0.
        relay: Process id of the relay, if there is one.

    Raises:
        UsageError: The link or the number of ranks makes no sense.
        LaunchError: On entering: the machine cannot make such links; the message says what it lacks.
    """

    def __init__(self, ranks: int, rate: str = LOOPBACK, per_node: int = 1) -> None:
        self._link = parse_link(rate)
        self._shaped = self._link.bits is not None
        least = 2 if self._shaped else 1
        if not least <= ranks <= 64:
            raise UsageError(f"{ranks} ranks on {rate}", f"A {rate} network joins {least} to 64 ranks.")
        if per_node != 1 and not (self._shaped and 1 < per_node < ranks and ranks % per_node == 0):
            raise UsageError(
                f"{per_node} of {ranks} ranks per node on {rate}",
                "A shaped link joins at least two nodes, all of as many ranks.",
            )
        self.ranks = ranks
        self._per_node = per_node
        self._nodes = ranks // per_node
        self.link = rate if per_node == 1 else f"{rate}:{self._nodes}x{per_node}"
        self.interface = INTERFACE if self._shaped else "lo"
        self.address = _address(0) if self._shaped else "127.0.0.1"
        self.relay: int | None = None
        self._carrier: subprocess.Popen[str] | None = None
        self._owner = os.getpid()
        self._tag = f"hprig-{self._owner}-{_started(self._owner)}-{next(_serial)}"
        self._replaced: dict[signal.Signals, object] = {}

    def __enter__(self) -> Network:
        self._raise_on_signals()
        atexit.register(self._close)
        try:
            if self._link.bits is not None:
                self._build(self._link.bits)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A second Ctrl-C must not leave half of the namespaces behind.
        with _signals_held():
            self._close()
            atexit.unregister(self._close)
            for number in self._replaced:
                signal.signal(number, signal.SIG_DFL)
            self._replaced.clear()

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command where that rank lives."""
        if not self._shaped:
            return list(command)
        return ["ip", "netns", "exec", self._namespace(rank // self._per_node), *command]

    def check(self) -> None:
        """Raise if the network does not work any more.

        Raises:
            LaunchError: The relay ended, and took the nodes' devices along.
        """
        if self._carrier is not None and (status := self._carrier.poll()) is not None:
            raise LaunchError(
                f"the relay of the {self.link} link ended with status {status}",
                "The ranks cannot reach each other any more.",
                "Its own messages, if any, are above; without any, something killed it.",
            )

    def port(self) -> int:
        """A port on rank 0's address that nothing listens on."""
        if self._shaped:
            return 29500
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            return int(probe.getsockname()[1])

    def _namespace(self, node: int) -> str:
        return f"{self._tag}-r{node}"

    def _build(self, bits: float) -> None:
        lack = missing()
        if self._link.relayed and not os.path.exists(_TUN):
            lack = lack or f"there is no {_TUN} (kernel module tun)"
        if lack:
            raise LaunchError(
                f"cannot make a {self.link} link: {lack}",
                "Shaped links are made of network namespaces and tc, which need root on Linux and iproute2.",
                "Run as root (in a container: with --privileged), or use --rate loopback.",
            )
        sweep()
        namespaces = [self._namespace(node) for node in range(self._nodes)]
        for namespace in namespaces:
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        (self._start_relay if self._link.relayed else self._join)(namespaces, bits)
        for node, namespace in enumerate(namespaces):
            _run("ip", "-n", namespace, "addr", "add", f"{_address(node)}/24", "dev", INTERFACE)
            _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")
            self._shape(namespace, INTERFACE, bits)
            if self._link.relayed:
                # What TCP makes of delay and loss depends on this, and machines differ; cubic is Linux' own default.
                path = [_SUBNET, "dev", INTERFACE, "proto", "kernel", "scope", "link", "src", _address(node)]
                _run("ip", "-n", namespace, "route", "change", *path, "congctl", "cubic")

    def _join(self, namespaces: Sequence[str], bits: float) -> None:
        if len(namespaces) == 2:
            self._wire((namespaces[0], INTERFACE), (namespaces[1], INTERFACE))
            return
        bridge = f"{self._tag}-bridge"
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "bridge", "up")
        for node, namespace in enumerate(namespaces):
            self._wire((namespace, INTERFACE), (bridge, f"port{node}"))
            _run("ip", "-n", bridge, "link", "set", f"port{node}", "master", "bridge", "up")
            self._shape(bridge, f"port{node}", bits)

    def _start_relay(self, namespaces: Sequence[str], bits: float) -> None:
        link = self._link
        # Two nodes need no limit at the receiver: what the sender's bucket lets pass is no faster.
        numbers = [link.delay / 2, link.jitter / 2, link.loss, bits if len(namespaces) > 2 else 0.0]
        self._carrier = subprocess.Popen(
            [sys.executable, "-I", "-S", relay.__file__, *map(str, numbers), *namespaces],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._carrier.stdout is not None
        said = self._carrier.stdout.readline().strip()
        if said != relay.READY:
            raise LaunchError(
                f"cannot make a {self.link} link: {said or 'the relay failed'}",
                "Delay, jitter and loss need TUN devices, which root may make.",
                "Load the module tun (in a container: --device /dev/net/tun), or use a link without them.",
            )
        self.relay = self._carrier.pid
        for namespace in namespaces:
            # What a full bucket lets pass at once, also in the smallest packets, must find room.
            _run("ip", "-n", namespace, "link", "set", INTERFACE, "txqueuelen", "10000")

    @staticmethod
    def _wire(*ends: tuple[str, str]) -> None:
        # Both ends are born inside their namespaces, so the machine's own never holds an interface of ours.
        end, peer = (["name", interface, "netns", namespace] for namespace, interface in ends)
        _run("ip", "link", "add", *end, "type", "veth", "peer", *peer)

    def _shape(self, namespace: str, interface: str, bits: float) -> None:
        queue = f"{relay.LONGEST_QUEUE * 1000:g}ms"
        options = ["rate", self._link.rate, "burst", str(relay.burst(bits)), "latency", queue]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *options)

    def _close(self) -> None:
        if not self._shaped or os.getpid() != self._owner:
            return  # A forked child inherits this object, not what it stands for.
        if self._carrier is not None:
            self._carrier.kill()
            self._carrier.communicate()
            self._carrier = self.relay = None
        for name in _namespaces():
            if name.startswith(f"{self._tag}-"):
                _remove(name)

    def _raise_on_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python delivers signals to the main thread only; atexit is what is left.
        for number in _ENDING_SIGNALS:
            # Another handler, or nohup's "ignore", stays in place.
            if signal.getsignal(number) is signal.SIG_DFL:
                self._replaced[number] = signal.signal(number, _exit_on_signal)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _signals_held() -> Iterator[None]:
    held = (signal.SIGINT, *_ENDING_SIGNALS)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _namespaces() -> list[str]:
    if shutil.which("ip") is None:
        return []
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, start_new_session=True)
    return [line.split()[0] for line in listing.stdout.splitlines() if line.strip()]


def _remove(name: str) -> None:
    # A process left inside would keep the namespace and its links alive without a name.
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, start_new_session=True)
    for pid in inside.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, start_new_session=True)


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # The command's name comes second, in brackets, and may itself hold blanks and brackets.
            return stat.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _alive(owner: re.Match[str]) -> bool:
    return _started(int(owner["pid"])) == owner["started"]


def _run(*command: str) -> str:
    # A session of its own: Ctrl-C in a terminal goes to the foreground group, and would end this command half-way.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise LaunchError(
            f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}",
            "Shaped links need the kernel's network namespaces, veth, bridge and the tbf queue (sch_tbf).",
            "Load the modules veth, bridge and sch_tbf, or use --rate loopback.",
        )
    return done.stdout
