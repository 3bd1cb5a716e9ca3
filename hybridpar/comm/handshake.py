"""The handshake of a connection: both ends prove that they know the job's token.

The token itself is never sent. The server sends a random number of 32 bytes; the worker replies with one of its own and
a code (HMAC-SHA256) over both; the server checks it and answers with a code over both. A recorded reply fits no other
greeting. The codes are also over the server's address, so that a reply sent to a wrong address is of no use at the
right one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

from hybridpar.errors import UsageError
from hybridpar.machine.supervise import TOKEN_VARIABLE

_LEAST_TOKEN = 16

_MAGIC = b"hyp2"
_RANDOM, _CODE = 32, hashlib.sha256().digest_size

#: Bytes of what is sent, in this order: by the server, the worker, the server.
GREETING_BYTES, REPLY_BYTES, PROOF_BYTES = len(_MAGIC) + _RANDOM, _RANDOM + _CODE, _CODE


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


class ServerHandshake:
    """The server's side of one connection."""

    def __init__(self, token: str, address: str) -> None:
        self._token, self._address = token, address
        self._random = secrets.token_bytes(_RANDOM)
        self.greeting = _MAGIC + self._random

    def proof(self, reply: bytes) -> bytes:
        """What to answer to a reply."""
        both = self._random + reply[:_RANDOM]
        if not hmac.compare_digest(reply[_RANDOM:], _code(self._token, "worker", self._address, both)):
            raise HandshakeError("it does not know the job's token")
        return _code(self._token, "server", self._address, both)


class WorkerHandshake:
    """The worker's side of one connection."""

    def __init__(self, token: str, address: str) -> None:
        self._token, self._address = token, address
        self._both = b""

    def reply(self, greeting: bytes) -> bytes:
        """What to answer to a greeting."""
        if len(greeting) != GREETING_BYTES or not greeting.startswith(_MAGIC):
            raise HandshakeError("no server of this version of hybridpar")
        own = secrets.token_bytes(_RANDOM)
        self._both = greeting[len(_MAGIC) :] + own
        return own + _code(self._token, "worker", self._address, self._both)

    def check(self, proof: bytes) -> None:
        """Check that the server knows the token."""
        if not hmac.compare_digest(proof, _code(self._token, "server", self._address, self._both)):
            raise HandshakeError("no server of this job")


def _code(token: str, role: str, address: str, both: bytes) -> bytes:
    return hmac.new(token.encode(), f"{role} {address} ".encode() + both, hashlib.sha256).digest()
