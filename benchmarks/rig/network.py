"""Emulates links of a given bandwidth between ranks of one machine, with network namespaces.

One network namespace per rank, joined by veth, each egress shaped by a token bucket. Two ranks are wired directly. More
are joined by a bridge in a namespace of its own, whose ports are shaped too: a real switch also delivers no faster than
the cable to the receiver, which counts as soon as several ranks send to one.

Latency, jitter and loss are not emulated. Nothing but the namespaces made here is ever touched, and they go away
however their owner ends: an exception, SIGINT, SIGTERM or SIGHUP runs the context manager's exit; after SIGKILL the
next start finds them by the dead owner in their names.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

from hybridpar.errors import LaunchError, UsageError

LOOPBACK = "loopback"
#: The shaped interface, named the same in every rank's namespace.
INTERFACE = "rig0"

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# Owner's pid and start time (a pid alone may have been taken by another process since), then a count within the owner.
_NAME = re.compile(r"hprig-(?P<pid>\d+)-(?P<started>\d+)-\d+-(?:r\d+|bridge)")
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_serial = itertools.count()


def bits_per_second(rate: str) -> float | None:
    """Parse a link rate.

    Args:
        rate: "loopback", or a number with kbit, mbit or gbit, as tc writes it: "100mbit".

    Returns:
        Bits per second; None for the loopback, which is not shaped.

    Raises:
        UsageError: Neither of these forms, or zero.
    """
    if rate == LOOPBACK:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise UsageError(
            f"link rate {rate!r}", "A rate is 'loopback', or a positive number with kbit, mbit or gbit.", "Try 1gbit."
        )
    return float(match[1]) * _UNITS[match[2]]


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
        ranks: Number of ranks; at least 2 where the rate is shaped.
        rate: "loopback", or the rate of each rank's link, each way: "1gbit", "100mbit".

    Attributes:
        ranks: Number of ranks.
        rate: The rate as it was given.
        interface: Network interface to bind to, in every rank.
        address: Address of rank 0.

    Raises:
        UsageError: The rate or the number of ranks makes no sense.
        LaunchError: On entering: the machine cannot shape links; the message says what it lacks.
    """

    def __init__(self, ranks: int, rate: str = LOOPBACK) -> None:
        self.ranks = ranks
        self.rate = rate
        self._bits = bits_per_second(rate)
        least = 1 if self._bits is None else 2
        if not least <= ranks <= 64:
            raise UsageError(f"{ranks} ranks on {rate}", f"A {rate} network joins {least} to 64 ranks.")
        self.interface = "lo" if self._bits is None else INTERFACE
        self.address = "127.0.0.1" if self._bits is None else _address(0)
        self._owner = os.getpid()
        self._tag = f"hprig-{self._owner}-{_started(self._owner)}-{next(_serial)}"
        self._replaced: dict[signal.Signals, object] = {}

    def __enter__(self) -> Network:
        self._raise_on_signals()
        atexit.register(self._close)
        try:
            if self._bits is not None:
                self._build(self._bits)
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
        if self._bits is None:
            return list(command)
        return ["ip", "netns", "exec", self._namespace(rank), *command]

    def port(self) -> int:
        """A port on rank 0's address that nothing listens on."""
        if self._bits is not None:
            return 29500
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            return int(probe.getsockname()[1])

    def tx_bytes(self, rank: int) -> int:
        """Bytes that a rank has sent so far, by its interface's own counter.

        A packet that the kernel would segment counts with one header, so this is payload and about 0.1 %.

        Raises:
            UsageError: The network is the loopback, whose one counter is shared by all processes of the machine.
        """
        if self._bits is None:
            raise UsageError("tx_bytes on the loopback", "Only ranks with an interface of their own can be counted.")
        shown = _run("ip", "-n", self._namespace(rank), "-s", "-j", "link", "show", "dev", INTERFACE)
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def _namespace(self, rank: int) -> str:
        return f"{self._tag}-r{rank}"

    def _build(self, bits: float) -> None:
        lack = missing()
        if lack:
            raise LaunchError(
                f"cannot make a {self.rate} link: {lack}",
                "Shaped links are made of network namespaces and tc, which need root on Linux and iproute2.",
                "Run as root (in a container: with --privileged), or use --rate loopback.",
            )
        sweep()
        for rank in range(self.ranks):
            _run("ip", "netns", "add", self._namespace(rank))
            _run("ip", "-n", self._namespace(rank), "link", "set", "lo", "up")
        if self.ranks == 2:
            self._wire((self._namespace(0), INTERFACE), (self._namespace(1), INTERFACE))
        else:
            bridge = f"{self._tag}-bridge"
            _run("ip", "netns", "add", bridge)
            _run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", bridge, "link", "set", "bridge", "up")
            for rank in range(self.ranks):
                self._wire((self._namespace(rank), INTERFACE), (bridge, f"port{rank}"))
                _run("ip", "-n", bridge, "link", "set", f"port{rank}", "master", "bridge", "up")
                self._shape(bridge, f"port{rank}", bits)
        for rank in range(self.ranks):
            namespace = self._namespace(rank)
            _run("ip", "-n", namespace, "addr", "add", f"{_address(rank)}/24", "dev", INTERFACE)
            _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")
            self._shape(namespace, INTERFACE, bits)

    @staticmethod
    def _wire(one: tuple[str, str], other: tuple[str, str]) -> None:
        # Both ends are born inside their namespaces, so the machine's own never holds an interface of ours.
        end, peer = (["name", interface, "netns", namespace] for namespace, interface in (one, other))
        _run("ip", "link", "add", *end, "type", "veth", "peer", *peer)

    def _shape(self, namespace: str, interface: str, bits: float) -> None:
        # The bucket must hold at least one 64 KiB super-packet (segmentation offload), and with room to spare: a 16 KB
        # bucket halves a 1 Gbit/s link. Fast links also need what passes in a millisecond.
        burst = max(128 * 1024, int(bits / 8 / 1000))
        options = ["rate", self.rate, "burst", str(burst), "latency", "50ms"]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *options)

    def _close(self) -> None:
        if self._bits is None or os.getpid() != self._owner:
            return  # A forked child inherits this object, not what it stands for.
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
