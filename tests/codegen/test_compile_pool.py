"""Tests the pool of compiler processes: errors, crashes and time-outs lose one request each."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from hybridpar.codegen.build import Session
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built, Request

SOURCE = """
import os, time

def define(w, factor=2, crash=False, hang=False, wrong=False, noise=False):
    if noise:
        print("something that is no answer", flush=True)
        os.write(1, b"nor is this")
    if crash:
        os.kill(os.getpid(), 11)
    if hang:
        time.sleep(1000)
    def body(place, value):
        w.store(w.view(place, "int64"), w.t.int64(0), value * factor)
        if wrong:
            raise ValueError("not that way")
    return {"times": w.function("times", ("place", "value"), body)}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "times_source.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    with Builder(1, timeout=20.0) as own:
        yield own


def times(built: Built, value: int) -> int:
    place = ctypes.c_int64()
    Session().load(built, keep=False)["times"](ctypes.addressof(place), value)
    return place.value


def test_arguments_reach_the_source(builder: Builder, source: Path) -> None:
    assert [times(builder.build(Request((source,), {"factor": factor})), 7) for factor in (3, 5)] == [21, 35]


def test_what_is_printed_does_no_harm(builder: Builder, source: Path) -> None:
    assert times(builder.build(Request((source,), {"noise": True})), 4) == 8


def test_an_error_leaves_nothing_half_written(builder: Builder, source: Path) -> None:
    with pytest.raises(KernelsUnavailable, match="not that way"):
        builder.build(Request((source,), {"wrong": True}))
    assert times(builder.build(Request((source,))), 4) == 8
    with pytest.raises(KernelsUnavailable, match="nowhere"):
        builder.build(Request((source.with_name("nowhere.py"),)))


def test_a_crash_loses_one_request(builder: Builder, source: Path) -> None:
    requests = [Request((source,), {"crash": True}), Request((source,), {"factor": 6})]
    crash, other = [builder.submit(request) for request in requests]
    with pytest.raises(KernelsUnavailable, match=f"ended with -{signal.SIGSEGV.value}"):
        crash.result()
    assert times(other.result(), 2) == 12


def test_a_request_that_takes_too_long_is_lost_alone(
    builder: Builder, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(builder, "_timeout", 1.0)
        with pytest.raises(KernelsUnavailable, match="took too long"):
            builder.build(Request((source,), {"hang": True}))
    assert times(builder.build(Request((source,))), 4) == 8


def test_closing_ends_what_is_being_built(source: Path) -> None:
    builder = Builder(1)
    assert builder.build(Request((source,))).names
    hanging, waiting = (builder.submit(Request((source,), {"hang": True})) for _ in range(2))
    (child,) = builder._children
    builder.close()
    for future in (hanging, waiting):
        with pytest.raises((KernelsUnavailable, CancelledError)):
            future.result(timeout=10)
    with pytest.raises(ProcessLookupError):
        os.kill(child._process.pid, 0)


def test_code_is_unloaded_with_its_last_function(builder: Builder, source: Path) -> None:
    built = builder.build(Request((source,)))
    session = Session()
    functions = [session.load(built, keep=False)["times"] for _ in range(50)]

    def mapped() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    functions.pop()
    before = mapped()
    for _ in range(1000):  # more than fit the session's memory at a time
        session.load(built, keep=False)["times"]
    assert mapped() <= before + 8
