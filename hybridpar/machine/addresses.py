"""Which address of this host others reach, and on which gloo listens."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h


def gloo_address() -> str:
    """The address that gloo listens on: that of the interface in GLOO_SOCKET_IFNAME, if it is set and has one; else the
    first of the host's name that can be bound, else the loopback.
    """
    named = address_of(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    if named is not None:
        return named
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return "127.0.0.1"


def address_towards(other: str) -> str:
    """The address of this host on the way to another one; that of the loopback where there is no way."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # sends nothing; it only chooses the interface
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface; None where there is none, or it cannot be asked for."""
    if fcntl is None or not interface:
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None where there is none, or it cannot be asked for."""
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def is_loopback(address: str) -> bool:
    """Whether an address leads to this host itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
