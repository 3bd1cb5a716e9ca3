"""A pool of child processes that have TVM loaded and compile, so that a crash of the compiler is lost alone.

A `Builder` keeps child processes that have TVM loaded and compile what they are asked for, each one thing at a time. A
request that crashes its child, or takes too long, is lost alone: the child is replaced and the next request is served.

This module imports no TVM; the children run `hybridpar.codegen.build`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridpar.codegen.cache import TIMEOUT, KernelsUnavailable


@dataclass(frozen=True)
class Request:
    """What is to be compiled to one object file, or to source for CUDA.

    Attributes:
        sources: Files with a function `define(writer, **arguments)` each, that returns functions of TIR by name.
        arguments: Further arguments of `define`, which JSON can tell.
        target: "cpu" for an object file for this machine; "cuda" for CUDA C, written by a `CudaWriter`.
    """

    sources: Sequence[Path]
    arguments: dict[str, Any] = field(default_factory=dict)
    target: str = "cpu"

    @property
    def line(self) -> bytes:
        """As a child reads it."""
        sources = [str(one) for one in self.sources]
        told = {"sources": sources, "arguments": self.arguments, "target": self.target}
        return json.dumps(told).encode() + b"\n"


@dataclass(frozen=True)
class Built:
    """What the compiler made of a request.

    Attributes:
        names: The functions.
        image: The object file, or the source for CUDA.
    """

    names: tuple[str, ...]
    image: bytes


class Builder:
    """Compiles in child processes; a context manager, at whose end they are gone."""

    def __init__(self, workers: int = 1, timeout: float = TIMEOUT) -> None:
        self._timeout = timeout
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="build")
        self._own = threading.local()
        self._children: set[_Child] = set()
        self._changing = threading.Lock()
        self._closed = False

    def submit(self, request: Request) -> Future[Built]:
        """Ask for something to be built."""
        return self._pool.submit(self._build, request)

    def build(self, request: Request) -> Built:
        """Have something built, and wait."""
        return self.submit(request).result()

    def close(self) -> None:
        """End the children, also amid a request; what was not begun is cancelled."""
        with self._changing:
            self._closed = True
            for child in self._children:
                child.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for child in self._children:
            child.close()
        self._children.clear()

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self, request: Request) -> Built:
        child = getattr(self._own, "child", None) or self._start()
        try:
            return child.ask(request, self._timeout)
        except _Lost as error:
            with self._changing:
                self._children.discard(child)
            child.close()
            self._own.child = None
            raise KernelsUnavailable(str(error)) from None

    def _start(self) -> _Child:
        with self._changing:
            if self._closed:
                raise KernelsUnavailable("building was stopped")
            child = self._own.child = _Child()
            self._children.add(child)
        return child


def child_environment() -> dict[str, str]:
    """The environment of a Python that imports this package, too."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class _Lost(Exception):
    """A child is not fit for use any more, and why."""


class _Child:
    """One process that compiles."""

    def __init__(self) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hybridpar.codegen.build"],
            env={**child_environment(), "TVM_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            bufsize=0,
            process_group=0,  # Ctrl-C is for the parent, which may want to finish
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._ready = False

    def ask(self, request: Request, timeout: float) -> Built:
        """Have one thing compiled."""
        if not self._ready:
            self._line(time.monotonic() + TIMEOUT, "starting TVM")
            self._ready = True
        deadline = time.monotonic() + timeout
        try:
            self._requests.write(request.line)
        except OSError:
            raise self._lost() from None
        answer = json.loads(self._line(deadline, "building"))
        if "error" in answer:
            raise KernelsUnavailable(f"building failed: {answer['error']}")
        return Built(tuple(answer["names"]), self._exactly(answer["bytes"], deadline))

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> None:
        """End it and wait for that."""
        self.kill()
        self._process.wait()
        for stream in (self._requests, self._answers, self._complaints):
            with contextlib.suppress(OSError):
                stream.close()

    def _line(self, deadline: float, doing: str) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):  # few and short, so byte by byte does no harm
            line += self._some(1, deadline, doing)
        return bytes(line)

    def _exactly(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            data += self._some(count - len(data), deadline, "building")
        return bytes(data)

    def _some(self, most: int, deadline: float, doing: str) -> bytes:
        """What the child writes next."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            if not selector.select(max(deadline - time.monotonic(), 0)):
                raise _Lost(f"{doing} took too long and was given up")
        data = self._answers.read(most)
        if not data:
            raise self._lost()
        return data

    def _lost(self) -> _Lost:
        """Say how it ended."""
        code = self._process.wait()
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").strip().splitlines() or [f"exit {code}"]
        return _Lost(f"building failed: the compiler ended with {code}: {said[-1]}")
