"""Why: one thread that waits for all sockets together works through what comes in the order in which it came.

So whoever is behind it has a single writer without any lock, and nobody waits for one worker: what cannot be sent yet
is sent when the socket takes it.
"""

from __future__ import annotations

import selectors
import socket
from abc import ABC, abstractmethod
from typing import Any

from hybridpar.server.wire import Connection, Frame, Garbled, frame_of


class SocketLoop(ABC):
    """Listens, reads frames from whoever comes, and sends.

    Args:
        host: Address to listen at; the port is any that is free.
    """

    def __init__(self, host: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        #: Bytes of connections that have ended.
        self.received = self.sent = 0

    @property
    def address(self) -> str:
        """What a worker needs to come here."""
        return f"{self.host}:{self.port}"

    @abstractmethod
    def handle(self, connection: Connection, frame: Frame) -> None:
        """Something came.

        Raises:
            Garbled: It makes no sense; the connection is closed.
        """

    @abstractmethod
    def lost(self, connection: Connection, error: BaseException) -> None:
        """A connection ended without having been dropped by us; it is to be dropped."""

    def turn(self, seconds: float) -> None:
        """Wait for so long, or until something comes, and work through it."""
        for key, events in self._selector.select(seconds):
            if key.data is None:
                self._accept()
                continue
            connection: Connection = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    connection.flush()
                if events & selectors.EVENT_READ:
                    for frame in connection.read():
                        self.handle(connection, frame)
                self._watch(connection)
            except (OSError, Garbled) as error:
                self.lost(connection, error)

    def send(self, connection: Connection, meta: dict[str, Any], *payload: memoryview) -> None:
        """Send a frame, now or later; its memory must stay as it is."""
        try:
            connection.send(frame_of(meta, *payload))
            self._watch(connection)
        except OSError as error:
            self.lost(connection, error)

    def drop(self, connection: Connection) -> None:
        """Close a connection. Safe to call twice."""
        self.received += connection.received
        self.sent += connection.sent
        connection.received = connection.sent = 0
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
        self._selector.register(accepted, selectors.EVENT_READ, Connection(accepted))

    def _watch(self, connection: Connection) -> None:
        """Wait for a socket to take more only while there is more."""
        if connection.socket.fileno() < 0:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.sending else 0)
        self._selector.modify(connection.socket, events, connection)
