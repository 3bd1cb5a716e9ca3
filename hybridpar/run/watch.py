"""Serves the report page of a run while it goes on, to browsers of this machine that know the address.

The server listens on 127.0.0.1 only, answers nothing but what lies below a random path, reads the files of the run and
writes none. The page asks for new data every two seconds, and gets them where a file has changed.
"""

from __future__ import annotations

import http.server
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hybridpar.errors import HybridparError, UsageError
from hybridpar.observe.page import page_html, page_json
from hybridpar.run.page_data import open_runs, page_data

#: Seconds after which data are read again though no file has changed: a run that stands still is told so.
_LONGEST = 30.0


class _Live:
    """The data of the page, read again where a file has changed.

    Args:
        directories: Of the runs.
        clock: Tells the time in seconds.
    """

    def __init__(self, directories: Sequence[Path], clock: Callable[[], float]) -> None:
        self._runs, self._clock = open_runs(directories), clock
        self._lock = threading.Lock()
        self._stamp: list[Any] | None = None
        self._read_at, self._version = 0.0, 0
        self._data: dict[str, Any] = {}

    def data(self) -> dict[str, Any]:
        """What the page shows now, with its `version`."""
        with self._lock:
            stamp = [run.stamp() for run in self._runs]
            if stamp != self._stamp or self._clock() - self._read_at > _LONGEST:
                try:
                    found = page_data(self._runs, live=True)
                except HybridparError:
                    # A run that is being replaced has no run.json for a moment: what was read last stands.
                    if not self._data:
                        raise
                else:
                    self._version += {**found, "made": ""} != {**self._data, "made": ""}
                    self._data = found
                self._stamp, self._read_at = stamp, self._clock()
            return {**self._data, "version": self._version}


class PageServer(http.server.ThreadingHTTPServer):
    """Serves the page of some runs on 127.0.0.1.

    Args:
        directories: Of the runs.
        port: Port to listen on; 0 for any that is free.
        clock: Tells the time in seconds.

    Raises:
        UsageError: A directory holds no run, or the port is taken.
    """

    daemon_threads = True

    def __init__(self, directories: Sequence[Path], port: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.live = _Live(directories, clock)
        self._token = secrets.token_urlsafe(16)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "there is no such port"
            raise UsageError(
                f"cannot listen on port {port}: {reason}", fix="Leave --port away for one that is free."
            ) from error

    @property
    def address(self) -> str:
        """Where browsers find the page."""
        return f"http://127.0.0.1:{self.server_port}/{self._token}/"

    def knows(self, host: str | None, token: str) -> bool:
        """Whether a request is for this page, and comes by this address.

        Args:
            host: Its header Host: another name may be that of a foreign page, which has led its own name here.
            token: The first part of its path.
        """
        hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        return host in hosts and secrets.compare_digest(token.encode(), self._token.encode())

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        """A browser that goes away in the midst of an answer is no error."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        _, token, *rest = address.path.split("/")
        if not rest or not self.server.knows(self.headers.get("Host"), token):
            self._answer(404)
        elif rest == [""]:
            self._answer(200, "text/html", page_html(self.server.live.data()))
        elif rest == ["data"]:
            data = self.server.live.data()
            known = parse_qs(address.query).get("v") == [str(data["version"])]
            self._answer(204) if known else self._answer(200, "application/json", page_json(data))
        else:
            self._answer(404)

    def _answer(self, code: int, kind: str = "text/plain", text: str = "") -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is told of requests."""
