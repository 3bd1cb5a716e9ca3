"""A pool of child processes that have TVM loaded and compile, so that a crash of the compiler is lost alone.

A `Builder` keeps child processes that have TVM loaded and compile what they are asked for, each one thing at a time. A
request that crashes its child, or takes too long, is lost alone: the child is replaced and the next request is served.

This module imports no TVM; the children run `hybridpar.codegen.build`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from hybridpar.codegen.cache import TIMEOUT, KernelsUnavailable


@dataclass(frozen=True)
class Request:
    """What is to be compiled to one object file, or to source for CUDA.

    Attributes:
        sources: Files with a function `define(writer, **arguments)` each, that returns functions of TIR by name.
        arguments: Further arguments of `define`, which JSON can tell.
        target: "cpu" for an object file for this machine; "cuda" for CUDA C (`hybridpar.codegen.cuda_source`).
    """

    sources: Sequence[Path]
    arguments: dict[str, Any] = field(default_factory=dict)
    target: str = "cpu"


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
        #: The child of each thread of the pool.
        self._of_thread = threading.local()
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
        child = getattr(self._of_thread, "child", None) or self._start()
        try:
            return child.ask(request, self._timeout)
        except _Lost as error:
            with self._changing:
                self._children.discard(child)
            child.close()
            self._of_thread.child = None
            raise KernelsUnavailable(str(error)) from None

    def _start(self) -> _Child:
        with self._changing:
            if self._closed:
                raise KernelsUnavailable("building was stopped")
            child = self._of_thread.child = _Child()
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
        self._connection, end = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hybridpar.codegen.build", str(end.fileno())],
            env={**child_environment(), "TVM_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._complaints,
            stderr=self._complaints,
            pass_fds=[end.fileno()],
            process_group=0,  # Ctrl-C is for the parent, which may want to finish
        )
        end.close()
        self._ready = False

    def ask(self, request: Request, timeout: float) -> Built:
        """Have one thing compiled."""
        if not self._ready:
            self._answer(TIMEOUT, "starting TVM")
            self._ready = True
        try:
            self._connection.send(request)
        except OSError:
            raise self._lost() from None
        answer = self._answer(timeout, "building")
        if not isinstance(answer, Built):
            raise KernelsUnavailable(f"building failed: {answer}")
        return answer

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> None:
        """End it and wait for that."""
        self.kill()
        self._process.wait()
        self._connection.close()
        self._complaints.close()

    def _answer(self, seconds: float, doing: str) -> Any:
        """What the child sends next."""
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError):
            raise self._lost() from None
        raise _Lost(f"{doing} took too long and was given up")

    def _lost(self) -> _Lost:
        """Say how it ended."""
        code = self._process.wait()
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines() or [f"exit {code}"]
        return _Lost(f"building failed: the compiler ended with {code}: {lines[-1]}")
