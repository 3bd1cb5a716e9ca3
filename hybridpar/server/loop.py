"""Reads and writes all connections of a server on one thread.

A subclass therefore needs no lock, and no worker waits for another: what cannot be sent yet is sent when the socket is
ready. A connection on which anything goes wrong is closed, and the others are served on.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from hybridpar.comm.handshake import HandshakeError, ServerHandshake
from hybridpar.errors import HybridparError
from hybridpar.server.wire import Connection, Frame, Garbled, frame_of

_log = logging.getLogger(__name__)

#: Seconds that a connection has for the handshake, and how many may be in it at a time, for each worker but not below
#: a least number. With more of them the oldest is closed: who knows the token is through within a round trip.
HANDSHAKE_SECONDS, _WAITING_PER_WORKER, _LEAST_WAITING = 5.0, 2, 64

#: Addresses of which it is told that a connection from there was refused; what comes from others then is only counted.
_MOST_TOLD = 20


class SocketLoop(ABC):
    """Listens, reads frames from all connections, and sends."""

    def __init__(self, host: str, token: str, workers: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._token, self._now = token, clock
        self._most_waiting = max(_LEAST_WAITING, _WAITING_PER_WORKER * workers)
        self._strangers: dict[Connection, float] = {}  # in the handshake, since when; oldest first
        self._told_of: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self.host, self.port = host, int(self._listener.getsockname()[1])

    @property
    def address(self) -> str:
        """What a worker needs to come here."""
        return f"{self.host}:{self.port}"

    @abstractmethod
    def handle(self, connection: Connection, frame: Frame) -> None:
        """Something came from a process that knows the token."""

    @abstractmethod
    def most_bytes(self, connection: Connection, meta: dict[str, Any]) -> int:
        """Most bytes that the payload of a frame may have."""

    @abstractmethod
    def lost(self, connection: Connection, error: BaseException) -> None:
        """A connection of a process that knows the token ended without a `drop`; it is to be dropped."""

    def turn(self, seconds: float) -> None:
        """Wait for so long, or until something comes, and work through it."""
        for key, events in self._selector.select(seconds):
            if key.data is None:
                self._accept()
                continue
            connection: Connection = key.data
            try:
                connection.active = self._now()
                if events & selectors.EVENT_WRITE:
                    connection.flush()
                if events & selectors.EVENT_READ:
                    self._read(connection)
                self._watch(connection)
            except HybridparError:
                raise
            except Exception as error:
                self._end(connection, error)
        self._end_slow_handshakes()

    def _read(self, connection: Connection) -> None:
        for frame in connection.read():
            self.handle(connection, frame)
        if connection.known:
            self._strangers.pop(connection, None)

    def _end(self, connection: Connection, error: Exception) -> None:
        """Something went wrong on a connection: close it, and say so where it is not merely a worker that is gone."""
        if not connection.known:
            self._refuse(connection, error)
            return
        if not isinstance(error, OSError):
            who = "a process" if connection.worker is None else f"worker {connection.worker}"
            text = str(error)[:200] if isinstance(error, Garbled) else f"{type(error).__name__}: {str(error)[:200]}"
            _log.warning("server at %s closed the connection of %s: %s", self.address, who, text)
        self.lost(connection, error)

    def _refuse(self, connection: Connection, error: Exception) -> None:
        """Close a connection whose other end has not shown that it knows the token."""
        try:
            source = str(connection.socket.getpeername()[0])
        except OSError:
            source = "?"
        self.drop(connection)
        if source in self._told_of or len(self._told_of) >= _MOST_TOLD:
            return
        self._told_of.add(source)
        reason = str(error) if isinstance(error, (OSError, HandshakeError)) else type(error).__name__
        _log.warning(
            "server at %s refused a connection from %s: %s; training goes on, and further ones from there are refused "
            "silently",
            *(self.address, source, reason),
        )

    def _end_slow_handshakes(self) -> None:
        now = self._now()
        late = [one for one, since in self._strangers.items() if now - since > HANDSHAKE_SECONDS]
        for connection in late:
            self._refuse(connection, HandshakeError(f"it sent no reply within {HANDSHAKE_SECONDS:g} s"))

    def send(self, connection: Connection, meta: dict[str, Any], *payload: memoryview) -> None:
        """Send a frame, now or later; its memory must stay as it is."""
        try:
            connection.send(frame_of(meta, *payload))
            self._watch(connection)
        except OSError as error:
            self.lost(connection, error)

    def drop(self, connection: Connection) -> None:
        """Close a connection. Safe to call twice."""
        self._strangers.pop(connection, None)
        if connection.socket.fileno() >= 0:
            self._selector.unregister(connection.socket)
            connection.close()

    def send_last(self, connection: Connection, meta: dict[str, Any]) -> None:
        """Send a frame at once, as far as the other end still listens: there will be no other turn."""
        try:
            connection.socket.settimeout(1.0)
            connection.send(frame_of(meta))
        except OSError:
            return

    def close(self) -> None:
        """Close all sockets."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        now = self._now()
        try:
            connection = Connection(accepted, ServerHandshake(self._token, self.address), self.most_bytes, now)
        except OSError:
            accepted.close()
            return
        if len(self._strangers) >= self._most_waiting:
            self._refuse(next(iter(self._strangers)), HandshakeError("too many came at the same time"))
        self._strangers[connection] = now
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        try:
            connection.greet()
        except OSError as error:
            self._refuse(connection, error)

    def _watch(self, connection: Connection) -> None:
        """Wait for a socket to take more only while there is more."""
        if connection.socket.fileno() < 0:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.sending else 0)
        self._selector.modify(connection.socket, events, connection)
