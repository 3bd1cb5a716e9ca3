"""Tests how much data a connection keeps in flight, which decides whether a link can be used in both directions."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridpar.server import wire


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as made:
        yield made


def test_near_connections_keep_little_on_their_way(connection):
    assert 0 < wire._round_trip(connection) < wire._NEAR
    wire.tune(connection)
    assert (
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * wire._ON_ITS_WAY
    )  # the kernel's bookkeeping
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    if "cubic" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text():
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"cubic")


def test_for_long_ways_the_system_decides(connection, monkeypatch):
    before = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    monkeypatch.setattr(wire, "_round_trip", lambda connection: 0.05)
    wire.tune(connection)
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before


def test_who_has_no_other_congestion_control_goes_without(connection, monkeypatch):
    def refuse(self, *arguments):
        if arguments[1] == socket.TCP_CONGESTION:
            raise FileNotFoundError(2, "no such algorithm")
        return None

    monkeypatch.setattr(socket.socket, "setsockopt", refuse)
    wire.tune(connection)
