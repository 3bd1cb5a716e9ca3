"""Bells of workers in shared memory."""

from __future__ import annotations

import socket

import pytest

from hybridpar.comm.shared_memory import Bell
from hybridpar.machine.process import host_identity


def test_a_peer_that_is_busy_is_waited_for_and_a_silent_one_is_not():
    one, other = socket.socketpair()
    peer, asked = Bell(other, 20.0), []

    def wait_on() -> bool:
        asked.append(True)
        if len(asked) == 2:
            peer.ring("testing")
        return len(asked) < 4

    bell = Bell(one, 0.05, wait_on)
    assert bell.wait("adding") == 1
    assert len(asked) >= 2
    with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.05 s for a peer while adding"):
        bell.wait("adding")


def test_other_network_namespaces_are_other_hosts() -> None:
    assert "net:[" in host_identity()
