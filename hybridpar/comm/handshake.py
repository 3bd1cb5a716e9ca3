"""The door at which connections are made: both ends prove that they know the job's token.

The token itself is never sent. The server sends a random number of 32 bytes; the worker replies with one of its own and
a code (HMAC-SHA256) over both; the server checks it and answers with a code over both. A recorded reply fits no other
greeting. The codes are also over the server's address, so that a reply sent to a wrong address is of no use at the
right one. Behind its reply a worker may say more, which is read once its code is known to be right.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from hybridpar.errors import UsageError
from hybridpar.machine.supervise import TOKEN_VARIABLE

_LEAST_TOKEN = 16

_MAGIC = b"hyp2"
_RANDOM, _CODE = 32, hashlib.sha256().digest_size


class HandshakeError(Exception):
    """The other end does not know the token, or speaks another protocol."""


def job_token() -> str:
    """The token in the environment of this process."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if len(token) < _LEAST_TOKEN:
        raise UsageError(
            f"{TOKEN_VARIABLE} has {len(token)} characters" if token else f"{TOKEN_VARIABLE} is not set",
            f"Parameter servers let in who knows this secret of at least {_LEAST_TOKEN} characters, equal in all "
            "processes of a job.",
            f"export {TOKEN_VARIABLE}=$(openssl rand -hex 16) before torchrun, the same on all hosts.",
        )
    return token


def let_in(
    connection: socket.socket,
    token: str,
    address: str,
    seconds: float,
    more: int = 0,
    admit: Callable[[], bool] = lambda: True,
) -> bytes:
    """The server's side, in so many seconds; returns the bytes, so many, that the worker says behind its reply.

    `admit` is asked last, before the worker is shown that it is let in.
    """
    deadline = time.monotonic() + seconds
    random = secrets.token_bytes(_RANDOM)
    connection.settimeout(seconds)
    connection.sendall(_MAGIC + random)
    reply = _receive(connection, _RANDOM + _CODE, deadline)
    both = random + reply[:_RANDOM]
    if not hmac.compare_digest(reply[_RANDOM:], _code(token, "worker", address, both)):
        raise HandshakeError("it does not know the job's token")
    said = _receive(connection, more, deadline)
    if not admit():
        raise HandshakeError("too many came at the same time")
    connection.sendall(_code(token, "server", address, both))
    return said


def knock(connection: socket.socket, token: str, address: str, more: bytes = b"") -> None:
    """The worker's side."""
    greeting = _receive(connection, len(_MAGIC) + _RANDOM)
    if not greeting.startswith(_MAGIC):
        raise HandshakeError("no server of this version of hybridpar")
    random = secrets.token_bytes(_RANDOM)
    both = greeting[len(_MAGIC) :] + random
    connection.sendall(random + _code(token, "worker", address, both) + more)
    try:
        answer = _receive(connection, _CODE)
    except ConnectionError as error:
        text = f"it did not let this worker in; {TOKEN_VARIABLE} must be equal everywhere"
        raise ConnectionResetError(text) from error
    if not hmac.compare_digest(answer, _code(token, "server", address, both)):
        raise HandshakeError("no server of this job")


def end(connection: socket.socket) -> None:
    """Close a connection, and end a wait of another thread for it. Safe to call twice."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # closing alone does not wake a thread that reads
    connection.close()


class Door:
    """Where those call who know the token. What a stranger does there, or does not do, changes nothing.

    Who calls has a thread, and so many seconds for the handshake; of more than `most` that are in it the oldest gives
    way.
    """

    def __init__(self, listener: socket.socket, address: str, token: str, seconds: float, most: int) -> None:
        self._listener, self._address, self._token, self._seconds = listener, address, token, seconds
        self._most = most
        self._strangers: dict[socket.socket, bool] = {}  # in their handshake, the oldest first

    def open(
        self,
        welcome: Callable[[socket.socket, bytes], None],
        refused: Callable[[str, str], None] = lambda source, reason: None,
        more: int = 0,
    ) -> None:
        """Let in who calls until the door is closed: each is welcomed on its thread, with what it said of itself.

        Of who is not let in the address is told, and why.
        """

        def greet(stranger: socket.socket, source: str) -> None:
            def admit() -> bool:
                return self._strangers.pop(stranger, False)

            try:
                said = let_in(stranger, self._token, self._address, self._seconds, more, admit)
            except (OSError, HandshakeError) as error:
                was_waiting = self._strangers.pop(stranger, False)
                end(stranger)
                refused(source, str(error) if was_waiting else "it left, or too many came at the same time")
            else:
                welcome(stranger, said)

        def attend() -> None:
            while True:
                try:
                    stranger, address = self._listener.accept()
                except OSError:
                    if self._listener.fileno() < 0:
                        return
                    time.sleep(0.01)
                    continue
                self._strangers[stranger] = True
                for oldest in list(self._strangers)[: -self._most]:
                    if self._strangers.pop(oldest, False):
                        end(oldest)
                source = address[0] if address else ""
                try:
                    threading.Thread(target=greet, args=(stranger, source), daemon=True).start()
                except RuntimeError as error:  # no thread is left
                    self._strangers.pop(stranger, None)
                    end(stranger)
                    refused(source, str(error))

        threading.Thread(target=attend, daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        end(self._listener)
        for stranger in list(self._strangers):
            end(stranger)


def _receive(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    data = b""
    while len(data) < count:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed during the handshake")
        data += more
    return data


def _code(token: str, role: str, address: str, both: bytes) -> bytes:
    return hmac.new(token.encode(), f"{role} {address} ".encode() + both, hashlib.sha256).digest()
